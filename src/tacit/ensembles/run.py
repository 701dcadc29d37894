"""A trained ensemble: its weights, its last epochs, and the recorders that collect them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.layout import Layout, flatten_members
from tacit.ensembles.members import Ensemble
from tacit.ensembles.plan import Plan
from tacit.objective.params import Params
from tacit.regularizers import Regularizer


@dataclass(frozen=True, eq=False)
class EnsembleEpoch:
    """One epoch of every member as one step of a trajectory.

    The counterpart of `tacit.equations.epochs.Epoch`, with all members stacked: times and metrics
    are tensors, and members that trained for fewer epochs have a time of 0.
    """

    average: Ensemble
    """Mean θ̄ over the points that the epoch stepped from."""
    displacement: Params
    """Δθ over the whole epoch, in float64."""
    time: Tensor
    """Flow time η·steps/(1−β), in float64; 0 where a member did not train in this epoch."""
    metric: Params | None
    """√v̂ + ε of Adam at the end: Δθ · metric / time is the mean −∇. None for SGD."""
    columns: dict[Regularizer, Params]
    """Mean gradients over the epoch of the plan's averaged regularizers."""

    def select(self, members: Sequence[int]) -> "EnsembleEpoch":
        """The epoch of some of the members."""
        members = list(members)

        def select_entries(stacked: Params) -> Params:
            return {n: t[members] for n, t in stacked.items()}

        return EnsembleEpoch(
            average=self.average.select(members),
            displacement=select_entries(self.displacement),
            time=self.time[members],
            metric=None if self.metric is None else select_entries(self.metric),
            columns={r: select_entries(column) for r, column in self.columns.items()},
        )


@dataclass(frozen=True, eq=False)
class Run:
    """A trained ensemble, with everything stacked by member."""

    last: Ensemble
    """Weights after each member's last epoch."""
    best: Ensemble
    """Weights after the epoch with the best monitored value."""
    recorded_epochs: tuple[EnsembleEpoch, ...]
    """The last `Plan.recorded_epochs` epochs, oldest first."""
    epochs: Tensor
    """Number of epochs that each member was trained for."""
    best_epoch: Tensor
    """The epoch, from 0, of the best monitored value; −1 if no value was finite."""
    history: Tensor
    """The monitored value, (epochs, members); NaN after a member has stopped."""

    @property
    def average(self) -> Ensemble:
        """Mean over the points that the last epoch stepped from."""
        return self.recorded_epochs[-1].average

    def select(self, members: Sequence[int]) -> "Run":
        """The run of some of the members, for instance of those that have not diverged."""
        members = list(members)
        return Run(
            last=self.last.select(members),
            best=self.best.select(members),
            recorded_epochs=tuple(epoch.select(members) for epoch in self.recorded_epochs),
            epochs=self.epochs[members],
            best_epoch=self.best_epoch[members],
            history=self.history[:, members],
        )

    @property
    def diverged(self) -> Tensor:
        """Mask of the members whose monitored value or weights are no longer finite."""
        finite = [flatten_members(p).isfinite().all(1).cpu() for p in self.last.params.values()]
        final_values = self.history[self.epochs - 1, torch.arange(len(self.epochs))]
        return ~(torch.stack(finite).all(0) & final_values.isfinite())


class FlatEpoch(NamedTuple):
    """One epoch of the members that were training in it, as flat rows (members, parameters).

    The fields are those of `EnsembleEpoch`.
    """

    members: Tensor
    """Indices of these members in the ensemble, ascending."""
    average: Tensor
    displacement: Tensor
    time: Tensor
    metric: Tensor | None
    columns: dict[Regularizer, Tensor]


class EpochMeans:
    """Running means over the points of an epoch: of the weights, and of regularizer gradients."""

    def __init__(self, theta: Tensor, layout: Layout, regularizers: Sequence[Regularizer]):
        self._layout, self._points = layout, 0
        self._weights = torch.zeros_like(theta)
        self._columns = {r: torch.zeros_like(theta) for r in regularizers}

    def add(self, theta: Tensor) -> None:
        """Include one more point (members, parameters)."""
        self._points += 1
        self._weights.add_(theta)
        for regularizer, total in self._columns.items():
            if regularizer.entrywise is not None:
                total.add_(regularizer.entrywise.derivative(theta))
                continue
            params = self._layout.views(zero_nonfinite(theta))
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            value = vmap(regularizer.value)(leaves).sum()
            gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            total.add_(self._layout.flatten(dict(zip(leaves, gradients, strict=True))))

    def weights(self) -> Tensor:
        """The mean point."""
        return self._weights / self._points

    def columns(self) -> dict[Regularizer, Tensor]:
        """The mean gradient of each regularizer."""
        return {r: total / self._points for r, total in self._columns.items()}


def nonfinite_members(theta: Tensor) -> Tensor:
    """Mask of the members whose weights are no longer finite."""
    return ~theta.isfinite().all(1)


def zero_nonfinite(theta: Tensor) -> Tensor:
    """Replace the weights of members that are not finite by zeros.

    Some regularizers, such as the nuclear norm, raise an error on NaN.
    """
    return torch.where(nonfinite_members(theta).unsqueeze(1), torch.zeros_like(theta), theta)


