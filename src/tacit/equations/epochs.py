"""Equations of whole epochs of a user's training loop: at the mean point, with the drift."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.equations.candidates import check_candidates, check_readable
from tacit.equations.clipping import GradientSizes, clipped_part, was_skipped
from tacit.equations.equations import Equations
from tacit.equations.recording import Momentum, Rows, WrapperWatch, flow_times
from tacit.equations.scale_free import find_scale_free, row_products, without_lengthening
from tacit.equations.step_hooks import StepHooks
from tacit.equations.steps import trajectory_target
from tacit.equations.target import Setting, Target, TargetPoint
from tacit.equations.target_files import read_content, target_content
from tacit.equations.trajectory import Trajectory
from tacit.errors import InputError, check_type, check_whole
from tacit.objective.models import (
    BatchNorm,
    copy_statistics,
    has_dropout,
    named_parameters,
    trainable,
    used_statistics,
)
from tacit.objective.objective import Objective
from tacit.objective.params import (
    Params,
    Point,
    Scope,
    float64_zeros,
    move_like,
    norm,
    shorten,
    to_float64,
)
from tacit.objective.ranks import Ranks, on_its_ranks, own_rows, ranks_of
from tacit.regularizers.family import Columns, Regularizer, join_columns, whole_column
from tacit.regularizers.weight_decay import (
    step_rule,
    unwrap_optimizer,
)

FEWEST_UPDATES = 100
"""Clipping in an epoch is judged from at least as many updates, also of epochs before it."""
CURRENT = (
    "start", "sums", "points", "forces", "steps", "scales", "products", "statistics", "dropout",
    "times",
)  # fmt: skip
"""What `EpochAverages` adds up over the current epoch, beside the columns of regularizers."""
MeanColumns = dict[Regularizer, dict[str, Params]]
"""Mean gradients over an epoch, by regularizer, column and tensor."""


class Epoch(NamedTuple):
    """One epoch: means over the points that its steps started from, and its total displacement."""

    mean: Params
    displacement: Params
    """In float64, without what momentum carried over from earlier gradients (see `Momentum`), as if
    all steps had been of the same size: every batch has the same weight. Scaled so that
    displacement/time is a mean gradient: each step of Adam by its own √v̂ + ε, and all by the
    largest flow time over their own for parameters of groups with smaller rates."""
    time: float
    """The largest flow time of any parameter."""
    columns: MeanColumns
    metric: Params
    """The mean of Adam's √v̂ + ε; empty for SGD."""
    products: Params
    """By row of every matrix: the mean of ⟨θ_t, f_t⟩ − ⟨θ̄, f_t⟩ over the forces f_t of updates."""
    batch_norm: BatchNorm | None
    """See `Trajectory.batch_norm`."""
    dropout: bool
    """Whether dropout was active."""
    updates: int
    sizes: Tensor
    """Of the gradients of these updates, and some before: see `GradientSizes`."""


