"""Estimates from a model, a loss and data in one call."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypedDict, TypeVar, Unpack, overload

from torch import Tensor, nn

from tacit.equations.equations import Equations
from tacit.equations.flow import Reference, euler
from tacit.equations.resampling import check_point
from tacit.equations.steps import trajectory_equations
from tacit.equations.target import Target, endpoint_equations
from tacit.equations.trajectory import Trajectory
from tacit.errors import InputError, check_type, check_whole
from tacit.fitting.fits import Fit, fit
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.passes import track
from tacit.regularizers.family import Regularizer
from tacit.uncertainty.scores import with_sampling_errors

Time = TypeVar("Time", bound=Hashable)


Candidates = Regularizer | Sequence[Regularizer]


class _Options(TypedDict, total=False):
    """The options of `estimate`, in each of its forms."""

    known: Mapping[Regularizer, float] | None
    nonnegative: bool
    psd: bool
    population: float | None


@overload
def estimate(
    model: nn.Module,
    loss: Loss,
    data: Any,
    regularizers: Candidates,
    **options: Unpack[_Options],
) -> Fit: ...


@overload
def estimate(
    objective: Objective | Target,
    regularizers: Candidates,
    /,
    **options: Unpack[_Options],
) -> Fit: ...


@overload
def estimate(
    objective: Objective,
    /,
    *,
    regularizers: Candidates,
    **options: Unpack[_Options],
) -> Fit: ...


@overload
def estimate(
    *,
    objective: Objective,
    regularizers: Candidates,
    **options: Unpack[_Options],
) -> Fit: ...


def estimate(  # noqa: PLR0913 # the data and the candidates, then keyword options
    model: Any = None,
    loss: Any = None,
    data: Any = None,
    regularizers: Any = None,
    *,
    objective: Objective | None = None,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    psd: bool = False,
    population: float | None = None,
) -> Fit:
    """Strengths λ that make a trained model an optimum: ∇L + Σ λ_k ∇R_k = 0, by least squares.

    Called as estimate(model, loss, data, regularizers), or as estimate(objective, regularizers)
    where the objective needs options or is not loss(model(inputs), target). The short way through
    `Objective`, `endpoint_equations` and `fit`: one pass over the data. With `population`, a second
    pass adds error bars for the choice of examples, as `score_examples` does. As
    estimate(target, regularizers) it fits a target of any kind, also one from a file
    (`Target.load`), without any pass.

    Args:
        model: the trained module; parameters with requires_grad=False are constants.
        loss: loss(output, target), mean-reduced, without any penalty.
        data: a tuple of tensors (inputs, …, target), a DataLoader, or an iterable of such batches.
        regularizers: candidates whose strengths are estimated.
        objective: in place of model, loss and data: an `Objective`, without any penalty.
        known: penalties that training did apply, with their strengths.
        nonnegative: fit under λ ≥ 0.
        psd: fit under Λ ⪰ 0, for `regularizers.symmetric()`.
        population: how many examples the data was drawn from; math.inf for an infinite population.
            By default there are no error bars for the choice of examples.

    >>> import tacit, torch
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(y.T / 1.5)  # the optimum of mse_loss + 0.25 ‖θ‖²
    >>> fit = estimate(model, torch.nn.functional.mse_loss, (X, y), [tacit.l2()])
    >>> round(fit.strengths["l2"], 12), round(fit.explained, 12)
    (0.25, 1.0)
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y), batch_size=1)
    >>> round(estimate(objective, [tacit.l2()]).strengths["l2"], 12)
    0.25
    """
    if objective is None and not isinstance(model, Objective | Target):
        _check_all_given(model=model, loss=loss, data=data, regularizers=regularizers)
        source = Objective(model, loss, data)
    else:
        source, regularizers = _given_objective(objective, model, loss, data, regularizers)
    if isinstance(source, Target):
        equations = source.equations(regularizers, known=known)
    else:
        equations = endpoint_equations(source, regularizers, known=known)
    result = fit(equations, nonnegative=nonnegative, psd=psd)
    return result if population is None else with_sampling_errors(result, population)


FORMS = (
    "estimate(model, loss, data, regularizers), estimate(objective, regularizers) or "
    "estimate(target, regularizers)"
)


def _check_all_given(**arguments: Any) -> None:
    """Refuse a call that leaves out an argument of the first form."""
    missing = [name for name, argument in arguments.items() if argument is None]
    if missing:
        raise InputError(
            f"estimate was called without {', '.join(missing)}: the arguments are {FORMS}."
        )


def _given_objective(objective: Any, *positional: Any) -> tuple[Objective | Target, Candidates]:
    """Objective or target, and regularizers, by position or by name; mixtures are refused.

    `positional` are the parameters model, loss, data and regularizers of the first form.
    """
    given = [argument for argument in (objective, *positional) if argument is not None]
    if len(given) != 2 or not isinstance(given[0], Objective | Target):
        kinds = ", ".join(type(argument).__name__ for argument in given)
        raise InputError(
            f"estimate was given {kinds}: an Objective, or a Target, has its model, loss and data, "
            f"so that it is passed with the regularizers only. The arguments are {FORMS}."
        )
    return given[0], given[1]


@overload
def time_varying(
    objective: Objective,
    checkpoints: Trajectory,
    regularizers: Candidates,
    *,
    known: Mapping[Regularizer, float] | None = None,
    reference: Reference = euler,
    steps: int = 1,
) -> dict[float, Fit]: ...


@overload
def time_varying(
    objective: Objective,
    checkpoints: Mapping[Time, Mapping[str, Tensor]],
    regularizers: Candidates,
    *,
    known: Mapping[Regularizer, float] | None = None,
) -> dict[Time, Fit]: ...


def time_varying(
    objective: Objective,
    checkpoints: Any,
    regularizers: Candidates,
    *,
    known: Mapping[Regularizer, float] | None = None,
    reference: Reference = euler,
    steps: int = 1,
) -> dict[Any, Fit]:
    """Λ(t): one fit for every checkpoint of a run, by its time, or for every step of a trajectory.

    An endpoint fit says which penalty would make that checkpoint an optimum, if training stopped
    there. That is far from the truth early in training. The fit of a trajectory's step says what
    force besides ∇L moved the weights then, at any time of training.

    Args:
        objective: the loss, without any penalty.
        checkpoints: parameters by time; or a `Trajectory`, whose fits have the time that had passed
            when their first step began.
        regularizers: candidates whose strengths are estimated.
        known: penalties that training did apply, with their strengths.
        reference: for a trajectory, as in `trajectory_equations`.
        steps: for a trajectory, how many successive steps each fit is of; noise needs many.

    >>> import tacit, torch
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> path = {t: {"weight": (1 - 0.5**t) * y.T} for t in (1, 2)}  # descent of step 1/2
    >>> fits = time_varying(objective, path, [tacit.l2()])
    >>> {t: round(fit.strengths["l2"], 12) for t, fit in fits.items()}
    {1: 0.5, 2: 0.166666666667}
    """
    if isinstance(checkpoints, Trajectory):
        equations = trajectory_equations(
            objective, checkpoints, regularizers, known=known, reference=reference
        )
        return _fits_of_steps(equations, checkpoints.times, steps)
    if reference is not euler or steps != 1:
        raise InputError("reference= and steps= are for a trajectory: pass one, or leave them out.")
    needed = "a dictionary from time to parameters, or a Trajectory"
    check_type("checkpoints", checkpoints, Mapping, needed)
    if not checkpoints:
        raise InputError("checkpoints is empty: pass parameters for at least one time.")
    fits: dict[Any, Fit] = {}
    for time in track(checkpoints, total=len(checkpoints), label="checkpoints"):
        point = check_point(objective, checkpoints[time], what=f"checkpoint {time!r}")
        fits[time] = fit(endpoint_equations(objective, regularizers, params=point, known=known))
    return fits


def _fits_of_steps(equations: Equations, times: Sequence[float], steps: int) -> dict[float, Fit]:
    """The fit of every so many steps, by the time when they began; a shorter rest is left out."""
    check_whole("steps", steps)
    pieces = equations.steps(size=steps)
    if not pieces:
        raise InputError(f"steps={steps}, but the trajectory has {len(times)}: pass fewer.")
    elapsed = [0.0, *accumulate(times)]
    numbered = track(enumerate(pieces), total=len(pieces), label="steps")
    return {elapsed[number * steps]: fit(piece) for number, piece in numbered}
