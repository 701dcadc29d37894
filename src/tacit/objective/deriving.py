"""Objectives made from an objective: the same model and data, with a technique applied."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tacit.errors import InputError, check_whole
from tacit.objective.batches import BatchPair, needs_batch_size, open_batches
from tacit.objective.compared import ComparedDerivatives
from tacit.objective.losses import (
    BatchMean,
    ChangedBatches,
    ExampleLosses,
    Loss,
    LossPerBatch,
    MeanLoss,
    Reader,
    WholeBatches,
)
from tacit.objective.models import named_modules
from tacit.objective.objective import Objective, Shift
from tacit.objective.passes import Move, Passes
from tacit.objective.randomness import Noise, seed_reading, takes_noise
from tacit.objective.scale import Scale

DRAWS = 16
"""Draws of a technique unless draws= is passed: the eight mirrored pairs of difference equations.
An objective that averages draws itself has a pair for each of them."""

Change = Callable[..., BatchPair]
"""change(model, pair, noise): the batch to be read in place of a batch, and its weights."""


def user_reader(objective: Objective) -> MeanLoss | ExampleLosses | LossPerBatch:
    """How the user's own loss is read, without what techniques and batch norm put around it."""
    reader = objective._passes.loss
    while isinstance(reader, WholeBatches | ChangedBatches):
        reader = reader.reader
    return reader


def has_technique(objective: Objective) -> bool:
    """Whether a technique changes its batches or moves its weights; label smoothing does not."""
    reader = objective._passes.loss
    reader = reader.reader if isinstance(reader, WholeBatches) else reader
    return has_shift(objective) or isinstance(reader, ChangedBatches)


def has_shift(objective: Objective) -> bool:
    """Whether it is evaluated at θ + shift(θ), as with sam()."""
    return objective._shift is not None


def probe_of(objective: Objective) -> BatchPair:
    """A few examples of the data with their weights, on the model's device."""
    return objective._passes.to_model(objective._probe)


@torch.inference_mode(mode=False)
def probe_mean(objective: Objective) -> BatchMean:
    """The mean of the user's own loss over a few examples, in eval mode, with what it came from."""
    reader, passes, (batch, _) = user_reader(objective), objective._passes, probe_of(objective)
    noisy = not isinstance(reader, MeanLoss) and takes_noise(reader.function, True, 2)
    noise = Noise(0, 0, 0) if noisy else None
    with passes.prepared(training=False), torch.enable_grad():
        return passes.call(
            objective.point(), lambda model, _: reader.mean(model, (batch, None), noise)
        )


@torch.inference_mode(mode=False)
def count_calls(objective: Objective, names: Sequence[str]) -> dict[str, list[Any]]:
    """What these modules return in one forward pass of a few examples, one item per call."""
    passes, pair = objective._passes, probe_of(objective)
    returned: dict[str, list[Any]] = {name: [] for name in names}

    def read(model: nn.Module, noise: Noise | None) -> None:
        modules = named_modules(model)
        handles = [
            modules[name].register_forward_hook(
                lambda _, __, output, n=name: returned[n].append(output)
            )
            for name in names
        ]
        try:
            passes.loss.mean(model, pair, noise)
        finally:
            for handle in handles:
                handle.remove()

    with passes.prepared(training=passes.training), torch.no_grad():
        passes.call(objective.point(), read, draw=0)
    return returned


def with_noise(
    objective: Objective,
    label: str,
    *,
    change: Change | None = None,
    move: Move | None = None,
    copies: int = 0,
    draws: int | None = None,
    seed: int = 0,
) -> Objective:
    """The objective with every batch changed, or the weights moved, by noise in mirrored pairs.

    The mode of the model stays: noise on the inputs of a model in eval mode does not make its
    dropout active. `copies` is the number of rows per example of changed batches that mix examples;
    0 where every row is one example.
    """
    _check_unshifted(objective)
    if draws is None:
        own = objective.draws if objective.paired else 2 * objective.draws
        draws = own if objective.draws > 1 else DRAWS
    check_whole("draws", draws, 2)
    check_whole("seed", seed, 0)
    if draws % 2:
        raise InputError(
            f"draws is {draws}: draws come in mirrored pairs. Pass an even number, such as 16."
        )
    passes = objective._passes
    reader = _changed(passes.loss, change, noisy=passes.paired, copies=copies)
    if move is not None and passes.move is not None:
        move = _one_after_the_other(passes.move, move)
    # Pair j has the dropout masks and the reading of the data that draw j of the objective has, so
    # that both cancel from the difference.
    passes = replace(
        passes, loss=reader, move=move or passes.move, draws=draws, noise_seed=seed, paired=True,
        pairs_share=passes.pairs_share or not passes.paired,
    )  # fmt: skip
    derived = _derive(objective, passes, label)
    derived.draws, derived.seed, derived.paired, derived.random = draws, seed, True, True
    _check_repeatable(derived, label)
    return derived


