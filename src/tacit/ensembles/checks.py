"""Checks of the arguments of ensemble functions: numbers, dropout rates, and the loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles.data import MemberData
from tacit.ensembles.members import Ensemble
from tacit.errors import InputError
from tacit.objective.checks import check_mean_reduced

LOSS_EXAMPLES = 256
"""Number of examples, spread over the data, on which `check_member_loss` evaluates the loss."""


def as_numbers(value: Any, like: Tensor, *, what: str) -> Tensor:
    """Convert numbers to a tensor with the device and dtype of `like`."""
    try:
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} is {value!r}: pass a number, or one for each member.") from error


def expand_dropout_rates(
    dropout: float | Sequence[float] | Tensor, members: int, like: Tensor
) -> Tensor:
    """Check dropout rates and return one per member."""
    rates = as_numbers(dropout, like, what="dropout")
    if rates.shape not in ((), (members,)) or not bool(((rates >= 0) & (rates < 1)).all()):
        raise InputError(
            f"dropout is {dropout!r}: pass a rate from 0 to below 1, or one for each of the "
            f"{members} members."
        )
    return rates.expand(members)


def check_ensemble(ensemble: Any) -> None:
    """Refuse an argument that is not an Ensemble."""
    if not isinstance(ensemble, Ensemble):
        raise InputError(
            f"an ensemble is a {type(ensemble).__name__}: pass the result of "
            "ensembles.from_models(models) or ensembles.initialise(build, seeds), or run.last of "
            "a trained one."
        )


def check_member_loss(ensemble: Ensemble, loss: Any, data: MemberData) -> None:
    """Refuse a loss that is not a mean over examples, because its batches cannot be averaged.

    Evaluates the loss on the first member's data, without dropout.
    """
    if not callable(loss):
        raise InputError(f"the loss is a {type(loss).__name__}: pass a function of two tensors.")
    count = min(LOSS_EXAMPLES, data.examples)
    indices = torch.linspace(0, data.examples - 1, count).round().long()
    indices = indices.to(data.assignment.device)
    inputs, targets = data.select(torch.tensor([0])).gather(indices[None])
    params = {n: p[:1].detach() for n, p in ensemble.params.items()}

    def evaluate(part: slice) -> Tensor:
        value = loss(ensemble.forward(params, inputs[:, part], None)[0], targets[0, part])
        if not isinstance(value, Tensor) or value.dim():
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"the loss of a batch is {shape}: a scalar is needed. Pass a loss with "
                "reduction='mean'."
            )
        return value

    with torch.no_grad():
        try:
            value = evaluate(slice(0, count))
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"model and loss fail on inputs of shape {tuple(inputs.shape[1:])} "
                f"({inputs.dtype}) and targets of shape {tuple(targets.shape[1:])} "
                f"({targets.dtype}): {error}"
            ) from error
        if torch.isfinite(value):
            check_mean_reduced(evaluate, count, precision=ensemble.first_tensor.dtype)


def check_dropout_layers(ensemble: Ensemble) -> None:
    """Refuse dropout rates for a model without dropout layers."""
    if not any(isinstance(module, nn.Dropout) for module in ensemble.model.modules()):
        raise InputError(
            "dropout was passed, but the model has no nn.Dropout layer: add dropout layers, or "
            "leave out dropout=."
        )
