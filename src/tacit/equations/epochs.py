"""Equations of whole epochs of a user's training loop: at the mean point, with the drift."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tacit.equations.equations import Equations
from tacit.equations.recording import flow_time
from tacit.equations.rows import check_candidates
from tacit.equations.target import Setting, Target, TargetPoint
from tacit.equations.trajectory import Trajectory, trajectory_target
from tacit.errors import InputError, check_type, check_whole
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, float64_zeros, norm, to_float64, trainable
from tacit.regularizers.family import Columns, Regularizer, join_columns, whole_column

MeanColumns = dict[Regularizer, dict[str, Params]]
"""Mean gradients over an epoch, by regularizer, column and tensor."""


class Epoch(NamedTuple):
    """One epoch: means over the points that its steps started from, and its total displacement."""

    mean: Params
    displacement: Params
    """In float64; after Adam scaled by √v̂ + ε, so that displacement/time is a mean gradient."""
    time: float
    columns: MeanColumns


class EpochAverages:
    """Means over the epochs of a training loop; see `average_epochs`.

    Not shared with the epochs of `tacit.ensembles`, whose arithmetic differs: plain means in the
    dtype of training, over flat rows of members that stop at different epochs, because all steps of
    an epoch take the same time there. Here sums are in float64, weighted by each step's time.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, averaged: Sequence[Regularizer], epochs: int
    ):
        self._model, self._optimizer, self._averaged = model, optimizer, tuple(averaged)
        self._epochs: deque[Epoch] = deque(maxlen=epochs)
        self._start_epoch()
        self._hook = optimizer.register_step_pre_hook(self._add_point)

    def __len__(self) -> int:
        return len(self._epochs)

    def _start_epoch(self) -> None:
        params = trainable(self._model)
        self._start = {n: to_float64(p).clone() for n, p in params.items()}
        self._sums, self._points, self._time = float64_zeros(params), 0, 0.0
        self._column_sums: MeanColumns = {r: {} for r in self._averaged}

    @torch.no_grad()
    def _add_point(self, *_: Any) -> None:
        """Before an update: add the point that it steps from, weighted by the step's flow time."""
        skipped = getattr(self._optimizer, "found_inf", None)
        if skipped is not None and float(skipped):  # a fused optimizer is called but does not move
            return
        params, time = trainable(self._model), flow_time(self._optimizer)
        if params.keys() != self._start.keys():  # earlier epochs have other equations
            if self._points:
                raise InputError(
                    "parameters were frozen or unfrozen within an epoch: call end_epoch() before."
                )
            self._epochs.clear()
            self._start_epoch()
        self._points += 1
        self._time += time
        _add_weighted(self._sums, params, time)
        for regularizer, sums in self._column_sums.items():
            for name, column in regularizer.gradient(params).items():
                _add_weighted(sums.setdefault(name, float64_zeros(params)), column, time)

    def end_epoch(self) -> None:
        """End the current epoch; call this after the last update of every epoch."""
        if not self._time:
            raise InputError(
                "end_epoch() was called before any update of the optimizer (or all had a step size "
                "of zero): call it after the last optimizer.step() of every epoch."
            )
        params = {n: p.detach() for n, p in self._model.named_parameters() if n in self._start}
        mean = {n: p.to(params[n]) for n, p in _divide(self._sums, self._time).items()}
        scales = _adam_scales(self._model, self._optimizer)
        moved = {
            n: (to_float64(p) - self._start[n]) * scales.get(n, 1.0) for n, p in params.items()
        }
        columns = {
            regularizer: {name: _divide(total, self._time) for name, total in sums.items()}
            for regularizer, sums in self._column_sums.items()
        }
        self._epochs.append(Epoch(mean, moved, self._time, columns))
        self._start_epoch()

    def target(self, objective: Objective) -> Target:
        """−∇L(θ̄) − Δθ/time of every recorded epoch: one pass over the data each."""
        if not self._epochs:
            raise InputError("no epoch was closed: call end_epoch() after each.")
        means, displacements, times, columns = zip(*self._epochs, strict=True)
        path = trajectory_target(objective, Trajectory(means, displacements, times))
        points = map(_with_mean_columns, path.points, columns)
        return Target(Setting("trajectory", objective, epochs=True), tuple(points))

    def equations(
        self,
        objective: Objective,
        regularizers: Regularizer | Sequence[Regularizer],
        *,
        known: Mapping[Regularizer, float] | None = None,
        rows: Scope = None,
    ) -> Equations:
        """Equations Σ λ_k ∇R_k = −∇L(θ̄) − Δθ/time, one source per recorded epoch.

        The short form of `target(objective).equations(regularizers)`. With two or more epochs,
        `Fit.standard_errors["training"]` measures their disagreement.
        """
        check_candidates(regularizers, known)  # before the passes over the data
        return self.target(objective).equations(regularizers, known=known, rows=rows)

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        self._hook.remove()


