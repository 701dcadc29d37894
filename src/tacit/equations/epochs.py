"""An epoch of a user's own training loop as one equation: its mean point and its drift."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tacit.equations.equations import Equations, stack
from tacit.equations.recording import flow_time
from tacit.equations.rows import check_candidates
from tacit.equations.trajectory import Trajectory, trajectory_equations
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, float64_zeros, norm, to_float64, trainable
from tacit.regularizers import Columns, Regularizer


@dataclass(frozen=True, eq=False)
class Epoch:
    """What an epoch comes to: means over the points it stepped from, and where it went in all."""

    mean: Params
    displacement: Params
    """In float64; after Adam scaled by √v̂ + ε, so that over time it is a mean force."""
    time: float
    columns: dict[Regularizer, dict[str, Params]]
    """Mean gradients of the averaged regularizers, by column and tensor."""


class EpochAverages:
    """Means over the epochs of a training loop; see `average_epochs`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, averaged: Sequence[Regularizer], kept: int
    ):
        self._model, self._optimizer, self._averaged = model, optimizer, tuple(averaged)
        self._epochs: deque[Epoch] = deque(maxlen=kept)
        self._begin()
        self._hook = optimizer.register_step_pre_hook(self._see_point)

    def __len__(self) -> int:
        return len(self._epochs)

    def _begin(self) -> None:
        params = trainable(self._model)
        self._start = {n: to_float64(p).clone() for n, p in params.items()}
        self._sums, self._points, self._time = float64_zeros(params), 0, 0.0
        self._columns: dict[Regularizer, dict[str, Params]] = {}

    @torch.no_grad()
    def _see_point(self, *_: Any) -> None:
        """Before an update: the point that it steps from, weighed by how long it will step."""
        skipped = getattr(self._optimizer, "found_inf", None)
        if skipped is not None and float(skipped):  # a fused optimizer steps, but does not move
            return
        params, time = trainable(self._model), _time_of_step(self._optimizer)
        if params.keys() != self._start.keys():
            self._begin_anew()
        self._points += 1
        self._time += time
        _add(self._sums, params, time)
        for regularizer in self._averaged:
            held = self._columns.setdefault(regularizer, {})
            for name, column in regularizer.gradient(params).items():
                _add(held.setdefault(name, float64_zeros(params)), column, time)

    def _begin_anew(self) -> None:
        """Other parameters train from here on: what was kept is of another system."""
        if self._points:
            raise InputError(
                "parameters were frozen or unfrozen within an epoch: call end_epoch() before."
            )
        self._epochs.clear()
        self._begin()

    def end_epoch(self) -> None:
        """Close an epoch: call it after the last update of each."""
        if not self._time:
            raise InputError(
                "end_epoch() was called before any update of the optimizer (or all had a step size "
                "of zero): call it after the last optimizer.step() of every epoch."
            )
        params = {n: p for n, p in _parameters(self._model).items() if n in self._start}
        metric = _metric(self._model, self._optimizer)
        moved = {n: to_float64(p) - self._start[n] for n, p in params.items()}
        self._epochs.append(
            Epoch(
                mean={n: (s / self._time).to(params[n]) for n, s in self._sums.items()},
                displacement={n: m if metric is None else m * metric[n] for n, m in moved.items()},
                time=self._time,
                columns={
                    r: {c: {n: t / self._time for n, t in own.items()} for c, own in held.items()}
                    for r, held in self._columns.items()
                },
            )
        )
        self._begin()

    def equations(
        self,
        objective: Objective,
        regularizers: Regularizer | Sequence[Regularizer],
        *,
        known: Mapping[Regularizer, float] | None = None,
        rows: Scope = None,
    ) -> Equations:
        """Equations Σ λ_k ∇R_k = −∇L(θ̄) − Δθ/time, one source for each epoch that was kept.

        With two or more, `Fit.standard_errors["training"]` is how far the epochs disagree.
        """
        if not self._epochs:
            raise InputError("no epoch was closed: call end_epoch() after each.")
        candidates = check_candidates(regularizers, known)
        _check_averaged(self._averaged, (*candidates.estimated, *candidates.known))
        parts = []
        for epoch in self._epochs:
            path = Trajectory([epoch.mean], [epoch.displacement], [epoch.time])
            swapped = {r: _averaged_form(r, epoch) for r in epoch.columns}
            found = trajectory_equations(
                objective,
                path,
                [swapped.get(r, r) for r in candidates.estimated],
                known={swapped.get(r, r): value for r, value in candidates.known.items()},
                rows=rows,
            )
            bends = {r.name: _bend(r, epoch) for r in epoch.columns}
            source = replace(found.sources[0], unsettled=bends, epoch=True)
            parts.append(replace(found, sources=(source,)))
        return stack(parts)

    def close(self) -> None:
        """Let go of the optimizer."""
        self._hook.remove()


