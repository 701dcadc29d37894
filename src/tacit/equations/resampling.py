"""More equations from one data set: resample, retrain, stack.

Two bootstraps, for two cases:

- pairs: examples are drawn with replacement. It works for any data. Where the implicit regularizer
  depends on the inputs (early stopping: Λ is a function of XᵀX), every replicate has a different
  one, and the fit is a compromise between them.
- residual: the inputs stay and the targets are redrawn. A regularizer that depends only on the
  inputs and the algorithm is then the same for all replicates, and the stacked equations agree.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from tacit.equations.candidates import check_candidates, check_known
from tacit.equations.equations import Equations, stack
from tacit.equations.target import endpoint_equations
from tacit.errors import InputError, check_choice, check_type, check_whole
from tacit.objective.batches import check_weights
from tacit.objective.borrowing import forked_randomness, restored
from tacit.objective.losses import Loss
from tacit.objective.models import BatchNorm
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, shorten
from tacit.objective.passes import track
from tacit.objective.randomness import seed_devices
from tacit.objective.ranks import check_alone
from tacit.regularizers.family import Regularizer

TensorData = tuple[Tensor, ...]
TrainOnData = Callable[[TensorData, int], Mapping[str, Tensor]]
CandidatesOf = Callable[[Objective], Regularizer | Sequence[Regularizer]]
"""From the objective on the data in use to the candidates on that data."""


def bootstrap(  # noqa: PLR0913 # the data and the algorithm, then keyword options
    model: nn.Module,
    loss: Loss,
    data: TensorData,
    train: TrainOnData,
    regularizers: Regularizer | Sequence[Regularizer] | CandidatesOf,
    *,
    replicates: int,
    kind: Literal["pairs", "residual"] = "pairs",
    weights: Tensor | None = None,
    known: Mapping[Regularizer, float] | None = None,
    seed: int = 0,
    batch_norm: BatchNorm | None = None,
    batch_size: int | None = None,
) -> Equations:
    """Endpoint equations of a model trained on the data and on resamples of it, stacked.

    The endpoint on the data itself comes first, then the replicates. Replicate b depends only on
    (seed, b), so a call with more replicates only adds to those of a call with fewer. The model and
    torch's random state are restored to their state at the call before every training (so `train`
    may train the model itself, or a copy), and again at the end.

    A residual bootstrap draws targets* = fitted + resampled residuals, where the fitted values are
    the model's predictions (in eval mode) at the endpoint on the data itself. They are right for
    an early-stopped model too: a law such as Λ(t) holds for every target, so the choice of fitted
    values changes only how far the endpoints spread. Residuals are not centred: an offset that an
    unfinished fit has not reached yet stays in the targets.

    Args:
        model: the architecture; its parameters name what `train` returns.
        loss: loss(output, target), mean-reduced, without any penalty.
        data: a tuple of tensors (inputs, …, target), one row per example.
        train: train(data, seed) returns the trained parameters, by name; it should draw all its
            randomness (initial weights, order of batches) from the seed.
        regularizers: candidates whose strengths are estimated; those that depend on data as a
            function, such as lambda objective: [tacit.regularizers.gradient_norm(objective)], which
            is called with the objective on each resample.
        replicates: how many resamples.
        kind: "pairs" draws examples; "residual" draws residuals, for targets that are real numbers.
        weights: the probability of drawing each example (or its residual), up to a factor; by
            default equal. Examples whose gradients are less collinear stabilise the fit:
            `less_collinear` computes such weights for candidates that depend on data.
        known: penalties that `train` did apply, with their strengths.
        seed: seed of the resamples, and of the seeds that `train` receives.
        batch_norm: as in `Objective`; with "running" `train` returns a state_dict.
        batch_size: as in `Objective`.

    >>> import tacit
    >>> X, y = torch.eye(3).double(), torch.tensor([[2.0], [4.0], [3.0]]).double()
    >>> def ridge(data, seed):  # the optimum of mse_loss + 0.5 ‖θ‖²
    ...     X, y = data
    ...     return {"weight": torch.linalg.solve(X.T @ X / 3 + torch.eye(3) / 2, X.T @ y / 3).T}
    >>> model = torch.nn.Linear(3, 1, bias=False).double()
    >>> mse = torch.nn.functional.mse_loss
    >>> stacked = bootstrap(model, mse, (X, y), ridge, [tacit.l2()], replicates=4)
    >>> len(stacked.sources), round(tacit.fit(stacked).strengths["l2"], 12)
    (5, 0.5)
    """
    candidates_of = check_candidates_of(regularizers, known)
    _check(data, train, replicates, kind, seed)
    if weights is not None:
        weights = check_weights(weights, len(data[-1])).detach().cpu().double()
    devices = {p.device for p in model.parameters()} if isinstance(model, nn.Module) else set()
    make_objective = partial(Objective, model, loss, batch_norm=batch_norm, batch_size=batch_size)
    check_alone(make_objective(data).ranks, "bootstrap")  # raises before anything is trained
    fitted = residuals = data[-1]
    parts: list[Equations] = []
    with restored(model) as restore:
        for index in track(range(replicates + 1), total=replicates + 1, label="bootstrap"):
            # Two seeds of 32 bits: one for the resample, one that any library accepts.
            seeds = np.random.SeedSequence([seed, index]).generate_state(2)
            resample_seed, train_seed = seeds.tolist()
            sample = data
            if index:
                rows = _resample(len(data[-1]), weights, resample_seed)
                if kind == "pairs":
                    sample = tuple(part[rows.to(part.device)] for part in data)
                else:
                    sample = (*data[:-1], fitted + residuals[rows.to(residuals.device)])
            restore()
            with forked_randomness(devices):
                seed_devices(train_seed, devices)
                trained = train(sample, train_seed)
            objective = make_objective(sample)
            point = check_point(objective, trained, what="what train returned")
            candidates = candidates_of(objective)
            parts.append(endpoint_equations(objective, candidates, params=point, known=known))
            if not index and kind == "residual":
                fitted = _predictions(objective, point, data[-1])
                residuals = data[-1] - fitted
    return stack(parts)


def check_candidates_of(
    regularizers: Any, known: Mapping[Regularizer, float] | None
) -> CandidatesOf:
    """Candidates as a function of the objective; those that would keep other data are refused."""
    listed = () if callable(regularizers) else check_candidates(regularizers, known).estimated
    fixed = [r.name for r in (*listed, *check_known(known)) if r.objective is not None]
    if fixed:
        raise InputError(
            f"{shorten(fixed)} would keep the data that it was made with, while the loss is on "
            "other data: pass regularizers as a function of the objective, such as lambda "
            "objective: [tacit.regularizers.gradient_norm(objective)]."
        )
    if listed:
        return lambda _: listed
    return _CandidatesOnNewData(cast(CandidatesOf, regularizers))


class _CandidatesOnNewData:
    """A function from objectives to candidates, whose data must be new at every call."""

    def __init__(self, function: CandidatesOf):
        try:
            inspect.signature(function).bind("objective")
        except TypeError as error:
            raise InputError(
                f"regularizers is a function that cannot be called with an objective ({error}): "
                "pass a list of regularizers, as in [tacit.l2()], or a function of the objective, "
                "such as lambda objective: [tacit.regularizers.gradient_norm(objective)]."
            ) from error
        self._function = function
        self._earlier: list[Objective] = []
        """The objectives of data-dependent candidates of the call before."""

    def __call__(self, objective: Objective) -> tuple[Regularizer, ...]:
        """The candidates on the data of this objective."""
        candidates = check_candidates(self._function(objective), None).estimated
        on_data = [r.objective for r in candidates if r.objective is not None]
        if any(used is earlier for used in on_data for earlier in self._earlier):
            raise InputError(
                "a regularizer that the function returned has the data of an earlier call, or data "
                "that is not resampled: make it with the objective that the function is given, as "
                "in lambda objective: [tacit.regularizers.gradient_norm(objective)]."
            )
        self._earlier = on_data
        return candidates


def _check(data: Any, train: Any, replicates: Any, kind: Any, seed: Any) -> None:
    check_whole("replicates", replicates)
    check_whole("seed", seed, least=0)
    check_choice("kind", kind, ("pairs", "residual"))
    check_type("train", train, Callable, "a function train(data, seed)")
    check_tensors(data)
    if kind == "residual" and not data[-1].is_floating_point():
        raise InputError(
            f"targets are {data[-1].dtype}: residuals need real-valued targets. Pass kind='pairs'."
        )


def check_tensors(data: Any) -> None:
    """Refuse data that is not a tuple of tensors with one row per example."""
    if type(data) is not tuple or len(data) < 2 or not all(isinstance(t, Tensor) for t in data):
        described = type(data).__name__
        if isinstance(data, list | tuple):
            types = ", ".join(dict.fromkeys(type(part).__name__ for part in data))
            described += f" of {len(data)} ({types or 'empty'})"
        raise InputError(
            f"data is a {described}: resampling needs a tuple of tensors (inputs, …, target), one "
            "row per example; gather a loader's batches with torch.cat."
        )
    sizes = {len(t) if t.ndim else 0 for t in data}
    if len(sizes) > 1 or not max(sizes):
        raise InputError(
            f"the tensors of data have {sorted(sizes)} rows: each needs one row per example, and "
            "at least one."
        )


def _resample(count: int, weights: Tensor | None, seed: int) -> Tensor:
    """Indices of examples drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    if weights is None:
        return torch.randint(count, (count,), generator=generator)
    ends = weights.cumsum(0)
    positions = torch.rand(count, generator=generator, dtype=torch.float64) * ends[-1]
    # Rounding may move a position to the end: it then selects the last example with weight.
    return torch.searchsorted(ends, positions, right=True).clamp(
        max=int(torch.nonzero(weights)[-1])
    )