def average_epochs(
    model: nn.Module, optimizer: Optimizer, *, averaged: Sequence[Regularizer] = (), epochs: int = 1
) -> EpochAverages:
    """Average a training loop over its epochs, so that the noise of single batches cancels.

    The last weights of a run with a constant step size are one noisy draw. Summed over an epoch,
    the steps satisfy Δθ/time = −(mean of ∇L over the batches) − Σ λ_k (mean of ∇R_k). Every example
    was seen once, so the first mean is close to ∇L(θ̄), and Δθ accounts for training that has not
    finished. Call `end_epoch()` after each epoch.

    Points are weighted by their step size. Trap: where the step size falls within an epoch, the
    examples seen late have less weight, and the mean of ∇L over batches is not exactly ∇L.

    Args:
        model: the model that is trained.
        optimizer: torch's SGD (momentum counts as a flow time of η/(1−β)) or Adam (whose steps are
            taken in the metric √v̂ + ε, assumed constant over an epoch); it is observed by hooks.
        averaged: regularizers whose gradient is averaged over the points of an epoch, at the cost
            of one evaluation per step; for gradients that change within the noise of the weights,
            such as smooth_l1's. The gradients of others are taken at the mean point.
        epochs: how many of the last epochs to record. One gives an estimate, ten its error bars.

    >>> import tacit
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> X = torch.randn(64, 3).double()
    >>> y = X.sum(1, keepdim=True)
    >>> model = torch.nn.Linear(3, 1, bias=False).double()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    >>> averages = average_epochs(model, optimizer, epochs=4)
    >>> for epoch in range(40):
    ...     for rows in torch.randperm(64).split(8):
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(X[rows]), y[rows]).backward()
    ...         optimizer.step()
    ...     averages.end_epoch()
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> fit = tacit.fit(averages.equations(objective, [tacit.l2()]))
    >>> round(fit.strengths["l2"], 2), len(fit.sources)  # weight decay 0.2 is 0.1 ‖θ‖²
    (0.1, 4)
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    _check_optimizer(model, optimizer)
    check_whole("epochs", epochs)
    if not isinstance(averaged, Sequence) or any(not isinstance(r, Regularizer) for r in averaged):
        raise InputError("averaged is not a list of regularizers: pass one, as in [tacit.l2()].")
    return EpochAverages(model, optimizer, averaged, epochs)


def _add_weighted(sums: Params, tensors: Mapping[str, Tensor], weight: float) -> None:
    for name, total in sums.items():
        total.add_(tensors[name].to(total.device), alpha=weight)


def _divide(sums: Params, time: float) -> Params:
    return {n: total / time for n, total in sums.items()}


def _with_mean_columns(point: TargetPoint, columns: MeanColumns) -> TargetPoint:
    """An epoch's point with its averaged columns, and their distance from those at the point."""
    averaged = {r: _join_means(r, means, point.params) for r, means in columns.items()}
    unsettled = {r.name: _gradient_spread(r, means, point.params) for r, means in columns.items()}
    return replace(point, averaged=averaged, unsettled=unsettled)


def _join_means(regularizer: Regularizer, means: dict[str, Params], params: Params) -> Columns:
    """The mean gradients as columns, each on the tensors where the regularizer has it."""
    active = regularizer.bind(params).active
    return join_columns(
        [
            whole_column(name, {n: mean[n].to(params[n].device) for n in active if j in active[n]})
            for j, (name, mean) in enumerate(means.items())
        ]
    )


def _gradient_spread(regularizer: Regularizer, means: dict[str, Params], params: Params) -> float:
    """‖mean of ∇R − ∇R at the mean point‖ / ‖mean of ∇R‖, the largest over the columns."""
    at_mean, ratios = regularizer.gradient(params), [0.0]
    for name, mean in means.items():
        distance = norm({n: mean[n] - at_mean[name][n].to(mean[n].device) for n in mean})
        length = norm(mean)
        ratios.append(distance / length if length else 0.0)
    return max(ratios)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    groups = getattr(optimizer, "param_groups", [])
    unsupported = [g.get("decoupled_weight_decay") or g.get("amsgrad") for g in groups]
    if not isinstance(optimizer, SGD | Adam) or any(unsupported):
        raise InputError(
            f"optimizer is {type(optimizer).__name__}: pass SGD, or Adam without amsgrad and with "
            "weight decay in the loss (not decoupled, as in AdamW), or use endpoint_equations."
        )
    trained = {id(p) for group in groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if missing:
        raise InputError(
            f"the optimizer does not train {missing[0]!r} and {len(missing) - 1} others: their "
            "displacement carries no information. Set requires_grad=False for them."
        )
    flow_time(optimizer)  # raises here rather than at the first update


def _adam_scales(model: nn.Module, optimizer: Optimizer) -> Params:
    """√v̂ + ε of Adam, by parameter; none for SGD, and for parameters that had no gradient."""
    names = {id(p): n for n, p in model.named_parameters()}
    scales = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if id(parameter) in names and "exp_avg_sq" in state:
                bias = math.sqrt(1 - group["betas"][1] ** float(state["step"]))
                root = to_float64(state["exp_avg_sq"]).sqrt() / bias
                scales[names[id(parameter)]] = root + group["eps"]
    return scales
