"""Strengths of weights that SGD left noisy, from some more epochs of a copy at a small rate."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.equations.candidates import check_candidates
from tacit.equations.epochs import EpochAverages, average_epochs
from tacit.errors import InputError, check_number, check_type, check_whole
from tacit.fitting.fits import Fit, fit
from tacit.objective.borrowing import forked_randomness, restored
from tacit.objective.objective import Objective
from tacit.objective.randomness import find_generators
from tacit.objective.ranks import check_alone
from tacit.regularizers.family import Regularizer
from tacit.regularizers.weight_decay import unwrap_optimizer

SLOWER = 0.1
"""The learning rate of the copy, as a part of the one that the optimizer has now."""
BURN_IN = 1
"""Epochs before the first recorded one."""
FASTER, FASTER_EPOCHS = 2.0, 2
"""How much faster, and for how many epochs, the copy is trained before, to see what the finite step
size changes."""

TrainEpoch = Callable[[nn.Module, Optimizer], object]


def settle(
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    optimizer: Optimizer,
    train_epoch: TrainEpoch,
    *,
    epochs: int = 5,
    rate: float | None = None,
    known: Mapping[Regularizer, float] | None = None,
) -> Fit:
    """The strengths at weights that SGD left noisy: a copy is trained on slowly, and averaged.

    The last weights of a run with a constant step size η are one draw from a cloud around the
    minimum of L + R, whose noise hides the strengths: its variance is in proportion to η. A copy of
    the model and of the optimizer is trained on by your own epoch function, at a tenth of the
    rate, and the fit is that of `average_epochs` over its last epochs,

        Σ λ_k ∇R_k = −∇L(θ̄) − Δθ/time,

    in which the drift Δθ/time accounts for what has not come to rest: training may be unfinished,
    and if no penalty acts, the fit explains little and says so. Finite steps add an error in
    proportion to the rate r, which is alike in all epochs: two epochs at 2r come first, and the
    error bars "training" contain |λ̂(2r) − λ̂(r)|, which estimates it.

    The model, the optimizer with its state, and the states of random generators (torch's, NumPy's,
    Python's, and those that `train_epoch` encloses, such as a loader's) are unchanged afterwards.

    Gradients of `smooth_l1`, `l1` and other sums over single weights are averaged over all steps,
    because they change within the noise.

    Traps: `train_epoch` must use the model and optimizer that it is called with, apply the same
    penalties as training did, and leave schedules out; it calls `model.train()` if training did.
    What it keeps itself (a GradScaler, counters) goes on counting. Memory: two copies of the model
    and of the optimizer's state, beside what `average_epochs` takes.

    Args:
        objective: the loss over the training data, without any penalty, of the trained model.
        regularizers: candidates whose strengths are estimated.
        optimizer: the one that trained the model: torch's SGD, Adam or AdamW. Of a wrapper, the
            copy is of the optimizer inside.
        train_epoch: train_epoch(model, optimizer) runs one epoch over the whole training data.
        epochs: how many epochs to record, after one that is not and two at twice the rate. With
            only one there are no error bars, and no epochs at twice the rate.
        rate: the largest learning rate of any parameter group; the others keep their proportions.
            By default a tenth of what it is now. Training must be stable at twice this rate.
        known: penalties that training did apply, with their strengths.
    """
    check_type("objective", objective, Objective, "a tacit.Objective of the trained model")
    check_alone(objective.ranks, "settle")
    check_type("train_epoch", train_epoch, Callable, "a function train_epoch(model, optimizer)")
    check_whole("epochs", epochs)
    candidates = check_candidates(regularizers, known)
    optimizer = unwrap_optimizer(optimizer)
    devices = {parameter.device for parameter in objective.model.parameters()}
    with (
        restored(objective.model),
        forked_randomness(devices, find_generators(train_epoch)),
        _untouched(objective.model, optimizer) as check,
    ):
        model, slow = _copy(objective.model, optimizer)
        rate = _set_rates(slow, rate)
        averaged = [r for r in (*candidates.estimated, *candidates.known) if r.entrywise]

        def train(count: int, burn_in: int) -> EpochAverages:
            averages = average_epochs(model, slow, averaged=averaged, epochs=count)
            for _ in range(burn_in + count):
                check(_train_one(train_epoch, model, slow))
                averages.end_epoch()
            averages.close()
            return averages

        fast = None
        if epochs > 1:
            _set_rates(slow, FASTER * rate)
            fast = train(FASTER_EPOCHS, BURN_IN)
            _set_rates(slow, rate)
        averages = train(epochs, 0 if fast else BURN_IN)
    settled = fit(averages.equations(objective, regularizers, known=known))
    if fast is None:
        return settled
    return _with_step_errors(settled, fit(fast.equations(objective, regularizers, known=known)))


def _with_step_errors(settled: Fit, at_faster: Fit) -> Fit:
    """The fit with error bars that contain what the finite step size changes."""
    bars = settled.error_bars.get("training")
    if bars is None:
        return settled
    changes = [s - at_faster.strengths[name] for name, s in settled.strengths.items()]
    errors = torch.tensor(changes, dtype=torch.float64) / (FASTER - 1)
    return settled.with_error_bars(
        replace(
            bars,
            covariance=bars.covariance + errors.square().diag(),
            basis=f"{bars.basis} and their step size",
            measured="",
        )
    )


def _train_one(train_epoch: TrainEpoch, model: nn.Module, optimizer: Optimizer) -> int:
    """Train for one epoch; how many updates had gradients of this model."""
    updates = 0

    def count(*_: object) -> None:
        nonlocal updates
        updates += any(parameter.grad is not None for parameter in model.parameters())

    hook = optimizer.register_step_pre_hook(count)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    try:
        train_epoch(model, optimizer)
    finally:
        hook.remove()
    if (changed := [float(group["lr"]) for group in optimizer.param_groups]) != rates:
        raise InputError(
            f"train_epoch changed the learning rates of the copy from {rates} to {changed}: leave "
            "rates and schedules out of it, and pass rate= to settle."
        )
    return updates


def _copy(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Copies of both, the optimizer's of the copied parameters, with hooks of gradients."""
    try:
        copied, optimizer = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise InputError(
            f"this {type(model).__name__} and its optimizer cannot be copied "
            f"({type(error).__name__}: {error}): train a copy of your own at a small rate, with "
            "tacit.average_epochs."
        ) from error
    for original, parameter in zip(model.parameters(), copied.parameters(), strict=True):
        for hook in (original._backward_hooks or {}).values():  # deepcopy leaves them out
            parameter.register_hook(hook)
    return copied, optimizer


