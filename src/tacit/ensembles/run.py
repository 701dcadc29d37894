"""What training an ensemble gives: weights of several kinds, and how it went."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.layout import Layout, per_member
from tacit.ensembles.members import Ensemble
from tacit.ensembles.plan import Plan
from tacit.objective.params import Params
from tacit.regularizers import Regularizer

if TYPE_CHECKING:
    from tacit.ensembles.training import Work


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch of every member as one step of a trajectory, its noise averaged out.

    `average` is the mean over the points that the epoch stepped from; `displacement` is where it
    went in all, and `time` the flow time that took.
    """

    average: Ensemble
    displacement: Params
    """In float64."""
    time: Tensor
    """η·steps/(1−β), in float64; 0 where a member was not trained for so long."""
    metric: Params | None
    """√v̂ + ε of Adam at its end: displacement · metric / time is the mean force. None for SGD."""
    columns: dict[Regularizer, Params]
    """Mean gradients over the epoch of the plan's averaged regularizers."""

    def chosen(self, members: Sequence[int]) -> "Epoch":
        """The same of some of the members."""
        kept = list(members)

        def part(tensors: Params) -> Params:
            return {n: t[kept] for n, t in tensors.items()}

        return Epoch(
            average=self.average.chosen(kept),
            displacement=part(self.displacement),
            time=self.time[kept],
            metric=None if self.metric is None else part(self.metric),
            columns={r: part(column) for r, column in self.columns.items()},
        )


@dataclass(frozen=True, eq=False)
class Run:
    """A trained ensemble, all stacked by member."""

    last: Ensemble
    best: Ensemble
    """Weights after the epoch with the best monitored value."""
    tail: tuple[Epoch, ...]
    """The last epochs that the plan keeps, the very last one at the end."""
    epochs: Tensor
    """How many epochs each member was trained for."""
    best_epoch: Tensor
    """The epoch, from 0, of the best value; −1 where there is none."""
    history: Tensor
    """The monitored value, (epochs, members); NaN after a member has stopped."""

    @property
    def average(self) -> Ensemble:
        """The mean over the points that the last epoch stepped from."""
        return self.tail[-1].average

    def chosen(self, members: Sequence[int]) -> "Run":
        """The run of some of the members, as without those that diverged."""
        kept = list(members)
        return Run(
            last=self.last.chosen(kept),
            best=self.best.chosen(kept),
            tail=tuple(epoch.chosen(kept) for epoch in self.tail),
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


class Trace(NamedTuple):
    """An epoch of the members that were training then."""

    members: Tensor
    weights: Tensor
    moved: Tensor
    time: Tensor
    metric: Tensor | None
    columns: dict[Regularizer, Tensor]


class Tail:
    """The last few epochs of every member, as they go by."""

    def __init__(self, start: Tensor, kept: int):
        self._recent: deque[Trace] = deque(maxlen=kept)
        self._start, self._held = start, [self._empty(start) for _ in range(kept)]

    @staticmethod
    def _empty(start: Tensor) -> Trace:
        moved = torch.zeros_like(start, dtype=torch.float64)
        members = torch.arange(len(start), device=start.device)
        return Trace(members, start.clone(), moved, moved.new_zeros(len(start)), None, {})

    def see(self, work: "Work", before: Tensor, average: Average, epoch: int) -> None:
        """One more epoch of all members that are training."""
        steps = -(-work.data.examples // work.plan.batch_size)
        optimizer = work.plan.optimizer
        self._recent.append(
            Trace(
                members=work.members,
                weights=average.weights(),
                moved=work.theta.double() - before.double(),
                time=steps * optimizer.flow_time(work.rate_at(epoch)),
                metric=optimizer.metric(work.state, work.steps),
                columns={r: column.double() for r, column in average.columns().items()},
            )
        )

    def keep(self, ended: Tensor) -> None:
        """Copy what went by last of the members that end."""
        for place in range(1, len(self._recent) + 1):
            seen, held = self._recent[-place], self._held[-place]
            rows = torch.searchsorted(seen.members, ended)  # members are in order, and were there
            held.weights[ended] = seen.weights[rows]
            held.moved[ended] = seen.moved[rows]
            held.time[ended] = seen.time[rows]
            for regularizer, column in seen.columns.items():
                own = held.columns.setdefault(regularizer, torch.zeros_like(held.moved))
                own[ended] = column[rows]
            if seen.metric is not None:
                metric = torch.ones_like(held.moved) if held.metric is None else held.metric
                metric[ended] = seen.metric[rows]
                self._held[-place] = held._replace(metric=metric)

    def epochs(self, ensemble: Ensemble, views: Callable[[Tensor], Params]) -> tuple[Epoch, ...]:
        """The epochs that any member has, oldest first."""
        one = ensemble.member(0)
        return tuple(
            Epoch(
                average=ensemble.at(views(held.weights)),
                displacement=views(held.moved),
                time=held.time,
                metric=None if held.metric is None else views(held.metric),
                columns={r: _covered(r, views(own), one) for r, own in held.columns.items()},
            )
            for held in self._held
            if bool((held.time > 0).any())
        )


def _covered(regularizer: Regularizer, column: Params, one: Params) -> Params:
    active = regularizer.bind(one).active
    return {n: own if n in active else torch.zeros_like(own) for n, own in column.items()}


class Outcome:
    """Results as they come in: a run in the making."""

    def __init__(self, ensemble: Ensemble, epochs: int, kept: int):
        self._ensemble, self.epochs = ensemble, epochs
        self._layout = Layout.of(ensemble.params)
        count, start = len(ensemble), self._layout.rows(ensemble.params)
        self._last, self._best = start.clone(), start.clone()
        self._tail = Tail(start, kept)
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
        self._tail.see(work, before, average, int(self._epochs[work.members[0]]) - 1)
        if len(ended):
            self._last[ended] = work.theta[done]
            self._tail.keep(ended)

    def run(self) -> Run:
        """The finished run."""
        views = self._layout.views
        return Run(
            last=self._ensemble.at(views(self._last)),
            best=self._ensemble.at(views(self._best)),
            tail=self._tail.epochs(self._ensemble, views),
            epochs=self._epochs.cpu(),
            best_epoch=self._best_epoch.cpu(),
            history=self._history[: int(self._epochs.max())].cpu(),
        )
