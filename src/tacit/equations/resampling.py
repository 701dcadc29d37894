"""More equations from one data set: resample, retrain, stack; and one fit a checkpoint.

Two bootstraps, for two cases:

- pairs: examples are drawn with replacement. It goes with any data, but where the implicit
  regularizer depends on the inputs (early stopping: Λ is a function of XᵀX), every replicate has
  its own and the fit finds a compromise, which needs spread of the endpoints to be of use.
- residual: the inputs stay and the targets are redrawn. A regularizer that depends on the inputs
  and the algorithm alone is then shared by all replicates, and the stacked equations agree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tacit.equations.endpoint import endpoint_equations
from tacit.equations.equations import Equations, stack
from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.objective.batches import check_weights
from tacit.objective.borrowing import forked_randomness
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.objective.passes import track
from tacit.objective.randomness import seed_devices
from tacit.regularizers import Regularizer

Data = tuple[Tensor, ...]
Train = Callable[[Data, int], Mapping[str, Tensor]]


def bootstrap(  # noqa: PLR0913 # the data and the algorithm, then keyword options
    model: nn.Module,
    loss: Loss,
    data: Data,
    train: Train,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    replicates: int,
    kind: Literal["pairs", "residual"] = "pairs",
    weights: Tensor | None = None,
    known: Mapping[Regularizer, float] | None = None,
    seed: int = 0,
) -> Equations:
    """Endpoint equations of a model trained on the data and on resamples of it, stacked.

    The endpoint on the data itself comes first, then `replicates` others. Replicate b depends on
    (seed, b) alone: more replicates add to fewer. Before every training the model and torch's
    random state are as they were at the call (so `train` may train the model itself, or a copy),
    and they are so again at the end.

    A residual bootstrap draws targets* = fitted + resampled residuals, with what the model
    predicts (in eval mode) at the endpoint on the data itself. Those are the right fitted values
    for an early-stopped model too, though its fit is unfinished: a law such as Λ(t) holds for
    every target, so the choice moves only how far endpoints spread, and these need no second,
    finished training. Residuals are not centred: what an unfinished fit has not reached yet, an
    offset say, is in them and stays in the targets.

    Args:
        model: the architecture; its parameters name what `train` returns.
        loss: loss(output, target), mean-reduced, without any penalty.
        data: a tuple of tensors (inputs, …, target), one row an example.
        train: train(data, seed) returns the trained parameters, by name; it should draw all its
            randomness (initial weights, order of batches) from the seed.
        regularizers: candidates whose strengths are estimated.
        replicates: how many resamples.
        kind: "pairs" draws examples; "residual" draws residuals, for targets that are real numbers.
        weights: how probable each example (or its residual) is to be drawn, up to a factor; by
            default all alike. Examples whose gradients are less collinear steady the fit.
        known: penalties that `train` did apply, with their strengths.
        seed: of the resamples, and of what `train` is given.

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
    check_candidates(regularizers, known)
    _check(data, train, replicates, kind, seed)
    if weights is not None:
        weights = check_weights(weights, len(data[-1])).detach().cpu().double()
    devices = {p.device for p in model.parameters()} if isinstance(model, nn.Module) else set()
    Objective(model, loss, data)  # refuses what cannot be matched, before anything is trained
    fitted = residuals = data[-1]
    parts: list[Equations] = []
    with _lent(model) as restore:
        for index in track(range(replicates + 1), total=replicates + 1, label="bootstrap"):
            # Two seeds of 32 bits: one to resample by, and one that any library can be seeded with.
            draw, start = np.random.SeedSequence([seed, index]).generate_state(2).tolist()
            sample = data
            if index:
                rows = _resample(len(data[-1]), weights, draw).to(data[-1].device)
                sample = (
                    tuple(part[rows.to(part.device)] for part in data)
                    if kind == "pairs"
                    else (*data[:-1], fitted + residuals[rows])
                )
            restore()
            with forked_randomness(devices):
                seed_devices(start, devices)
                found = train(sample, start)
            objective = Objective(model, loss, sample)
            point = named_point(objective, found, what="what train returned")
            parts.append(endpoint_equations(objective, regularizers, params=point, known=known))
            if not index and kind == "residual":
                fitted = _predictions(objective, point, data[-1])
                residuals = data[-1] - fitted
    return stack(parts)


def _check(data: Any, train: Any, replicates: Any, kind: Any, seed: Any) -> None:
    for name, number, least in (("replicates", replicates, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
    if kind not in ("pairs", "residual"):
        raise InputError(f"kind is {kind!r}: pass 'pairs' or 'residual'.")
    if not callable(train):
        raise InputError(
            f"train is a {type(train).__name__}: pass a function train(data, seed) that returns "
            "the trained parameters by name."
        )
    if not _resampleable(data):
        raise InputError(
            f"data is {_kinds(data)}: resampling needs a tuple of tensors (inputs, …, target), one "
            "row an example; gather a loader's batches with torch.cat."
        )
    sizes = {len(t) if t.ndim else 0 for t in data}
    if len(sizes) > 1 or not max(sizes):
        raise InputError(
            f"the tensors of data have {sorted(sizes)} rows: each needs the same number, one row "
            "an example, and at least one."
        )
    if kind == "residual" and not data[-1].is_floating_point():
        raise InputError(
            f"targets are {data[-1].dtype}: a residual bootstrap adds residuals to predictions, "
            "which needs real-valued targets. Pass kind='pairs'."
        )


def _resampleable(data: Any) -> bool:
    return type(data) is tuple and len(data) > 1 and all(isinstance(t, Tensor) for t in data)


def _kinds(data: Any) -> str:
    if not isinstance(data, list | tuple):
        return f"a {type(data).__name__}"
    held = ", ".join(dict.fromkeys(type(part).__name__ for part in data))
    return f"a {type(data).__name__} of {len(data)} ({held or 'empty'})"


def _resample(count: int, weights: Tensor | None, seed: int) -> Tensor:
    """Indices of examples drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    if weights is None:
        return torch.randint(count, (count,), generator=generator)
    ends = weights.cumsum(0)
    places = torch.rand(count, generator=generator, dtype=torch.float64) * ends[-1]
    # Rounding may carry a place to the very end, which belongs to the last that can be drawn.
    return torch.searchsorted(ends, places, right=True).clamp(max=int(torch.nonzero(weights)[-1]))


def named_point(objective: Objective, found: Any, *, what: str) -> Params:
    if not isinstance(objective, Objective):
        raise InputError(
            f"an objective is a {type(objective).__name__}: pass tacit.Objective(model, loss, "
            "data)."
        )
    if not isinstance(found, Mapping):
        raise InputError(
            f"{what} is a {type(found).__name__}: parameters by name are needed, as in "
            "dict(model.named_parameters())."
        )
    return objective.point(found, what=what)


def _predictions(objective: Objective, point: Params, target: Tensor) -> Tensor:
    """What the model predicts in eval mode, in the shape of the targets."""
    (found,), _ = objective.predictions(point)
    if found.shape != target.shape:
        raise InputError(
            f"the model's outputs have shape {tuple(found.shape)} and the targets "
            f"{tuple(target.shape)}: residuals need the two alike. Pass kind='pairs'."
        )
    return found.to(target)


@contextmanager
def _lent(model: nn.Module) -> Iterator[Callable[[], None]]:
    """A function that puts the model back as it was found; it is called at the end in any case."""
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    kept = [t.detach().clone() for t in tensors]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        for module, training in modes:
            module.training = training

    try:
        yield restore
    finally:
        restore()
