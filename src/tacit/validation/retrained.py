"""A retrained model beside the original: weights, predictions, loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tacit.objective.params import Params
from tacit.validation.penalised import Penalised


@dataclass(frozen=True)
class Retrained:
    """One retrained model θ beside the original θ̂; infinite where training had no end."""

    distance: float
    """‖θ − θ̂‖."""
    relative_distance: float
    """‖θ − θ̂‖ / ‖θ̂‖."""
    cosine: float
    """Between the two weights."""
    prediction_error: float | None
    """‖f(θ) − f(θ̂)‖ / ‖f(θ̂)‖ on the training data; None where predictions are labels."""
    agreement: float | None
    """Part of the predicted classes that agree; None where nothing is classified."""
    loss_difference: float
    """L(θ) − L(θ̂)."""
    stationarity: float
    """‖∇(L+R)(θ)‖ that training reached."""


def compare(
    functions: Sequence[Penalised],
    original: Params,
    ends: Sequence[Params | None],
    outputs: Callable[[Params], Tensor] | None,
) -> list[Retrained]:
    """Every end of training beside the original, each under its own function."""
    objective = functions[0].objective
    points = [original, *(end for end in ends if end is not None)]
    if outputs is None:
        predicted, target = objective.predictions(*points)
    else:
        predicted, target = [outputs(objective.point(p)).detach() for p in points], None
    theta, loss = functions[0].flat(original), objective.value(original)
    wanted, *others = predicted
    found = iter(others)
    compared = []
    for function, end in zip(functions, ends, strict=True):
        if end is None:
            compared.append(_endless())
            continue
        weights = function.flat(end)
        away, got = float((weights - theta).norm()), next(found)
        compared.append(
            Retrained(
                distance=away,
                relative_distance=over(away, float(theta.norm())),
                cosine=over(float(weights @ theta), float(weights.norm() * theta.norm())),
                prediction_error=_relative_error(got, wanted),
                agreement=_agreement(got, wanted, target),
                loss_difference=objective.value(end) - loss,
                stationarity=float(function.value_and_gradient(weights)[1].norm()),
            )
        )
    return compared


def _endless() -> Retrained:
    inf = math.inf
    return Retrained(inf, inf, math.nan, inf, None, inf, inf)


def _relative_error(got: Tensor, wanted: Tensor) -> float | None:
    if not wanted.is_floating_point():
        return None
    got, wanted = got.cpu().double(), wanted.cpu().double()
    return over(float((got - wanted).norm()), float(wanted.norm()))


def _agreement(got: Tensor, wanted: Tensor, target: Any) -> float | None:
    """Of labels; or of the largest output where targets are classes, along dimension 1."""
    if wanted.is_floating_point():
        classes = isinstance(target, Tensor) and not target.is_floating_point()
        if not classes or wanted.ndim != target.ndim + 1 or wanted.shape[2:] != target.shape[1:]:
            return None
        got, wanted = got.argmax(1), wanted.argmax(1)
    return float((got == wanted).double().mean())


def apart(model: Retrained) -> float:
    """How far predictions are from the original's: relative error, else disagreement."""
    if model.prediction_error is not None:
        return model.prediction_error
    return math.inf if model.agreement is None else 1 - model.agreement


def over(part: float, whole: float) -> float:
    """A ratio, not a number where there is nothing to compare with."""
    return part / whole if whole else math.nan