class EpochAverages:
    """Means over the epochs of a training loop; see `average_epochs`.

    Not shared with the epochs of `tacit.ensembles`, whose arithmetic differs: means in the dtype of
    training, over flat rows of members that stop at different epochs, with the momentum of earlier
    epochs. Here sums are in float64, and every batch has the same weight.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        averaged: Sequence[Regularizer],
        epochs: int,
        hooks: StepHooks | None,
    ):
        self._wrapper = WrapperWatch(model, optimizer, hooks)
        optimizer = unwrap_optimizer(optimizer)
        register = hooks or optimizer
        self._model, self._optimizer, self._averaged = model, optimizer, tuple(averaged)
        self.ranks: Ranks = ranks_of(model)
        """The processes that share the model; each records its own rows of the parameters."""
        with self.ranks:
            check_readable(averaged)
        self._epochs: deque[Epoch] = deque(maxlen=epochs)
        self.length_matters: set[str] = set()
        """Matrices on whose length the loss was seen to depend: `target` does not look again."""
        self._momentum, self._sizes = Momentum(model), GradientSizes(register)
        self._start_epoch()
        self._hooks = (
            *self._wrapper.hooks,
            *self._sizes.hooks,
            register.register_step_pre_hook(self._add_point),
            register.register_step_post_hook(self._add_forces),
        )

    def __len__(self) -> int:
        return len(self._epochs)

    def __bool__(self) -> bool:
        return True  # also before the first epoch, unlike other things of length zero

    def _start_epoch(self) -> None:
        params = trainable(self._model)
        self._start = {n: to_float64(p).clone() for n, p in params.items()}
        self._sums, self._points = float64_zeros(params), 0
        self._forces, self._steps = float64_zeros(params), float64_zeros(params)
        self._scales: Params = {}
        self._products = {n: row_products(p, p) for n, p in float64_zeros(params).items()}
        self._momentum.take_carried()  # begins anew
        self._statistics, self._dropout = copy_statistics(self._model), False
        self._times = dict.fromkeys(params, 0.0)
        self._column_sums: MeanColumns = {r: {} for r in self._averaged}

    @torch.no_grad()
    def _add_forces(self, optimizer: Optimizer, *_: Any) -> None:
        """After an update: add the force that it applied, and the step that this force makes."""
        if was_skipped(optimizer):
            return
        times = flow_times(self._model, optimizer, self._start)
        for name, rows, update in self._momentum.after_step(optimizer):
            if name in self._start:
                self._forces[name][rows] += update.force
                step = update.force
                if update.scale is not None:
                    step = step / update.scale
                    self._add_scale(name, rows, update.scale)
                self._steps[name][rows].add_(step, alpha=times[name])
                if step.ndim > 1:
                    self._products[name][rows] += row_products(update.start, update.force)

    def _add_scale(self, name: str, rows: Rows, scale: Tensor) -> None:
        if name not in self._scales:
            self._scales[name] = torch.zeros_like(self._sums[name])
        self._scales[name][rows] += scale

    @on_its_ranks
    @torch.no_grad()
    def _add_point(self, optimizer: Optimizer, *_: Any) -> None:
        """Before an update: add the point that it steps from."""
        if was_skipped(optimizer):
            return
        self._momentum.before_step(optimizer)
        params = trainable(self._model)
        times = flow_times(self._model, optimizer, params)
        if params.keys() != self._start.keys():  # earlier epochs have other equations
            if self._points:
                raise InputError(
                    "parameters were frozen or unfrozen within an epoch: call end_epoch() before."
                )
            self._epochs.clear()
        if not (self._points or self._epochs):  # weights may have been loaded since
            self._start_epoch()
        self._dropout = self._dropout or (not self._points and has_dropout(self._model))
        self._points += 1
        for name, time in times.items():
            self._times[name] += time
        _add(self._sums, params)
        for regularizer, sums in self._column_sums.items():
            for name, column in regularizer.gradient(params).items():
                _add(sums.setdefault(name, float64_zeros(params)), column)

    @property
    def has_moved(self) -> bool:
        """Whether the current epoch had an update, of a step size above zero."""
        return max(self._times.values()) > 0

    @property
    def at_rest(self) -> str | None:
        """A parameter whose step size was zero in all updates of the current epoch."""
        return next((name for name, time in self._times.items() if not time), None)

    @on_its_ranks
    def is_finite(self) -> bool:
        """Whether all weights of the current epoch are finite; each of several processes asks."""
        return norm(self._sums) + norm(trainable(self._model)) < torch.inf  # not NaN either

    def end_epoch(self) -> None:
        """End the current epoch; call this after the last update of every epoch."""
        time = max(self._times.values())
        if not time:
            raise InputError(
                "end_epoch() was called before any update of the optimizer (or all had a step size "
                "of zero, or were skipped): call it after the last optimizer.step() of every epoch."
            )
        if self.at_rest is not None:
            raise InputError(
                f"the learning rate of {self.at_rest!r} was zero for the whole epoch: set "
                "requires_grad=False for parameters that are not trained."
            )
        parameters = named_parameters(self._model)
        params = {n: own_rows(parameters[n].detach()) for n in self._start}
        mean = {n: (total / self._points).to(params[n]) for n, total in self._sums.items()}
        metric = {n: total / self._points for n, total in self._scales.items()}
        carried = self._momentum.take_carried()
        moved = {n: to_float64(p) - self._start[n] - carried.get(n, 0.0) for n, p in params.items()}
        scaled = {
            n: self._scaled(n, change, metric.get(n)) * (time / self._times[n])
            for n, change in moved.items()
        }
        columns = {
            regularizer: {name: _divide(total, self._points) for name, total in sums.items()}
            for regularizer, sums in self._column_sums.items()
        }
        statistics = copy_statistics(self._model)
        used = used_statistics(self._model, self._statistics, statistics)
        if statistics and used != "batch":
            mean = Point(mean, statistics)  # frozen batch norm: the same at all points of the epoch
        products = {
            n: (total - row_products(mean[n].double(), self._forces[n])) / self._points
            for n, total in self._products.items()
        }
        updates, sizes = self._points, self._sizes.last(max(self._points, FEWEST_UPDATES))
        facts = (metric, products, used, self._dropout, updates, sizes)
        self._epochs.append(Epoch(mean, scaled, time, columns, *facts))
        self._start_epoch()

    def _scaled(self, name: str, moved: Tensor, metric: Tensor | None) -> Tensor:
        """−τ̄ Σ f_t of the forces f_t of all updates, and whatever else moved the weights.

        Their own steps are −τ_t f_t, of unequal size, or −τ_t f_t/(√v̂_t + ε) after Adam, where v̂_t
        contains the batch of f_t: a mean of such steps is not the mean of their forces. What else
        moved the weights is therefore what remains of the displacement, times the mean metric.
        """
        other = moved + self._steps[name]
        mean_time = self._times[name] / self._points
        return (other if metric is None else other * metric) - mean_time * self._forces[name]

    @on_its_ranks
    def target(self, objective: Objective, *, samples: Sequence[Objective] | None = None) -> Target:
        """−∇L(θ̄) − Δθ/time of every recorded epoch: one pass over the data each.

        With samples, of the objective's data and one for each recorded epoch, ∇L is that of its
        sample. The epochs then count as independent: their disagreement is due to the examples.
        """
        if not self._epochs:
            raise InputError("no epoch was closed: call end_epoch() after each.")
        self._wrapper.check()
        epochs = tuple(self._epochs)
        norms = "running" if any(epoch.batch_norm == "running" for epoch in epochs) else None
        points: list[TargetPoint] = []
        for epoch, part in zip(epochs, samples or [objective] * len(epochs), strict=True):
            step = [epoch.mean], [epoch.displacement], [epoch.time]
            points += trajectory_target(part, Trajectory(*step, batch_norm=norms)).points
            if samples is not None:
                points[-1] = replace(points[-1], description=part.describe(points[-1].params))
        last, moved = points[-1], epochs[-1].displacement
        gradient = {
            n: target + moved[n].to(target.device) / epochs[-1].time
            for n, target in last.vectors[0].items()
        }
        scale_free = find_scale_free(objective, last.params, gradient, self.length_matters)
        points = [
            _with_means(without_lengthening(scale_free, point, epoch.products), epoch, objective)
            for point, epoch in zip(points, epochs, strict=True)
        ]
        setting = Setting(
            "trajectory", objective, epochs=True, sampled=samples is not None, piece=len(points)
        )
        return Target(setting, tuple(points))

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

    def last_columns(self) -> list[dict[str, Params]]:
        """The mean gradients of the averaged regularizers over the last epoch, in their order."""
        return [self._epochs[-1].columns[r] for r in self._averaged]

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """All that was recorded, also of the epoch that has not ended; for a checkpoint."""
        return {
            "current": {name: getattr(self, f"_{name}") for name in CURRENT},
            "columns": [self._column_sums[r] for r in self._averaged],
            "carried": (self._momentum.carried, self._momentum.largest),
            "sizes": self._sizes.last(),
            "epochs": [self._state_of(epoch) for epoch in self._epochs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the model and the optimizer are as they were."""
        params = trainable(self._model)
        state = move_like(state, params)
        if state["current"]["sums"].keys() != params.keys():
            raise InputError(
                "the state was recorded with other parameters, or others were frozen: load it for "
                "the model that it was recorded with."
            )
        if len(state["columns"]) != len(self._averaged):
            raise InputError(
                f"the state has means of {len(state['columns'])} regularizers, and this was made "
                f"with {len(self._averaged)}: make it with the same ones."
            )
        for name, value in state["current"].items():
            setattr(self, f"_{name}", value)
        self._column_sums = dict(zip(self._averaged, state["columns"], strict=True))
        self._momentum.carried, self._momentum.largest = state["carried"]
        self._sizes.restore(state["sizes"])
        self._epochs.clear()
        self._epochs.extend(self._epoch_of(epoch) for epoch in state["epochs"])

    def _state_of(self, epoch: Epoch) -> dict[str, Any]:
        """An epoch without types of tacit's own, as `torch.load(weights_only=True)` wants it."""
        buffers = epoch.mean.buffers if isinstance(epoch.mean, Point) else None
        columns = [epoch.columns[r] for r in self._averaged]
        plain = {"mean": dict(epoch.mean), "buffers": buffers, "columns": columns}
        return epoch._asdict() | plain

    def _epoch_of(self, state: Mapping[str, Any]) -> Epoch:
        values = dict(state)
        buffers = values.pop("buffers")
        mean = values["mean"] if buffers is None else Point(values["mean"], buffers)
        columns = dict(zip(self._averaged, values["columns"], strict=True))
        return Epoch(**{**values, "mean": mean, "columns": columns})