def average_epochs(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    averaged: Sequence[Regularizer] = (),
    kept: int = 1,
) -> EpochAverages:
    """Average a training loop over its epochs, so that the noise of single batches cancels.

    The last weights of a run with a constant step are one noisy draw. Summed over an epoch, the
    steps say Δθ/time = −(mean of ∇L over the batches) − Σ λ_k (mean of ∇R_k): what is left of the
    way to the optimum is Δθ, and each example was seen once. Call `end_epoch()` after each epoch.

    Points weigh by their step size. Trap: where that falls within an epoch, so do the examples seen
    late, and the mean of ∇L over batches is not quite ∇L.

    Args:
        model: what is trained.
        optimizer: torch's SGD (momentum counts as a flow time of η/(1−β)) or Adam (whose steps are
            taken in the metric √v̂ + ε, assumed steady over an epoch); it is watched by hooks.
        averaged: regularizers whose gradient is averaged over the points of an epoch, at the cost
            of one evaluation a step; for those that bend within the noise of the weights, such as
            smooth_l1. Others are taken at the mean point.
        kept: how many of the last epochs to keep. One gives an estimate, ten its error bars.

    >>> import tacit
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> X = torch.randn(64, 3).double()
    >>> y = X.sum(1, keepdim=True)
    >>> model = torch.nn.Linear(3, 1, bias=False).double()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    >>> watch = average_epochs(model, optimizer, kept=4)
    >>> for epoch in range(40):
    ...     for rows in torch.randperm(64).split(8):
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(X[rows]), y[rows]).backward()
    ...         optimizer.step()
    ...     watch.end_epoch()
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> found = tacit.fit(watch.equations(objective, [tacit.l2()]))
    >>> round(found.strengths["l2"], 2), len(found.sources)  # weight decay 0.2 is 0.1 ‖θ‖²
    (0.1, 4)
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"average_epochs was given a {type(model).__name__}: pass a torch.nn.Module."
        )
    _check_optimizer(model, optimizer)
    if isinstance(kept, bool) or not isinstance(kept, int) or kept < 1:
        raise InputError(f"kept is {kept!r}: pass a whole number of epochs, at least 1.")
    if not isinstance(averaged, Sequence) or any(not isinstance(r, Regularizer) for r in averaged):
        raise InputError("averaged is no list of regularizers: pass one, as in [tacit.l2()].")
    return EpochAverages(model, optimizer, averaged, kept)


def _parameters(model: nn.Module) -> Params:
    return {n: p.detach() for n, p in model.named_parameters()}


def _add(sums: Params, parts: Mapping[str, Tensor], weight: float) -> None:
    for name, total in sums.items():
        total.add_(parts[name].to(total.device), alpha=weight)


def _averaged_form(regularizer: Regularizer, epoch: Epoch) -> Regularizer:
    """The regularizer with its columns as averaged over the epoch, instead of at a point."""
    columns = epoch.columns[regularizer]

    def bind(params: Params) -> Columns:
        active = regularizer.bind(params).active
        held = list(columns.values())

        def rows(tensor: str, part: slice) -> Tensor:
            own = [held[c][tensor].flatten()[part] for c in active[tensor]]
            return torch.stack(own, dim=1).to(params[tensor].device)

        return Columns(tuple(columns), active, rows)

    return replace(regularizer, bind=bind)


def _bend(regularizer: Regularizer, epoch: Epoch) -> float:
    """‖mean of ∇R − ∇R at the mean point‖ / ‖mean of ∇R‖, of the worst column."""
    here = regularizer.gradient({n: p.detach() for n, p in epoch.mean.items()})
    worst = 0.0
    for name, mean in epoch.columns[regularizer].items():
        apart = norm({n: mean[n] - here[name][n].to(mean[n].device) for n in mean})
        worst = max(worst, apart / norm(mean) if norm(mean) else 0.0)
    return worst


def _check_averaged(averaged: Sequence[Regularizer], given: Sequence[Regularizer]) -> None:
    held = {regularizer.name: regularizer for regularizer in averaged}
    for regularizer in given:
        if held.get(regularizer.name, regularizer) is not regularizer:
            raise InputError(
                f"{regularizer.name!r} was averaged while training, but this is another object of "
                "that name: pass the one that average_epochs had, or give this one its own name."
            )


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    decoupled = [g.get("decoupled_weight_decay") or g.get("amsgrad") for g in _groups(optimizer)]
    if not isinstance(optimizer, SGD | Adam) or any(decoupled):
        raise InputError(
            f"average_epochs was given {type(optimizer).__name__}: it knows the flow that SGD "
            "follows, and Adam's (without amsgrad, and with weight decay in the loss, not apart as "
            "in AdamW). Train with one of those, or use endpoint_equations."
        )
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    still = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in moved]
    if still:
        raise InputError(
            f"the optimizer does not move {still[0]!r} and {len(still) - 1} others: their drift "
            "says nothing. Set requires_grad=False for them."
        )
    _time_of_step(optimizer)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return getattr(optimizer, "param_groups", [])


def _time_of_step(optimizer: Optimizer) -> float:
    if isinstance(optimizer, SGD):
        return flow_time(optimizer)
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise InputError(
            f"the optimizer's parameter groups have different step sizes {sorted(rates)}: one time "
            "a step is needed. Use the same lr for all."
        )
    return rates.pop()


def _metric(model: nn.Module, optimizer: Optimizer) -> Params | None:
    """√v̂ + ε of Adam, by parameter; None for SGD."""
    if isinstance(optimizer, SGD):
        return None
    scale: dict[int, Callable[[], Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scale[id(parameter)] = lambda p=parameter, g=group: _scale(p, optimizer.state[p], g)
    owned = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {n: scale[id(p)]() for n, p in owned.items()}


def _scale(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    if "step" not in state:  # it had no gradient, and did not move
        return torch.ones_like(to_float64(parameter.detach()))
    decay = group["betas"][1] ** float(state["step"])
    return to_float64(state["exp_avg_sq"]).sqrt() / math.sqrt(1 - decay) + group["eps"]