class EpochRecorder:
    """Collects the last few epochs of every member, which may stop at different times."""

    def __init__(self, start: Tensor, count: int):
        self._recent: deque[FlatEpoch] = deque(maxlen=count)
        # The last epochs of the members that have finished, oldest first.
        self._final = [self._empty_epoch(start) for _ in range(count)]

    @staticmethod
    def _empty_epoch(start: Tensor) -> FlatEpoch:
        displacement = torch.zeros_like(start, dtype=torch.float64)
        members = torch.arange(len(start), device=start.device)
        time = displacement.new_zeros(len(start))
        return FlatEpoch(members, start.clone(), displacement, time, None, {})

    def add(self, epoch: FlatEpoch) -> None:
        """Record one more epoch of the members that are training."""
        self._recent.append(epoch)

    def finish(self, members: Tensor) -> None:
        """Copy the recent epochs of members that finish now."""
        for age in range(1, len(self._recent) + 1):
            recent, final = self._recent[-age], self._final[-age]
            # recent.members is ascending, and contains all members that are still training now.
            rows = torch.searchsorted(recent.members, members)
            final.average[members] = recent.average[rows]
            final.displacement[members] = recent.displacement[rows]
            final.time[members] = recent.time[rows]
            for regularizer, column in recent.columns.items():
                zeros = torch.zeros_like(final.displacement)
                final.columns.setdefault(regularizer, zeros)[members] = column[rows]
            if recent.metric is not None:
                metric = final.metric
                if metric is None:
                    metric = torch.ones_like(final.displacement)
                metric[members] = recent.metric[rows]
                self._final[-age] = final._replace(metric=metric)

    def epochs(
        self, ensemble: Ensemble, views: Callable[[Tensor], Params]
    ) -> tuple[EnsembleEpoch, ...]:
        """The epochs in which at least one member trained, oldest first."""
        first_member = ensemble.member(0)
        return tuple(
            EnsembleEpoch(
                average=ensemble.with_params(views(epoch.average)),
                displacement=views(epoch.displacement),
                time=epoch.time,
                metric=None if epoch.metric is None else views(epoch.metric),
                columns={
                    r: _zero_outside_scope(r, views(column), first_member)
                    for r, column in epoch.columns.items()
                },
            )
            for epoch in self._final
            if bool((epoch.time > 0).any())
        )


def _zero_outside_scope(regularizer: Regularizer, column: Params, first_member: Params) -> Params:
    """Zero a column on tensors that the scope excludes: entrywise derivatives cover all tensors."""
    active = regularizer.bind(first_member).active
    return {n: t if n in active else torch.zeros_like(t) for n, t in column.items()}


class RunRecorder:
    """Collects a run while it trains, and decides which members are finished."""

    def __init__(self, ensemble: Ensemble, plan: Plan):
        self._ensemble, self._stopping = ensemble, plan.stopping
        self._layout = Layout.of(ensemble.params)
        members, start = len(ensemble), self._layout.flatten(ensemble.params)
        limits = plan.epochs_per_member(members)
        self.max_epochs = max(limits)
        self._limits = torch.tensor(limits, device=start.device)
        self._last, self._best = start.clone(), start.clone()
        self._epoch_recorder = EpochRecorder(start, plan.recorded_epochs)
        self._lowest = start.new_full((members,), torch.inf)
        self._epochs_since_best = torch.zeros(members, dtype=torch.int64, device=start.device)
        self._best_epoch = torch.full_like(self._epochs_since_best, -1)
        self._epochs = torch.zeros_like(self._epochs_since_best)
        self._history = start.new_full((self.max_epochs, members), torch.nan)

    def record(self, number: int, epoch: FlatEpoch, theta: Tensor, monitored: Tensor) -> Tensor:
        """Record one epoch, and return a mask of the members that are finished after it.

        Args:
            number: the epoch's number, from 0.
            epoch: the epoch of the members that are training.
            theta: their weights after it.
            monitored: their monitored values.
        """
        members = epoch.members
        improved = self._update_lowest(members, monitored)
        self._history[number, members] = monitored
        self._epochs[members] = number + 1
        self._best_epoch[members[improved]] = number
        self._best[members[improved]] = theta[improved]
        self._epoch_recorder.add(epoch)
        finished = self._finished(number, members, monitored)
        if len(members[finished]):
            self._last[members[finished]] = theta[finished]
            self._epoch_recorder.finish(members[finished])
        return finished

    def _update_lowest(self, members: Tensor, monitored: Tensor) -> Tensor:
        """Update the lowest values; return a mask of the members that improved."""
        min_delta = 0.0 if self._stopping is None else self._stopping.min_delta
        lowest, waited = self._lowest[members], self._epochs_since_best[members]
        improved = monitored < lowest - min_delta
        self._lowest[members] = torch.where(improved, monitored, lowest)
        self._epochs_since_best[members] = torch.where(improved, 0, waited + 1)
        return improved

    def _finished(self, number: int, members: Tensor, monitored: Tensor) -> Tensor:
        """Mask of the members at their last epoch, out of patience, or diverged."""
        finished = (number + 1 >= self._limits[members]) | ~monitored.isfinite()
        if self._stopping is not None:
            finished |= self._epochs_since_best[members] >= self._stopping.patience
        return finished

    def run(self) -> Run:
        """The finished run."""
        views = self._layout.views
        return Run(
            last=self._ensemble.with_params(views(self._last)),
            best=self._ensemble.with_params(views(self._best)),
            recorded_epochs=self._epoch_recorder.epochs(self._ensemble, views),
            epochs=self._epochs.cpu(),
            best_epoch=self._best_epoch.cpu(),
            history=self._history[: int(self._epochs.max())].cpu(),
        )
