"""What is checked before an ensemble is trusted: numbers, and a loss that is a mean."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles.data import Owned
from tacit.ensembles.members import Ensemble
from tacit.errors import InputError
from tacit.objective import checks as probes

SAMPLE = 256
"""Examples, from all over the data, on which the loss is tried."""


def numbers(value: Any, like: Tensor, *, what: str) -> Tensor:
    """Numbers given for members, as a tensor beside the parameters."""
    try:
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} is {value!r}: pass a number, or one for each member.") from error


def own_rates(dropout: float | Sequence[float] | Tensor, members: int, like: Tensor) -> Tensor:
    """A dropout rate for every member."""
    given = numbers(dropout, like, what="dropout")
    if given.shape not in ((), (members,)) or not bool(((given >= 0) & (given < 1)).all()):
        raise InputError(
            f"dropout is {dropout!r}: pass a rate from 0 to below 1, or one for each of the "
            f"{members} members."
        )
    return given.expand(members)


def check_ensemble(ensemble: Any) -> None:
    """Refuse what is not an ensemble."""
    if not isinstance(ensemble, Ensemble):
        raise InputError(
            f"an ensemble is a {type(ensemble).__name__}: pass what ensembles.stacked(models) or "
            "ensembles.initialise(build, seeds) return, or run.last of a trained one."
        )


def check_loss(ensemble: Ensemble, loss: Any, data: Owned) -> None:
    """Refuse a loss that is not a mean over examples: batches of it could not be averaged.

    Tried on the first member's data, without dropout.
    """
    if not callable(loss):
        raise InputError(f"the loss is a {type(loss).__name__}: pass a function of two tensors.")
    count = min(SAMPLE, data.examples)
    index = torch.linspace(0, data.examples - 1, count).round().long().to(data.owner.device)
    inputs, targets = data.of(torch.tensor([0])).take(index[None])
    one = {n: p[:1].detach() for n, p in ensemble.params.items()}

    def evaluate(part: slice) -> Tensor:
        value = loss(ensemble.forward(one, inputs[:, part], None)[0], targets[0, part])
        if not isinstance(value, Tensor) or value.dim():
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"the loss of a batch is {shape}: pass one with reduction='mean'.")
        return value

    with torch.no_grad():
        try:
            evaluate(slice(0, count))
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"model and loss fail on inputs of shape {tuple(inputs.shape[1:])} "
                f"({inputs.dtype}) and targets of shape {tuple(targets.shape[1:])} "
                f"({targets.dtype}): {error}"
            ) from error
        if torch.isfinite(evaluate(slice(0, count))):
            probes.check_mean_reduced(evaluate, count, precision=ensemble.first.dtype)


def check_droppable(ensemble: Ensemble) -> None:
    """Refuse dropout rates for a model without dropout layers."""
    if not any(isinstance(module, nn.Dropout) for module in ensemble.model.modules()):
        raise InputError(
            "dropout was given, but the model has no nn.Dropout layer to act in: add layers, or "
            "leave dropout out."
        )