def _set_rates(optimizer: Optimizer, rate: float | None) -> float:
    """Set and return the largest rate; those of other groups keep their proportion to it."""
    groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups]
    largest = max(rates)
    if rate is None:
        if not largest:
            raise InputError(
                "all learning rates of the optimizer are zero, as at the end of a schedule: pass "
                "rate=, a tenth of what training used."
            )
        rate = SLOWER * largest
    check_number("rate", rate, above=0)
    if not largest:  # a schedule that ended remembers the rates that it began with
        rates = [float(group.get("initial_lr", 1.0)) for group in groups]
        largest = max(rates)
    for group, before in zip(groups, rates, strict=True):
        value = float(rate) * before / largest
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
    return float(rate)


@contextmanager
def _untouched(model: nn.Module, optimizer: Optimizer) -> Iterator[Callable[[int], None]]:
    """Restore the optimizer if it changes.

    Yields check(updates), which refuses a `train_epoch` that trained the user's own model, stepped
    the user's own optimizer, or made no update of the copies.
    """
    before = _fingerprint(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())

    def check(updates: int) -> None:
        rule = "it must train the model by the optimizer that it is called with"
        if _fingerprint(model, optimizer) != before:
            raise InputError(
                "train_epoch changed your own model or optimizer (also its learning rate, as a "
                f"schedule does), which have been restored: {rule}, def train_epoch(model, "
                "optimizer), without a schedule."
            )
        if not updates:
            raise InputError(f"train_epoch made no update of the copy: {rule}.")

    try:
        yield check
    finally:
        if _fingerprint(model, optimizer)[1:] != before[1:]:
            optimizer.load_state_dict(state)


def _fingerprint(model: nn.Module, optimizer: Optimizer) -> tuple[Any, ...]:
    """Versions of all tensors, which every change in place raises, and the groups' options."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [value for state in optimizer.state.values() for value in state.values()]
    states = [(id(v), v._version) if isinstance(v, Tensor) else repr(v) for v in values]
    groups = [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return [tensor._version for tensor in tensors], states, groups
