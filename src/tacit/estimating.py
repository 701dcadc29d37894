"""Estimates from a model, a loss and data in one call."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from tacit.equations.resampling import check_point
from tacit.equations.target import endpoint_equations
from tacit.errors import InputError, check_type
from tacit.fitting.fits import Fit, fit
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.passes import track
from tacit.regularizers.family import Regularizer
from tacit.uncertainty.scores import with_sampling_errors

Time = TypeVar("Time", bound=Hashable)


Candidates = Regularizer | Sequence[Regularizer]


@overload
def estimate(
    model: nn.Module,
    loss: Loss,
    data: Any,
    regularizers: Candidates,
    *,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit: ...


@overload
def estimate(
    objective: Objective,
    regularizers: Candidates,
    /,
    *,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit: ...


@overload
def estimate(
    objective: Objective,
    /,
    *,
    regularizers: Candidates,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit: ...


@overload
def estimate(
    *,
    objective: Objective,
    regularizers: Candidates,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit: ...


def estimate(
    model: Any = None,
    loss: Any = None,
    data: Any = None,
    regularizers: Any = None,
    *,
    objective: Objective | None = None,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit:
    """Strengths λ that make a trained model an optimum: ∇L + Σ λ_k ∇R_k = 0, by least squares.

    Called as estimate(model, loss, data, regularizers), or as estimate(objective, regularizers)
    where the objective needs options or is not loss(model(inputs), target). The short way through
    `Objective`, `endpoint_equations` and `fit`: one pass over the data. With `population`, a second
    pass adds error bars for the choice of examples, as `score_examples` does.

    Args:
        model: the trained module; parameters with requires_grad=False are constants.
        loss: loss(output, target), mean-reduced, without any penalty.
        data: a tuple of tensors (inputs, …, target), a DataLoader, or an iterable of such batches.
        regularizers: candidates whose strengths are estimated.
        objective: in place of model, loss and data: an `Objective`, without any penalty.
        known: penalties that training did apply, with their strengths.
        nonnegative: fit under λ ≥ 0.
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
    if objective is None and not isinstance(model, Objective):
        _check_all_given(model=model, loss=loss, data=data, regularizers=regularizers)
        objective = Objective(model, loss, data)
    else:
        objective, regularizers = _given_objective(objective, model, loss, data, regularizers)
    equations = endpoint_equations(objective, regularizers, known=known)
    result = fit(equations, nonnegative=nonnegative)
    return result if population is None else with_sampling_errors(result, population)


FORMS = "estimate(model, loss, data, regularizers) or estimate(objective, regularizers)"


def _check_all_given(**arguments: Any) -> None:
    """Refuse a call that leaves out an argument of the first form."""
    missing = [name for name, argument in arguments.items() if argument is None]
    if missing:
        raise InputError(
            f"estimate was called without {', '.join(missing)}: the arguments are {FORMS}."
        )


def _given_objective(objective: Any, *positional: Any) -> tuple[Objective, Candidates]:
    """Objective and regularizers of the second form, by position or by name; mixtures are refused.

    `positional` are the parameters model, loss, data and regularizers of the first form.
    """
    given = [argument for argument in (objective, *positional) if argument is not None]
    if len(given) != 2 or not isinstance(given[0], Objective):
        kinds = ", ".join(type(argument).__name__ for argument in given)
        raise InputError(
            f"estimate was given {kinds}: an Objective has its model, loss and data, so that it is "
            f"passed with the regularizers only. The arguments are {FORMS}."
        )
    return given[0], given[1]


def time_varying(
    objective: Objective,
    checkpoints: Mapping[Time, Mapping[str, Tensor]],
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, float] | None = None,
) -> dict[Time, Fit]:
    """Λ(t): one endpoint fit for every checkpoint of a run, by its time.

    Each says which penalty would make that checkpoint an optimum, if training stopped there.

    >>> import tacit, torch
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> path = {t: {"weight": (1 - 0.5**t) * y.T} for t in (1, 2)}  # descent of step 1/2
    >>> fits = time_varying(objective, path, [tacit.l2()])
    >>> {t: round(fit.strengths["l2"], 12) for t, fit in fits.items()}
    {1: 0.5, 2: 0.166666666667}
    """
    check_type("checkpoints", checkpoints, Mapping, "a dictionary from time to parameters")
    if not checkpoints:
        raise InputError("checkpoints is empty: pass parameters for at least one time.")
    fits: dict[Time, Fit] = {}
    for time in track(checkpoints, total=len(checkpoints), label="checkpoints"):
        point = check_point(objective, checkpoints[time], what=f"checkpoint {time!r}")
        fits[time] = fit(endpoint_equations(objective, regularizers, params=point, known=known))
    return fits
