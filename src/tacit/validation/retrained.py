"""A retrained model compared with the original: weights, predictions, loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tacit.objective.params import Params, same_buffers
from tacit.validation.penalised import PenalisedObjective


@dataclass(frozen=True)
class Retrained:
    """One retrained model θ compared with the original θ̂; infinite where training diverged."""

    distance: float
    """‖θ − θ̂‖."""
    relative_distance: float
    """‖θ − θ̂‖ / ‖θ̂‖."""
    cosine: float
    """Cosine of the angle between θ and θ̂."""
    prediction_error: float | None
    """‖f(θ) − f(θ̂)‖ / ‖f(θ̂)‖ on the training data; None where predictions are labels."""
    agreement: float | None
    """Fraction of predicted classes that agree; None where the model is not a classifier."""
    loss_difference: float
    """L(θ) − L(θ̂)."""
    final_gradient_norm: float
    """‖∇(L+R)(θ)‖ at the end of training."""

    @property
    def prediction_distance(self) -> float:
        """How far predictions are from the original's: relative error, or else 1 − agreement."""
        if self.prediction_error is not None:
            return self.prediction_error
        return math.inf if self.agreement is None else 1 - self.agreement


DIVERGED = Retrained(math.inf, math.inf, math.nan, math.inf, None, math.inf, math.inf)


def compare_with_original(
    functions: Sequence[PenalisedObjective],
    original: Params,
    end_points: Sequence[Params | None],
    outputs: Callable[[Params], Tensor] | None,
) -> list[Retrained]:
    """Compare each retrained model with the original.

    Args:
        functions: the penalised objective that each model was trained on.
        original: θ̂.
        end_points: the retrained weights, one entry per function; None where training diverged.
        outputs: predictions as a function of params; by default the objective's predictions.
    """
    objective = functions[0].objective
    points = [original, *(original if end is None else end for end in end_points)]
    if outputs is None:
        predictions, target = objective.predictions(*points)
    else:
        predictions, target = [outputs(objective.point(p)).detach() for p in points], None
    original_theta, original_loss = functions[0].flatten(original), objective.value(original)
    original_norm = original_theta.norm()
    comparisons = []
    for function, end, prediction in zip(functions, end_points, predictions[1:], strict=True):
        if end is None:
            comparisons.append(DIVERGED)
            continue
        theta = function.flatten(end)
        function = replace(function, held=same_buffers(function.held, end))
        distance = float((theta - original_theta).norm())
        comparisons.append(
            Retrained(
                distance=distance,
                relative_distance=ratio(distance, float(original_norm)),
                cosine=ratio(float(theta @ original_theta), float(theta.norm() * original_norm)),
                prediction_error=_relative_error(prediction, predictions[0]),
                agreement=_agreement(prediction, predictions[0], target),
                loss_difference=objective.value(end) - original_loss,
                final_gradient_norm=float(function.value_and_gradient(theta)[1].norm()),
            )
        )
    return comparisons


def _relative_error(prediction: Tensor, original: Tensor) -> float | None:
    if not original.is_floating_point():
        return None
    prediction, original = prediction.cpu().double(), original.cpu().double()
    return ratio(float((prediction - original).norm()), float(original.norm()))


def _agreement(prediction: Tensor, original: Tensor, target: Any) -> float | None:
    """Agreement of labels, or of the argmax along dimension 1 where the targets are classes."""
    if original.is_floating_point():
        classes = isinstance(target, Tensor) and not target.is_floating_point()
        if (
            not classes
            or original.ndim != target.ndim + 1
            or original.shape[2:] != target.shape[1:]
        ):
            return None
        prediction, original = prediction.argmax(1), original.argmax(1)
    return float((prediction == original).double().mean())


def ratio(numerator: float, denominator: float) -> float:
    """A quotient, NaN where the denominator is zero."""
    return numerator / denominator if denominator else math.nan
