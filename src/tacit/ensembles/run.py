"""What training an ensemble gives: weights of several kinds, and how it went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

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
    """Mean gradients over the last epoch of the plan's averaged regularizers, in float64."""
    epochs: Tensor
    """How many epochs each member was trained for."""
    best_epoch: Tensor
    """The epoch, from 0, of the best value; −1 where there is none."""
    history: Tensor
    """The monitored value, (epochs, members); NaN after a member has stopped."""

    @property
    def diverged(self) -> Tensor:
        """Members whose objective or weights are no longer finite."""
        finite = [p.flatten(1).isfinite().all(1) for p in self.last.params.values()]
        ends = self.history[self.epochs - 1, torch.arange(len(self.epochs))]
        return ~(torch.stack(finite).all(0) & ends.isfinite())


class Average:
    """Means over the points of an epoch: of the weights, and of gradients of regularizers."""

    def __init__(self, params: Params, regularizers: Sequence[Regularizer]):
        self._count = 0
        self._weights = {n: torch.zeros_like(p) for n, p in params.items()}
        self._columns = {
            r: {n: torch.zeros_like(p) for n, p in params.items()} for r in regularizers
        }

    def add(self, params: Params) -> None:
        """One more point."""
        self._count += 1
        for name, total in self._weights.items():
            total.add_(params[name])
        for regularizer, totals in self._columns.items():
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            value = vmap(regularizer.value)(leaves).sum()
            slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            for total, slope in zip(totals.values(), slopes, strict=True):
                total.add_(slope)

    def weights(self) -> Params:
        """The mean point."""
        return {n: total / self._count for n, total in self._weights.items()}

    def columns(self) -> dict[Regularizer, Params]:
        """The mean gradient of each regularizer."""
        return {
            r: {n: total / self._count for n, total in totals.items()}
            for r, totals in self._columns.items()
        }


class Outcome:
    """Results as they come in: a run in the making."""

    def __init__(self, ensemble: Ensemble, epochs: int):
        self._ensemble, self.epochs = ensemble, epochs
        count = len(ensemble)
        first = next(iter(ensemble.params.values()))
        self._last, self._best, self._average = (_copies(ensemble.params) for _ in range(3))
        self._moved = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in self._last.items()}
        self._metric: Params = {}
        self._columns: dict[Regularizer, Params] = {}
        self._time = torch.zeros(count, dtype=torch.float64, device=first.device)
        self._lowest = first.new_full((count,), torch.inf)
        self._waited = torch.zeros(count, dtype=torch.int64, device=first.device)
        self._best_epoch = torch.full_like(self._waited, -1)
        self._epochs = torch.zeros_like(self._waited)
        self._history = first.new_full((epochs, count), torch.nan)

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
        self, work: "Work", before: Params, average: Average, improved: Tensor, done: Tensor
    ) -> None:
        """Copy what is new: weights of members that improved, everything of those that end."""
        better, ended = work.members[improved], work.members[done]
        self._best_epoch[better] = self._epochs[better] - 1
        for name, theta in work.params.items():
            self._best[name][better] = theta[improved]
        if not len(ended):
            return
        mean = average.weights()
        for name, theta in work.params.items():
            self._last[name][ended] = theta[done]
            self._average[name][ended] = mean[name][done]
            self._moved[name][ended] = theta[done].double() - before[name][done].double()
        for regularizer, column in average.columns().items():
            held = self._columns.setdefault(regularizer, _copies(self._moved))
            for name, values in column.items():
                held[name][ended] = values[done].double()
        epoch = int(self._epochs[ended[0]]) - 1
        steps = -(-work.data.examples // work.plan.batch_size)
        optimizer = work.plan.optimizer
        self._time[ended] = steps * optimizer.flow_time(work.rate_at(epoch)[done])
        for name, scale in (optimizer.metric(work.params, work.state, work.steps) or {}).items():
            held = self._metric.setdefault(name, torch.zeros_like(self._moved[name]))
            held[ended] = scale[done]

    def run(self) -> Run:
        """The finished run."""
        return Run(
            last=self._ensemble.at(self._last),
            best=self._ensemble.at(self._best),
            average=self._ensemble.at(self._average),
            displacement=self._moved,
            time=self._time,
            metric=self._metric or None,
            columns=self._columns,
            epochs=self._epochs.cpu(),
            best_epoch=self._best_epoch.cpu(),
            history=self._history[: int(self._epochs.max())].cpu(),
        )


def _copies(params: Params) -> Params:
    return {n: p.detach().clone() for n, p in params.items()}
