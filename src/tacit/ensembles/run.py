"""A trained ensemble: its weights, its last epochs, and the recorder that collects them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.members import Ensemble
from tacit.ensembles.plan import Plan
from tacit.objective.batches import map_tensors
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
        stacked = self.displacement, self.time, self.metric, self.columns
        return EnsembleEpoch(
            self.average.select(members), *map_tensors(stacked, lambda t: t[list(members)])
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
        finite = self.last.flatten(self.last.params).isfinite().all(1).cpu()
        return ~(finite & self.history[self.epochs - 1, torch.arange(len(finite))].isfinite())


class FlatEpoch(NamedTuple):
    """One epoch of the members that were training in it."""

    members: Tensor
    """Indices of these members in the ensemble, ascending."""
    theta: Tensor
    """Weights after the epoch, (members, parameters)."""
    monitored: Tensor
    rows: dict[str, Tensor]
    """What is recorded, by field of `EnsembleEpoch`, with flat rows of parameters."""


class RunRecorder:
    """Collects a run while it trains, and decides which members are finished."""

    def __init__(self, ensemble: Ensemble, plan: Plan):
        self._ensemble, self._plan, members = ensemble, plan, len(ensemble)
        start = ensemble.flatten(ensemble.params).detach()
        limits = plan.epochs_per_member(members)
        self.max_epochs = max(limits)
        self._limits = torch.tensor(limits, device=start.device)
        self._last, self._best = start.clone(), start.clone()
        self._recent: deque[FlatEpoch] = deque(maxlen=plan.recorded_epochs)
        # The last epochs of the members that have finished, oldest first.
        self._final = [{"average": start.clone()} for _ in range(plan.recorded_epochs)]
        self._lowest = start.new_full((members,), torch.inf)
        self._epochs_since_best = torch.zeros(members, dtype=torch.int64, device=start.device)
        self._best_epoch = torch.full_like(self._epochs_since_best, -1)
        self._epochs = torch.zeros_like(self._epochs_since_best)
        self._history = start.new_full((self.max_epochs, members), torch.nan)

    def record(self, number: int, epoch: FlatEpoch) -> Tensor:
        """Record an epoch, counted from 0; return a mask of the members that finish with it.

        These are the members at their last epoch, out of patience, or diverged.
        """
        members, theta, monitored, _ = epoch
        stopping, lowest = self._plan.stopping, self._lowest[members]
        improved = monitored < lowest - (0.0 if stopping is None else stopping.min_delta)
        waited = torch.where(improved, 0, self._epochs_since_best[members] + 1)
        self._lowest[members] = torch.where(improved, monitored, lowest)
        self._epochs_since_best[members] = waited
        self._history[number, members] = monitored
        self._epochs[members] = number + 1
        self._best_epoch[members[improved]] = number
        self._best[members[improved]] = theta[improved]
        self._recent.append(epoch)
        finished = (number + 1 >= self._limits[members]) | ~monitored.isfinite()
        if stopping is not None:
            finished |= waited >= stopping.patience
        if len(members[finished]):
            self._last[members[finished]] = theta[finished]
            self._copy_recent_epochs(members[finished])
        return finished

    def _copy_recent_epochs(self, members: Tensor) -> None:
        """Copy the recent epochs of members that finish now; others may stop at other times."""
        for age in range(1, len(self._recent) + 1):
            epoch, final = self._recent[-age], self._final[-age]
            # epoch.members is ascending, and contains all members that are still training now.
            index = torch.searchsorted(epoch.members, members)
            for key, rows in epoch.rows.items():
                if key not in final:
                    final[key] = rows.new_zeros(len(self._epochs), *rows.shape[1:])
                final[key][members] = rows[index]

    def run(self) -> Run:
        """The finished run."""
        ensemble, views = self._ensemble, self._ensemble.views
        return Run(
            last=ensemble.with_params(views(self._last)),
            best=ensemble.with_params(views(self._best)),
            recorded_epochs=tuple(self._epoch(rows) for rows in self._final if "time" in rows),
            epochs=self._epochs.cpu(),
            best_epoch=self._best_epoch.cpu(),
            history=self._history[: int(self._epochs.max())].cpu(),
        )

    def _epoch(self, rows: dict[str, Tensor]) -> EnsembleEpoch:
        ensemble, views, columns = self._ensemble, self._ensemble.views, {}
        for regularizer, column in zip(self._plan.averaged, rows["columns"].unbind(1), strict=True):
            # Entrywise derivatives cover all tensors, also those that the scope excludes.
            active = regularizer.bind(ensemble.member(0)).active
            columns[regularizer] = {
                n: t if n in active else torch.zeros_like(t) for n, t in views(column).items()
            }
        return EnsembleEpoch(
            average=ensemble.with_params(views(rows["average"])),
            displacement=views(rows["displacement"]),
            time=rows["time"],
            metric=views(rows["metric"]) if "metric" in rows else None,
            columns=columns,
        )
