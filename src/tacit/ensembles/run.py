"""What training an ensemble gives: weights of several kinds, and how it went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.layout import Layout, per_member
from tacit.ensembles.members import Ensemble
from tacit.ensembles.plan import Plan
from tacit.params import Params
from tacit.regularizers import Regularizer

if TYPE_CHECKING:
    from tacit.ensembles.training import Work


@dataclass(frozen=True, eq=False)
class Run:
    """A trained ensemble, all stacked by member.

    `average` is the mean over the points that the last epoch stepped from; `displacement` is where
    that epoch went in all, and `time` the flow time it took: together they are one step of a
    trajectory, from which the epoch's noise has averaged out.
    """

    last: Ensemble
    best: Ensemble
    """Weights after the epoch with the best monitored value."""
    average: Ensemble
    displacement: Params
    """In float64."""
    time: Tensor
    """η·steps/(1−β) of the last epoch, in float64."""
    metric: Params | None
    """√v̂ + ε of Adam at the end: displacement · metric / time is the mean force. None for SGD."""
    columns: dict[Regularizer, Params]
    """Mean gradients over the last epoch of the plan's averaged regularizers."""
    epochs: Tensor
    """How many epochs each member was trained for."""
    best_epoch: Tensor
    """The epoch, from 0, of the best value; −1 where there is none."""
    history: Tensor
    """The monitored value, (epochs, members); NaN after a member has stopped."""

    def chosen(self, members: Sequence[int]) -> "Run":
        """The run of some of the members, as without those that diverged."""
        kept = list(members)

        def part(tensors: Params) -> Params:
            return {n: t[kept] for n, t in tensors.items()}

        return Run(
            last=self.last.chosen(kept),
            best=self.best.chosen(kept),
            average=self.average.chosen(kept),
            displacement=part(self.displacement),
            time=self.time[kept],
            metric=None if self.metric is None else part(self.metric),
            columns={r: part(column) for r, column in self.columns.items()},
            epochs=self.epochs[kept],
            best_epoch=self.best_epoch[kept],
            history=self.history[:, kept],
        )

    @property
    def diverged(self) -> Tensor:
        """Members whose objective or weights are no longer finite."""
        finite = [per_member(p).isfinite().all(1).cpu() for p in self.last.params.values()]
        ends = self.history[self.epochs - 1, torch.arange(len(self.epochs))]
        return ~(torch.stack(finite).all(0) & ends.isfinite())


class Average:
    """Means over the points of an epoch: of the weights, and of gradients of regularizers."""

    def __init__(self, theta: Tensor, layout: Layout, regularizers: Sequence[Regularizer]):
        self._layout, self._count = layout, 0
        self._weights = torch.zeros_like(theta)
        self._columns = {r: torch.zeros_like(theta) for r in regularizers}

    def add(self, theta: Tensor) -> None:
        """One more point."""
        self._count += 1
        self._weights.add_(theta)
        for regularizer, total in self._columns.items():
            if regularizer.entry is not None:
                total.add_(regularizer.entry.slope(theta))
                continue
            whole = self._layout.views(mended(theta))
            leaves = {n: p.detach().requires_grad_() for n, p in whole.items()}
            value = vmap(regularizer.value)(leaves).sum()
            slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            total.add_(self._layout.rows(dict(zip(leaves, slopes, strict=True))))

    def weights(self) -> Tensor:
        """The mean point."""
        return self._weights / self._count

    def columns(self) -> dict[Regularizer, Tensor]:
        """The mean gradient of each regularizer."""
        return {r: total / self._count for r, total in self._columns.items()}


def broken(theta: Tensor) -> Tensor:
    """Members whose weights are no longer finite."""
    return ~theta.isfinite().all(1)


def mended(theta: Tensor) -> Tensor:
    """Weights with zeros for members that are no longer finite: a few families fail on those."""
    return torch.where(broken(theta).unsqueeze(1), torch.zeros_like(theta), theta)


class Outcome:
    """Results as they come in: a run in the making."""

    def __init__(self, ensemble: Ensemble, epochs: int):
        self._ensemble, self.epochs = ensemble, epochs
        self._layout = Layout.of(ensemble.params)
        count, start = len(ensemble), self._layout.rows(ensemble.params)
        self._last, self._best, self._average = start.clone(), start.clone(), start.clone()
        self._moved = torch.zeros_like(start, dtype=torch.float64)
        self._metric: Tensor | None = None
        self._columns: dict[Regularizer, Tensor] = {}
        self._time = self._moved.new_zeros(count)
        self._lowest = start.new_full((count,), torch.inf)
        self._waited = torch.zeros(count, dtype=torch.int64, device=start.device)
        self._best_epoch = torch.full_like(self._waited, -1)
        self._epochs = torch.zeros_like(self._waited)
        self._history = start.new_full((epochs, count), torch.nan)

    def improved(self, members: Tensor, value: Tensor, min_delta: float) -> Tensor:
        """Which members have a new best value; counts the epochs that others have waited."""
        better = value < self._lowest[members] - min_delta
        self._lowest[members] = torch.where(better, value, self._lowest[members])
        self._waited[members] = torch.where(better, 0, self._waited[members] + 1)
        return better

    def done(self, members: Tensor, value: Tensor, epoch: int, plan: Plan) -> Tensor:
        """Which members have had their epochs, have waited long enough, or have diverged."""
        self._history[epoch, members] = value
        self._epochs[members] = epoch + 1
        limit = torch.tensor(plan.epochs_of(len(self._epochs)), device=members.device)
        over = (epoch + 1 >= limit[members]) | ~value.isfinite()
        if plan.stopping is not None:
            over |= self._waited[members] >= plan.stopping.patience
        return over

    def keep(
        self, work: "Work", before: Tensor, average: Average, improved: Tensor, done: Tensor
    ) -> None:
        """Copy what is new: weights of members that improved, everything of those that end."""
        better, ended = work.members[improved], work.members[done]
        self._best_epoch[better] = self._epochs[better] - 1
        self._best[better] = work.theta[improved]
        if not len(ended):
            return
        self._last[ended] = work.theta[done]
        self._average[ended] = average.weights()[done]
        self._moved[ended] = work.theta[done].double() - before[done].double()
        for regularizer, column in average.columns().items():
            held = self._columns.setdefault(regularizer, torch.zeros_like(self._moved))
            held[ended] = column[done].double()
        epoch = int(self._epochs[ended[0]]) - 1
        steps = -(-work.data.examples // work.plan.batch_size)
        optimizer = work.plan.optimizer
        self._time[ended] = steps * optimizer.flow_time(work.rate_at(epoch)[done])
        metric = optimizer.metric(work.state, work.steps)
        if metric is not None:
            self._metric = torch.zeros_like(self._moved) if self._metric is None else self._metric
            self._metric[ended] = metric[done]

    def _covered(self, regularizer: Regularizer, column: Params) -> Params:
        active = regularizer.bind(self._ensemble.member(0)).active
        return {n: own if n in active else torch.zeros_like(own) for n, own in column.items()}

    def run(self) -> Run:
        """The finished run."""
        views = self._layout.views
        return Run(
            last=self._ensemble.at(views(self._last)),
            best=self._ensemble.at(views(self._best)),
            average=self._ensemble.at(views(self._average)),
            displacement=views(self._moved),
            time=self._time,
            metric=None if self._metric is None else views(self._metric),
            columns={r: self._covered(r, views(own)) for r, own in self._columns.items()},
            epochs=self._epochs.cpu(),
            best_epoch=self._best_epoch.cpu(),
            history=self._history[: int(self._epochs.max())].cpu(),
        )
