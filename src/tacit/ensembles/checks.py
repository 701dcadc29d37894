"""Checks of the arguments of ensemble functions: numbers, dropout rates, and the loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles.data import MemberData, assign_data
from tacit.ensembles.members import Ensemble
from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.losses import BatchMean, Loss, broadcasts_refused
from tacit.objective.params import Params
from tacit.objective.parts import MAX_ROWS, Derive, check_parts
from tacit.objective.survey import rows_of_values


def prepare(
    ensemble: Any, loss: Any, data: Any, dtype: torch.dtype | None = None
) -> tuple[Ensemble, MemberData]:
    """Check an ensemble, its loss and its data; return the ensemble and its data, in a dtype."""
    needed = "the result of ensembles.from_models or ensembles.initialise, or run.last"
    check_type("an ensemble", ensemble, Ensemble, needed)
    ensemble = ensemble if dtype is None else ensemble.to(dtype)
    data = assign_data(data, len(ensemble), ensemble.first_tensor)
    check_member_loss(ensemble, loss, data)
    return ensemble, data


def as_numbers(value: Any, ensemble: Ensemble, *, what: str) -> Tensor:
    """Convert numbers to a tensor with the ensemble's device and dtype; True is no number."""
    like = ensemble.first_tensor
    try:
        entries = value if isinstance(value, Sequence) else [value]
        if any(isinstance(v, bool) or getattr(v, "dtype", None) == torch.bool for v in entries):
            raise TypeError("True and False are not numbers")
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"{what} is {value!r}: pass a number, or one for each of the {len(ensemble)} members."
        ) from error


def per_member(
    what: str,
    value: Any,
    ensemble: Ensemble,
    accepts: Callable[[Tensor], Tensor],
    needed: str,
) -> Tensor:
    """Check one number for all members, or one per member, and return one per member."""
    numbers, members = as_numbers(value, ensemble, what=what), len(ensemble)
    if numbers.shape not in ((), (members,)):
        raise InputError(
            f"{what} has shape {tuple(numbers.shape)}: pass one number, or one for each of the "
            f"{members} members."
        )
    if not bool((numbers.isfinite() & accepts(numbers)).all()):
        raise InputError(
            f"{what} is {value!r}: pass {needed}, or one for each of the {members} members."
        )
    return numbers.expand(members)


def dropout_rates(dropout: float | Sequence[float] | Tensor, ensemble: Ensemble) -> Tensor:
    """Check dropout rates for an ensemble with dropout layers, and return one per member."""
    needed = "a rate from 0 to below 1"
    rates = per_member("dropout", dropout, ensemble, lambda r: (r >= 0) & (r < 1), needed)
    if not any(isinstance(module, nn.Dropout) for module in ensemble.model.modules()):
        raise InputError(
            "dropout was passed, but the model has no nn.Dropout layer: add one, or leave it out."
        )
    return rates


def check_member_loss(ensemble: Ensemble, loss: Loss, data: MemberData) -> None:
    """Refuse a loss that is not a mean over examples, because its batches cannot be averaged.

    Evaluates the loss on the first member's data, without dropout.
    """
    if not callable(loss):
        raise InputError(f"the loss is a {type(loss).__name__}: pass a function of two tensors.")
    member = data.select(torch.tensor([0]))
    indices = torch.arange(data.examples)
    if len(indices) > MAX_ROWS:
        rare = rows_of_values(member.targets[member.assignment[0]])
        spread = torch.linspace(0, data.examples - 1, MAX_ROWS)
        indices = torch.cat([spread.round().long(), rare]).unique()
    inputs, targets = member.gather(indices[None].to(data.inputs.device))
    params = {n: p[:1].detach() for n, p in ensemble.params.items()}

    def evaluate(
        params: Params, batch: tuple[Tensor, Tensor], derive: Derive | None = None
    ) -> BatchMean:
        inputs, targets = batch
        leaves = derivatives.leaves(params)
        outputs = ensemble.forward(leaves, inputs[None], None)[0]
        with broadcasts_refused():
            mean = loss(outputs, targets)
        if derive is not None:
            derive(BatchMean(mean, len(targets), len(targets)), leaves)
        return BatchMean(mean.detach(), len(targets), len(targets))

    batch = (inputs[0], targets[0])
    with torch.enable_grad():
        try:
            value = evaluate(params, batch).mean
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"model and loss fail on inputs of shape {tuple(inputs.shape[1:])} "
                f"({inputs.dtype}) and targets of shape {tuple(targets.shape[1:])} "
                f"({targets.dtype}): {error}"
            ) from error
        if not isinstance(value, Tensor) or value.dim():
            raise InputError(
                f"the loss of a batch is {getattr(value, 'shape', value)}: pass a loss with "
                "reduction='mean', which is a scalar."
            )
        if torch.isfinite(value):
            check_parts(evaluate, params, batch, by_row=True, collected=True)