def average_epochs(
    model: nn.Module, optimizer: Optimizer, *, averaged: Sequence[Regularizer] = (), epochs: int = 1
) -> EpochAverages:
    """Average a training loop over its epochs, so that the noise of single batches cancels.

    The last weights of a run with a constant step size are one noisy draw. Summed over an epoch,
    the steps satisfy Δθ/time = −(mean of ∇L over the batches) − Σ λ_k (mean of ∇R_k). Every example
    was seen once, so the first mean is close to ∇L(θ̄), and Δθ accounts for training that has not
    finished. Call `end_epoch()` after each epoch.

    Every batch has the same weight: what momentum carries over from earlier batches is taken out of
    Δθ, and so is what steps of different sizes (a schedule within an epoch) weigh more or less.

    Trap: where gradients are clipped (`torch.nn.utils.clip_grad_norm_`), by factors c < 1, training
    comes to rest at c∇L + λ∇R = 0: weight decay comes out as λ/c. A fit says so.

    Args:
        model: the model that is trained.
        optimizer: torch's SGD, Adam or AdamW; the steps of the latter two are taken in the metric
            √v̂ + ε, assumed constant over an epoch. Groups may have their own rates. It is observed
            by hooks, inside wrappers that hold it as `.optimizer`; this takes a copy of momentum's
            buffers and five vectors of the parameters' size in float64. AdamW's decay is the
            candidate `metric_ridge`: see `optimizer_penalties`.
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
    check_whole("epochs", epochs)
    return observe_epochs(model, optimizer, averaged, epochs)


def observe_epochs(
    model: nn.Module,
    optimizer: Optimizer,
    averaged: Sequence[Regularizer],
    epochs: int = 1,
    hooks: StepHooks | None = None,
) -> EpochAverages:
    """What `average_epochs` returns, by hooks that may be made and closed within an update."""
    check_type("model", model, nn.Module, "a torch.nn.Module")
    _check_optimizer(model, unwrap_optimizer(optimizer))
    if not isinstance(averaged, Sequence) or any(not isinstance(r, Regularizer) for r in averaged):
        raise InputError("averaged is not a list of regularizers: pass one, as in [tacit.l2()].")
    costly = [r for r in averaged if r.cost == "second-order"]
    if noisy := [r.name for r in costly if r.bind(trainable(model)).noisy]:
        raise InputError(
            f"{shorten(noisy)} cannot be averaged: its columns are from random probes, and a mean "
            "over updates would hide their noise. Leave it out of averaged=, and pass it to "
            "target.equations, which takes it at the mean weights."
        )
    return EpochAverages(model, optimizer, averaged, epochs, hooks)


def _add(sums: Params, tensors: Mapping[str, Tensor]) -> None:
    for name, total in sums.items():
        total.add_(tensors[name].to(total.device))


def _divide(sums: Params, count: int) -> Params:
    return {n: total / count for n, total in sums.items()}


def _with_means(point: TargetPoint, epoch: Epoch, objective: Objective) -> TargetPoint:
    """An epoch's point with its metric and averaged columns, and what the epoch shows of them."""
    columns, params = epoch.columns, point.params
    facts = replace(
        point.facts,
        unsettled={r.name: _gradient_spread(r, means, params) for r, means in columns.items()},
        clipped=clipped_part(epoch.sizes, epoch.updates),
        dropout=epoch.dropout and not objective.training,
    )
    averaged = {r: _join_means(r, means, params) for r, means in columns.items()}
    return replace(point, averaged=averaged, metric=epoch.metric, facts=facts)


def target_state(target: Target) -> dict[str, Any]:
    """The target of one epoch as plain values and tensors, without averaged columns."""
    header, tensors = target_content(target.setting, target.points)
    return {"head": json.dumps(header), "tensors": tensors}


def restore_target(
    state: Mapping[str, Any], objective: Objective, columns: Mapping[Regularizer, dict[str, Params]]
) -> Target:
    """What `target_state` is of, with mean gradients by averaged regularizer."""
    device = next(iter(objective.params.values())).device
    tensors = [tensor.to(device) for tensor in state["tensors"]]
    setting, (point,) = read_content(json.loads(state["head"]), tensors)
    averaged = {r: _join_means(r, means, point.params) for r, means in columns.items()}
    return Target(replace(setting, computed_from=objective), (replace(point, averaged=averaged),))


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
    """Refuse steps that are not known, and optimizers that do not train the whole model."""
    if step_rule(optimizer) not in ("SGD.step", "Adam.step"):
        raise InputError(
            f"{type(optimizer).__name__} has a step of its own, and which time and metric a "
            "gradient is applied with is not known: train with torch's SGD, Adam or AdamW, or use "
            "endpoint_equations."
        )
    flow_times(model, optimizer, trainable(model))  # raises here rather than at the first update