def with_loss(objective: Objective, label: str, loss: Loss) -> Objective:
    """The objective with another loss(output, target)."""
    _check_unshifted(objective)
    passes = objective._passes
    derived = _derive(objective, replace(passes, loss=_replaced(passes.loss, loss)), label)
    derived.loss = loss
    return derived


def with_shift(objective: Objective, label: str, shift: Shift) -> Objective:
    """The objective at θ + shift(θ), where the shift counts as constant in derivatives."""
    _check_unshifted(objective)
    derived = _derive(objective, objective._passes, label)
    derived._shift = shift
    return derived


def with_scale(
    derived: Objective, scale: Scale, at_scale: Callable[[float], Objective]
) -> Objective:
    """The technique's objective with its scale, and with how to make it at another scale."""
    derived.scale, derived.at_scale = scale, at_scale
    return derived


def with_batch_size(objective: Objective, batch_size: int) -> Objective | None:
    """The objective with tensors cut into other batches; None where the data comes in batches."""
    passes = objective._passes
    if not needs_batch_size(objective.data) or passes.loss.interacting or objective.regroups:
        return None
    batches = open_batches(objective.data, objective.weights, batch_size)
    derived = _derive(objective, replace(passes, batches=batches), "")
    derived.batch_size = batch_size
    return derived


def _derive(objective: Objective, passes: Passes, label: str) -> Objective:
    derived = copy(objective)
    derived._passes, derived.base = passes, objective
    derived.scale = derived.at_scale = None
    derived.compared = ComparedDerivatives(passes, objective._probe)
    derived.loss_name = f"{objective.loss_name} with {label}" if label else objective.loss_name
    return derived


def _one_after_the_other(first: Move, second: Move) -> Move:
    """The weights moved by one technique, and then by another."""
    return lambda params, noise: second(first(params, noise), noise)


def _changed(
    reader: Reader | LossPerBatch, change: Change | None, *, noisy: bool, copies: int
) -> WholeBatches | ChangedBatches:
    """The reader of changed batches, inside of the one that makes a batch the unit."""
    if isinstance(reader, WholeBatches):
        return replace(reader, reader=_changed(reader.reader, change, noisy=noisy, copies=copies))
    return ChangedBatches(reader, change, noisy, max(1, copies), mixes=copies > 0)


def _replaced(reader: Reader | LossPerBatch, loss: Loss) -> Any:
    """The reader with another loss(output, target) inside."""
    if isinstance(reader, MeanLoss):
        return MeanLoss(loss)
    if isinstance(reader, WholeBatches | ChangedBatches):
        return replace(reader, reader=_replaced(reader.reader, loss))
    raise InputError(
        "the objective was not made from a loss(output, target), so its loss cannot be replaced."
    )


def _check_unshifted(objective: Objective) -> None:
    if objective._shift is not None:
        raise InputError(
            "the objective has sam() already, whose step is that of the objective before: apply "
            "sam last, to the objective with the other techniques."
        )


@torch.inference_mode(mode=False)
def _check_repeatable(objective: Objective, label: str) -> None:
    """Refuse a technique that draws from other generators than its noise."""
    passes, values = objective._passes, []
    with passes.prepared(training=passes.training) as passes, torch.enable_grad():
        for seed in range(2):
            seed_reading((seed,), passes.devices, ())
            pair = passes.to_model(objective._probe)
            values.append(passes.batch_mean(objective.point(), pair, 0).mean)
    if not torch.equal(*values):
        raise InputError(
            f"{label} gave two losses for one draw of one batch, {float(values[0])!r} and "
            f"{float(values[1])!r}: it draws from a global generator. Draw every random number "
            "from the generator that the function is passed."
        )
