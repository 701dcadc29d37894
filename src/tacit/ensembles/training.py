"""Training all members as one program; each ends with the weights of a separate training loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import (
    check_dropout_layers,
    check_ensemble,
    check_member_loss,
    expand_dropout_rates,
)
from tacit.ensembles.data import MemberData, assign_data
from tacit.ensembles.denormals import flushed_denormals
from tacit.ensembles.evaluation import mean_loss
from tacit.ensembles.layout import Layout
from tacit.ensembles.members import Ensemble, check_seeds
from tacit.ensembles.optimizers import State, initial_rates, schedule_factor
from tacit.ensembles.penalties import Penalties, Strengths, expand_penalties
from tacit.ensembles.plan import Plan
from tacit.ensembles.randomness import MemberRandomness
from tacit.ensembles.run import (
    EpochMeans,
    FlatEpoch,
    Run,
    RunRecorder,
    nonfinite_members,
    zero_nonfinite,
)
from tacit.errors import InputError
from tacit.objective.losses import Loss
from tacit.objective.params import Params
from tacit.objective.passes import track
from tacit.regularizers import Regularizer

BatchPenalty = Callable[[Params, Tensor, Tensor, Tensor], Tensor]
"""batch_penalty(params, inputs, targets, members): one value per member."""


def train(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    plan: Plan,
    *,
    seeds: Iterable[int],
    penalties: Mapping[Regularizer, Strengths] | None = None,
    dropout: float | Sequence[float] | Tensor | None = None,
    batch_penalty: BatchPenalty | None = None,
) -> Run:
    """Train all members on loss + Σ_k λ_k R_k at once.

    Each member ends with the weights that a plain loop over one module gives, with batches in the
    order of `order_generator(seed)` and masks from `mask_generator(seed)`. Members that stop are
    frozen and cost nothing further. On a CPU, denormal numbers are flushed while training.

    Args:
        ensemble: the initial members, on the device and in the dtype to train in.
        loss: mean loss of a batch, loss(outputs, targets).
        data: (inputs, targets) that all members share, or `Data`.
        plan: optimizer, epochs, batch size, stopping.
        seeds: one per member, for its batch order and masks; members with equal seeds share both.
        penalties: penalties with one strength for all members, or one per member.
        dropout: the rate of each member's dropout layers; by default the rate of the layers.
        batch_penalty: a penalty that depends on the batch, batch_penalty(params, inputs, targets,
            members), with stacked arguments and the indices of the members that are still
            training. It returns one value for each of them.
    """
    check_ensemble(ensemble)
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}: pass ensembles.Plan(optimizer, …).")
    seeds = check_seeds(seeds, len(ensemble))
    active = _initial_state(ensemble, loss, data, plan, seeds, penalties, dropout)
    active = replace(active, batch_penalty=batch_penalty)
    for checked in (active.data, active.validation):
        if checked is not None:
            check_member_loss(ensemble, loss, checked)
    if dropout is not None:
        check_dropout_layers(ensemble)
    _check_averaged(plan, ensemble)
    recorder = RunRecorder(ensemble, plan)
    with flushed_denormals(), torch.enable_grad():
        for number in track(range(recorder.max_epochs), total=recorder.max_epochs, label="epochs"):
            epoch, monitored = active.train_epoch(number)
            finished = recorder.record(number, epoch, active.theta, monitored)
            if bool(finished.all()):
                break
            if bool(finished.any()):
                active = active.select(torch.nonzero(~finished)[:, 0])
    return recorder.run()


def _check_averaged(plan: Plan, ensemble: Ensemble) -> None:
    first_member = ensemble.member(0)
    for regularizer in plan.averaged:
        if any(len(columns) > 1 for columns in regularizer.bind(first_member).active.values()):
            raise InputError(
                f"averaged: {regularizer.name!r} has several strengths on one tensor, and their "
                "gradients cannot be averaged separately. Average families with one strength."
            )


@dataclass(eq=False)
class ActiveMembers:
    """The members that are still training: weights, optimizer state, data and randomness."""

    ensemble: Ensemble
    loss: Loss
    plan: Plan
    members: Tensor
    """Their indices in the ensemble, ascending."""
    layout: Layout
    theta: Tensor
    """Weights, (members, parameters)."""
    state: State
    rates: Tensor
    """Step sizes before any milestone."""
    data: MemberData
    validation: MemberData | None
    randomness: MemberRandomness
    penalties: Penalties
    dropout: Tensor | None
    """Dropout rates, or None for those of the layers."""
    batch_penalty: BatchPenalty | None = None
    steps: int = 0

    def select(self, remaining: Tensor) -> "ActiveMembers":
        """Continue with some of these members.

        Trap: `randomness` is restricted in place, so this object must not be used afterwards.
        """
        self.randomness.restrict_to(remaining)
        return replace(
            self,
            members=self.members[remaining],
            theta=self.theta[remaining],
            state={key: average[remaining] for key, average in self.state.items()},
            rates=self.rates[remaining],
            data=self.data.select(remaining),
            validation=None if self.validation is None else self.validation.select(remaining),
            penalties=self.penalties.select(remaining),
            dropout=None if self.dropout is None else self.dropout[remaining],
        )

    def train_epoch(self, number: int) -> tuple[FlatEpoch, Tensor]:
        """Train one epoch in place; return what is recorded of it, and the monitored values."""
        optimizer, examples = self.plan.optimizer, self.data.examples
        rates = self.rates * schedule_factor(optimizer, number)
        start = self.theta.clone()
        means = EpochMeans(self.theta, self.layout, self.plan.averaged)
        loss_sum, penalty_sum = torch.zeros_like(rates), torch.zeros_like(rates)
        order = self.randomness.draw_orders(examples)
        for inputs, targets in self.data.batches(order, self.plan.batch_size):
            means.add(self.theta)
            loss, penalty, gradient = self._gradient(inputs, targets)
            loss_sum.add_(loss, alpha=inputs.shape[1])
            penalty_sum.add_(penalty, alpha=inputs.shape[1])
            self.steps += 1
            optimizer.step(self.theta, gradient, self.state, rates, self.steps)
        steps_per_epoch = -(-examples // self.plan.batch_size)
        epoch = FlatEpoch(
            members=self.members,
            average=means.weights(),
            displacement=self.theta.double() - start.double(),
            time=steps_per_epoch * optimizer.flow_time(rates),
            metric=optimizer.metric(self.state, self.steps),
            columns={r: column.double() for r, column in means.columns().items()},
        )
        return epoch, self._monitored(loss_sum / examples, penalty_sum / examples)

    def _gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, penalties, and the gradient of their sum, (members, parameters)."""
        needs_finite = self.penalties.needs_autograd
        theta = zero_nonfinite(self.theta) if needs_finite else self.theta
        leaves = {n: p.detach().requires_grad_() for n, p in self.layout.views(theta).items()}
        loss, penalty = self._differentiated(leaves, inputs, targets)
        tensors = torch.autograd.grad(
            (loss + penalty).sum(), list(leaves.values()), materialize_grads=True
        )
        gradient = self.layout.flatten(dict(zip(leaves, tensors, strict=True)))
        with torch.no_grad():
            entrywise = self.penalties.add_entrywise(self.theta, gradient)
            if needs_finite:
                gradient[nonfinite_members(self.theta)] = torch.nan
        return loss.detach(), penalty.detach() + entrywise, gradient

    @cached_property
    def _differentiated(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Losses and penalties that autograd differentiates, compiled once if the plan says so."""
        forward, losses = self.ensemble.forward, vmap(self.loss)
        apply_dropout = self.randomness.dropout(self.dropout)

        def evaluate(params: Params, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss = losses(forward(params, inputs, apply_dropout), targets)
            penalty = self.penalties.autograd_values(params) + torch.zeros_like(loss)
            if self.batch_penalty is not None:
                values = self.batch_penalty(params, inputs, targets, self.members)
                if values.shape != loss.shape:
                    raise InputError(
                        f"batch_penalty returned shape {tuple(values.shape)} for {len(loss)} "
                        "members: return one value per member."
                    )
                penalty = penalty + values
            return loss, penalty

        return evaluate if self.plan.compile is None else self.plan.compile(evaluate)

    def _monitored(self, loss: Tensor, penalty: Tensor) -> Tensor:
        """The values that stopping is decided on."""
        stopping = self.plan.stopping
        if stopping is None or stopping.monitor == "objective":
            return loss + penalty
        if self.validation is None:
            return loss
        current = self.ensemble.with_params(self.layout.views(self.theta))
        return mean_loss(current, self.loss, self.validation)


def _initial_state(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    plan: Plan,
    seeds: list[int],
    penalties: Mapping[Regularizer, Strengths] | None,
    dropout: float | Sequence[float] | Tensor | None,
) -> ActiveMembers:
    """All members before the first epoch."""
    params = {n: p.detach() for n, p in ensemble.params.items()}
    layout, like, members = Layout.of(params), ensemble.first_tensor, len(ensemble)
    theta = layout.flatten(params)
    validation = None if plan.stopping is None else plan.stopping.validation
    return ActiveMembers(
        ensemble=ensemble,
        loss=loss,
        plan=plan,
        members=torch.arange(members, device=like.device),
        layout=layout,
        theta=theta,
        state=plan.optimizer.initial_state(theta),
        rates=initial_rates(plan.optimizer, members, like),
        data=assign_data(data, members, like),
        validation=None if validation is None else assign_data(validation, members, like),
        randomness=MemberRandomness(seeds, like.device),
        penalties=expand_penalties(penalties, params),
        dropout=None if dropout is None else expand_dropout_rates(dropout, members, like),
    )