def check_point(objective: Objective, params: Any, *, what: str) -> Params:
    """Parameters by name as a point of the objective; anything else is refused."""
    check_type(what, params, Mapping, "parameters by name, as in dict(model.named_parameters())")
    return check_objective(objective).point(params, what=what)


def _predictions(objective: Objective, point: Params, target: Tensor) -> Tensor:
    """The model's predictions in eval mode, in the shape of the targets."""
    if objective.batch_norm == "batch":
        raise InputError(
            "with batch_norm='batch' predictions depend on which examples share a batch, so that "
            "there are no residuals: pass kind='pairs', or batch_norm='running'."
        )
    (outputs,), _ = objective.predictions(point)
    if outputs.shape != target.shape:
        raise InputError(
            f"the model's outputs have shape {tuple(outputs.shape)} and the targets "
            f"{tuple(target.shape)}: residuals need equal shapes. Pass kind='pairs'."
        )
    return outputs.to(target)


def _same_data(first: Objective, second: Objective | None) -> bool:
    """Whether two objectives have the same data object, or tuples of the same tensors."""
    if second is None or type(first.data) is not tuple or type(second.data) is not tuple:
        return second is not None and first.data is second.data
    return [id(part) for part in first.data] == [id(part) for part in second.data]


def less_collinear(
    regularizers: Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    directions: int = 64,
    seed: int = 0,
) -> Tensor:
    """Weights of examples for `bootstrap` that favour those with less collinear columns.

    Columns of penalties that depend on data are sums over examples. With C_i the cosines between
    the parts that example i has in the different columns, its weight is the smallest eigenvalue of
    C_i: zero where they are linearly dependent, one where they are orthogonal. Data that is drawn
    with these weights separates the penalties better. The weights are scaled to mean one.

    Parts are known by their products with random directions, from `Regularizer.influence`; those of
    no single example are formed.

    Args:
        regularizers: two or more candidates of one column that depend on data, of one objective.
        params: the point; by default the model's current parameters.
        directions: how many random directions: cosines have an error of about 1/√directions.
        seed: seed of the directions.
    """
    check_whole("directions", directions, least=2)
    check_whole("seed", seed, least=0)
    candidates = check_candidates(regularizers, None).estimated
    objective = candidates[0].objective
    influences = [r.influence for r in candidates if r.influence is not None]
    if objective is None or len(influences) < max(2, len(candidates)):
        raise InputError(
            f"weights of {shorten(r.name for r in candidates)}: pass two or more penalties whose "
            "columns are sums over examples, such as tacit.regularizers.mean_of(objective)."
        )
    point = objective.point(params)
    generator = torch.Generator().manual_seed(seed)
    random = [
        {n: torch.randn(p.shape, generator=generator).to(p) for n, p in point.items()}
        for _ in range(directions)
    ]
    parts = [influence(point, random)[:, :, 0] for influence in influences]
    if not all(_same_data(objective, r.objective) for r in candidates):
        raise InputError("the penalties are of different data: make all of them of the same.")
    stacked = torch.stack(parts, dim=1).double()
    unit = stacked / stacked.norm(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    weights = torch.linalg.eigvalsh(unit @ unit.mT)[:, 0].clamp(min=0)
    if not weights.any():
        raise InputError(
            "the columns are collinear in every example: no choice of examples separates them."
        )
    return weights / weights.mean()
