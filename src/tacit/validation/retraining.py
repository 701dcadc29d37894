"""Validation by retraining: does the estimated penalty bring the trained model back?"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, Problem
from tacit.fitting.fits import Fit
from tacit.fitting.summary import jsonable
from tacit.objective.objective import Objective
from tacit.objective.params import Params, norm
from tacit.regularizers import Regularizer
from tacit.validation.certificate import Certificate, certify
from tacit.validation.minimising import minimise
from tacit.validation.penalised import (
    NoHessianError,
    Penalised,
    Penalty,
    all_strengths,
    known_strengths,
    no_penalty,
    penalty,
)
from tacit.validation.retrained import Retrained, apart, compare, over
from tacit.validation.summary import doubts, summary

Train = Callable[[Penalty], Mapping[str, Tensor]]
"""A training loop: minimises loss + penalty(params), returns the weights."""


@dataclass(frozen=True)
class Validation:
    """How much of the original effect retraining recovered, and every reason to doubt it."""

    strengths: Mapping[str, float]
    penalised: Retrained
    """Trained on L + R(·, Λ̂)."""
    control: Retrained
    """Trained on L alone (with the penalties that were known)."""
    recovered: float
    """1 − ‖θ_penalised − θ̂‖ / ‖θ_control − θ̂‖: 1 is all, 0 no better than the control."""
    recovered_predictions: float
    """The same in predictions."""
    loss: float
    """L(θ̂)."""
    trainer: str
    certificate: Certificate | None
    problems: tuple[Problem, ...]

    def summary(self) -> str:
        """Both models beside each other, the certificate and the doubts, ready to print."""
        return summary(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; what is not finite becomes None."""
        return jsonable(asdict(self))

    def __str__(self) -> str:
        return self.summary()


@torch.inference_mode(mode=False)
def validate(
    fit: Fit | Mapping[str, float],
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    train: Train | None = None,
    start: Mapping[str, Tensor] | None = None,
    params: Mapping[str, Tensor] | None = None,
    outputs: Callable[[Params], Tensor] | None = None,
) -> Validation:
    """Drop the technique, retrain on L + R(·, Λ̂), and compare with the original and a control.

    recovered = 1 − ‖θ_penalised − θ̂‖ / ‖θ_control − θ̂‖, and the same for predictions. The built-in
    trainer is L-BFGS in float64, finished by Newton steps up to 500 parameters. Trap: without
    `start` it begins at θ̂ itself, which tests local recovery only; pass the initialisation that
    training had. A loss with many minimisers (p > n) makes the control depend on its start.

    Args:
        fit: what was estimated, or strengths by name.
        objective: the loss without the technique and without any penalty.
        regularizers: those of the fit; its known penalties too, which the control keeps.
        train: your loop, train(penalty) -> params, that minimises loss + penalty(params). It is
            called twice; for the control the penalty is zero. The model is put back after each.
        start: where the built-in trainer begins; by default the model's current parameters.
        params: θ̂; by default the model's parameters as they are.
        outputs: predictions as a function of params, where the objective cannot make them; labels
            (integers) are compared by agreement.
    """
    _check(fit, objective, train, start)
    strengths = all_strengths(fit)
    original = {n: p.clone() for n, p in objective.point(params).items()}
    begin = {n: p.clone() for n, p in objective.point(start, what="start").items()}
    penalised = Penalised(objective, penalty(regularizers, strengths))
    control = Penalised(objective, _control(fit, regularizers))
    penalised.penalty(original)  # names that do not match are refused before any training,
    compare([penalised], original, [original], outputs)  # and so are outputs
    ends = [_retrain(function, begin, train) for function in (penalised, control)]
    compared = compare((penalised, control), original, ends, outputs)
    certificate, missing = None, ""
    try:
        certificate = certify(objective, regularizers, strengths, params=original)
    except NoHessianError as error:
        missing = str(error)
    first, second = compared
    result = Validation(
        strengths=strengths,
        penalised=first,
        control=second,
        recovered=_recovered(first.distance, second.distance),
        recovered_predictions=_recovered(apart(first), apart(second)),
        loss=objective.value(original),
        trainer="L-BFGS" if train is None else "the given loop",
        certificate=certificate,
        problems=(),
    )
    problems = doubts(
        result,
        force=norm(objective.gradient(original)),
        floor=10 * norm(objective.rounding(original)),
        precision=math.sqrt(penalised.epsilon),
        local=train is None and all(torch.equal(begin[n], original[n]) for n in original),
        missing=missing,
    )
    return Validation(**{**vars(result), "problems": problems})


def _check(
    fit: Fit | Mapping[str, float],
    objective: Objective,
    train: Train | None,
    start: Mapping[str, Tensor] | None,
) -> None:
    if not isinstance(objective, Objective):
        raise InputError(
            f"validate was given a {type(objective).__name__} as objective: the order is "
            "validate(fit, objective, regularizers)."
        )
    if not isinstance(fit, Fit | Mapping):
        raise InputError(
            f"validate was given a {type(fit).__name__} as fit: pass what tacit.fit or "
            "tacit.estimate return, or strengths by name."
        )
    if train is not None and not callable(train):
        raise InputError(
            f"train is a {type(train).__name__}: pass a function train(penalty) -> params, or "
            "leave it out for the built-in L-BFGS."
        )
    if train is not None and start is not None:
        raise InputError(
            "start= is where the built-in trainer begins, but train= was given too: let your loop "
            "set its own start, and leave start out."
        )


def _control(
    fit: Fit | Mapping[str, float], regularizers: Regularizer | Sequence[Regularizer]
) -> Penalty:
    """What the control keeps: the penalties that training did apply besides the technique."""
    known = known_strengths(fit) if isinstance(fit, Fit) else {}
    if not known:
        return no_penalty
    held = [regularizers] if isinstance(regularizers, Regularizer) else regularizers
    return penalty([r for r in held if r.name in known], known)


def _retrain(function: Penalised, begin: Params, train: Train | None) -> Params | None:
    """The weights that training ends at, or None where it has no end."""
    if train is None:
        found = minimise(function, function.flat(begin))
        return function.unflat(found.theta) if found.bounded else None
    objective = function.objective
    with _put_back(objective.model), torch.enable_grad():
        ended = train(function.penalty)
        if ended is None:
            raise InputError(
                "what train returned is None: return the weights it ended at, as in "
                "dict(model.named_parameters())."
            )
        return {n: p.clone() for n, p in objective.point(ended, what="what train returned").items()}


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Give the model its weights, buffers, gradients and mode back, whatever the loop did."""
    state = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in state:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode


def _recovered(mine: float, control: float) -> float:
    if math.isinf(control):
        return math.nan
    return -math.inf if math.isinf(mine) else 1 - over(mine, control)
