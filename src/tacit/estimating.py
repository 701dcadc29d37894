"""The short way through everything: estimates from a model, a loss and data in one call."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from tacit.equations.endpoint import endpoint_equations
from tacit.equations.resampling import named_point
from tacit.errors import InputError
from tacit.fitting.fits import Fit, fit
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.passes import track
from tacit.regularizers import Regularizer
from tacit.uncertainty.scores import with_sampling


def estimate(
    model: nn.Module,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit:
    """Strengths λ that make a trained model an optimum: ∇L + Σ λ_k ∇R_k = 0, by least squares.

    The short way through `Objective`, `endpoint_equations` and `fit`: one pass over the data. With
    `population`, how many examples the data was drawn from (math.inf for no end of them), a second
    pass adds error bars for which examples were drawn, as `score_examples` does.

    >>> import tacit
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(y.T / 1.5)  # the optimum of mse_loss + 0.25 ‖θ‖²
    >>> found = estimate(model, torch.nn.functional.mse_loss, (X, y), [tacit.l2()])
    >>> round(found.strengths["l2"], 12), round(found.explained, 12)
    (0.25, 1.0)
    """
    objective = Objective(model, loss, data)
    equations = endpoint_equations(objective, regularizers, known=known)
    found = fit(equations, nonnegative=nonnegative)
    return with_sampling(found, objective, regularizers, known=known, population=population)


Key = TypeVar("Key", bound=Hashable)


def time_varying(
    objective: Objective,
    checkpoints: Mapping[Key, Mapping[str, Tensor]],
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, float] | None = None,
) -> dict[Key, Fit]:
    """Λ(t): one endpoint fit for every checkpoint of a run, by its time.

    Each says which penalty would make that checkpoint an optimum, were training to stop there.

    >>> import tacit
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> path = {t: {"weight": (1 - 0.5**t) * y.T} for t in (1, 2)}  # descent of step 1/2
    >>> fits = time_varying(objective, path, [tacit.l2()])
    >>> {t: round(found.strengths["l2"], 12) for t, found in fits.items()}
    {1: 0.5, 2: 0.166666666667}
    """
    if not isinstance(checkpoints, Mapping) or not checkpoints:
        raise InputError(
            f"checkpoints is {'empty' if checkpoints == {} else f'a {type(checkpoints).__name__}'}:"
            " pass a dictionary from time to parameters, with at least one entry."
        )
    fits: dict[Key, Fit] = {}
    for time in track(checkpoints, total=len(checkpoints), label="checkpoints"):
        point = named_point(objective, checkpoints[time], what=f"checkpoint {time!r}")
        fits[time] = fit(endpoint_equations(objective, regularizers, params=point, known=known))
    return fits
