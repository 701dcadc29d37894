"""Validation by retraining: does the estimated penalty reproduce the trained model?"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.display import Format, render
from tacit.display.frames import make_frame
from tacit.equations.target import origin_of
from tacit.errors import InputError, Problem, check_type
from tacit.fitting.fits import Fit
from tacit.fitting.summary import jsonable
from tacit.objective.borrowing import restored
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, norm, same_buffers
from tacit.objective.ranks import check_alone
from tacit.regularizers import Regularizer
from tacit.validation import summary
from tacit.validation.certificate import Certificate, certify
from tacit.validation.minimising import minimise
from tacit.validation.penalised import (
    NoHessianError,
    PenalisedObjective,
    Penalty,
    held_params,
    known_penalty,
    penalty,
    strengths_by_name,
)
from tacit.validation.retrained import Retrained, compare_with_original, ratio
from tacit.validation.validation_plot import draw_validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Train = Callable[[Penalty], Mapping[str, Tensor]]
"""A training loop: minimises loss + penalty(params) and returns the weights."""


@dataclass(frozen=True)
class Validation:
    """How much of the technique's effect retraining recovered, and the problems of the test."""

    strengths: Mapping[str, float]
    penalised: Retrained
    """The model trained on L + R(·, Λ̂)."""
    control: Retrained
    """The model trained on L, with only the known penalties."""
    recovered_predictions: float
    """1 − (error of the penalised model's predictions)/(error of the control's); NaN where the
    control did not settle: any model is close to the original beside one that ran off."""
    recovered: float
    """The same for the weights, 1 − ‖θ_penalised − θ̂‖ / ‖θ_control − θ̂‖: 1 is full recovery."""
    settled: bool
    """Whether the control ended at a minimum: its gradient is small, and it did not run off."""
    loss: float
    """L(θ̂)."""
    trainer: str
    """What retrained the models, in words."""
    certificate: Certificate | None
    """None where f has no Hessian; a problem then says why."""
    problems: tuple[Problem, ...]

    def summary(self, format: Format = "text") -> str:
        """Both models, the certificate and problems: as text, "markdown", "latex" or "html"."""
        return render(summary.summarize_validation(self), format)

    def _repr_html_(self) -> str:
        return self.summary("html")

    def to_frame(self) -> "DataFrame":
        """One row per model, penalised and control, as a DataFrame of pandas.

        `model`, then the fields of `Retrained`.
        """
        models = {"penalised": self.penalised, "control": self.control}
        return make_frame([{"model": name, **asdict(model)} for name, model in models.items()])

    def plot(self) -> "Figure":
        """How far both models are from the original, as a matplotlib Figure of a column's width.

        On a logarithmic scale: the penalty is right if its model is much closer than the control.
        """
        return draw_validation(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; values that are not finite become None."""
        return jsonable(asdict(self))

    def __str__(self) -> str:
        return self.summary()


@torch.inference_mode(mode=False)
def validate(
    fit: Fit | Mapping[str, float],
    objective: Objective | None = None,
    regularizers: Regularizer | Sequence[Regularizer] | None = None,
    *,
    train: Train | None = None,
    start: Mapping[str, Tensor] | None = None,
    params: Mapping[str, Tensor] | None = None,
    outputs: Callable[[Params], Tensor] | None = None,
) -> Validation:
    """Retrain without the technique on L + R(·, Λ̂), and compare with the original and a control.

    The control is retrained without the estimated penalty. The agreement of predictions comes
    first; then recovered = 1 − ‖θ_penalised − θ̂‖ / ‖θ_control − θ̂‖, and the same for predictions,
    where the control settled. Without a penalty a classifier of separable classes does not: its
    weights run off, and beside them any model would be close to the original.
    The built-in trainer is L-BFGS in float64, followed by Newton steps for up to 500 parameters.

    Trap: without `start` the built-in trainer starts at the model's current parameters, usually θ̂
    itself, which tests only local recovery; pass the initialisation of the original training.
    Trap: if the loss has many minimisers (p > n), the control depends on where it starts.

    Args:
        fit: the estimate, or strengths by name.
        objective: the loss without the technique and without any penalty; by default that of the
            fit, and `plain` of a difference.
        regularizers: by default those of the fit, including its known penalties, which the control
            retains.
        train: your training loop, train(penalty) -> params, which minimises loss + penalty(params).
            It is called twice; for the control the penalty is zero unless there are known ones.
            The model's state is restored after each call.
        start: where the built-in trainer starts; by default the model's current parameters.
        params: θ̂; by default the point of the fit where it has one point, else the model's
            current parameters.
        outputs: predictions as a function of params, for objectives that cannot compute them.
            Integer outputs are labels and are compared by agreement.
    """
    needed = "a function train(penalty) -> params, or nothing for the built-in L-BFGS"
    check_type("train", train, Callable | None, needed)
    if train is not None and start is not None:
        raise InputError(
            "start= and train= were both passed: initialise the model in your training loop, and "
            "leave start out."
        )
    objective, regularizers, params = _complete(fit, objective, regularizers, params)
    strengths = strengths_by_name(fit)
    original = _copy(objective.point(params))
    initial = _copy(objective.point(start, what="start"))
    loss = objective.differentiate(original)
    held = held_params(fit, loss.unreached, original)
    functions = [
        PenalisedObjective(objective, penalty(regularizers, strengths), held),
        PenalisedObjective(objective, known_penalty(fit, regularizers), held),
    ]
    # Reject wrong names and outputs before any training.
    functions[0].penalty(original)
    compare_with_original(functions[:1], original, [original], outputs)
    end_points = [_retrain(function, initial, train) for function in functions]
    penalised, control = compare_with_original(functions, original, end_points, outputs)
    rounding_level = 10 * math.hypot(*objective.rounding(original).values())
    gradient_limit = max(summary.UNFINISHED * norm(loss.derivative), rounding_level)
    settled = control.final_gradient_norm <= gradient_limit
    settled = settled and not _ran_off(functions[1], original, end_points[1])
    certificate, no_hessian = None, ""
    try:
        certificate = certify(objective, regularizers, fit, params=original)
    except NoHessianError as error:
        no_hessian = str(error)
    validation = Validation(
        strengths=strengths,
        penalised=penalised,
        control=control,
        recovered_predictions=_recovered(
            penalised.prediction_distance, control.prediction_distance, settled=settled
        ),
        recovered=_recovered(penalised.distance, control.distance, settled=settled),
        settled=settled,
        loss=loss.value,
        trainer="L-BFGS" if train is None else "your training loop",
        certificate=certificate,
        problems=(),
    )
    local = train is None and all(torch.equal(initial[n], original[n]) for n in original)
    problems = _problems(validation, functions[0], gradient_limit, no_hessian, local=local)
    return replace(validation, problems=problems)


def _complete(
    fit: Fit | Mapping[str, float],
    objective: Objective | None,
    regularizers: Regularizer | Sequence[Regularizer] | None,
    params: Mapping[str, Tensor] | None,
) -> tuple[Objective, Regularizer | Sequence[Regularizer], Mapping[str, Tensor] | None]:
    """The objective, regularizers and point: as passed, or as the fit's equations have them."""
    needed = "what tacit.fit or tacit.estimate return, or strengths by name"
    check_type("fit", fit, Fit | Mapping, needed)
    origin = fit.equations.origin if isinstance(fit, Fit) else None
    if objective is None or regularizers is None:
        if not isinstance(fit, Fit):
            raise InputError(
                "strengths by name have no objective and no regularizers: the arguments are "
                "validate(strengths, objective, regularizers)."
            )
        origin = origin_of(fit, "validate without an objective and regularizers")
        objective = objective or origin.setting.plain or origin.setting.objective
        if regularizers is None:
            regularizers = (*origin.candidates.estimated, *origin.candidates.known)
    check_objective(objective, what="objective")
    check_alone(objective.ranks, "validate")
    if params is None and origin is not None and origin.point is not None:
        same_model = origin.setting.objective.model is objective.model
        params = origin.bind().params if same_model else None
    return objective, regularizers, params


def _retrain(function: PenalisedObjective, initial: Params, train: Train | None) -> Params | None:
    """The weights at the end of training, or None where the built-in trainer diverged."""
    if train is None:
        theta, is_minimum = minimise(function, function.flatten(initial))
        return function.unflatten(theta) if is_minimum else None
    objective = function.objective
    with restored(objective.model), torch.enable_grad():
        trained = train(function.penalty)
        if trained is None:
            raise InputError("train returned None: return dict(model.named_parameters()).")
        return _copy(objective.point(trained, what="the return value of train"))


def _copy(point: Params) -> Params:
    return same_buffers({n: p.clone() for n, p in point.items()}, point)


def _ran_off(function: PenalisedObjective, original: Params, end: Params | None) -> bool:
    """Whether f is no higher twice as far from the original: there is no minimum that way.

    So it is with separable classes, where the gradient vanishes at infinity. Nearer than the
    original's own norm nothing has run off.
    """
    if end is None:
        return True
    function = replace(function, held=same_buffers(function.held, end))
    there, theta = function.flatten(original), function.flatten(end)
    if float((theta - there).norm()) <= float(there.norm()):
        return False
    try:
        beyond = function.value_and_gradient(2 * theta - there)[0]
    except InputError:  # it overflows there
        return False
    return beyond <= function.value_and_gradient(theta)[0]


def _recovered(penalised_distance: float, control_distance: float, *, settled: bool) -> float:
    """1 − penalised/control; −∞ where the penalised model diverged, NaN without a control."""
    if not settled:
        return math.nan
    if math.isinf(penalised_distance):
        return -math.inf
    return 1 - ratio(penalised_distance, control_distance)


def _problems(
    validation: Validation,
    function: PenalisedObjective,
    gradient_limit: float,
    no_hessian: str,
    *,
    local: bool,
) -> tuple[Problem, ...]:
    """All problems, the most serious first.

    Args:
        validation: what was found.
        function: the penalised objective.
        gradient_limit: the gradient norm up to which training is finished.
        no_hessian: why there is no certificate, if there is none.
        local: whether retraining started at θ̂ itself.
    """
    return (
        *summary.unbounded(validation),
        *summary.unfinished(validation, gradient_limit),
        *summary.not_recovered(validation, precision=math.sqrt(function.epsilon)),
        *summary.not_certified(validation, no_hessian, local=local),
    )
