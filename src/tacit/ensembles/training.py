"""Training M members as one program: each ends where it would have ended alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import check_droppable, check_ensemble, check_loss, own_rates
from tacit.ensembles.data import Owned, own_data
from tacit.ensembles.denormals import flushed_denormals
from tacit.ensembles.evaluation import Loss, mean_loss
from tacit.ensembles.layout import Layout
from tacit.ensembles.members import Ensemble, check_seeds
from tacit.ensembles.optimizers import State, factor_at, rates
from tacit.ensembles.penalties import Penalties, Strengths, own_penalties
from tacit.ensembles.plan import Plan
from tacit.ensembles.randomness import Chance
from tacit.ensembles.run import Average, Outcome, Run, broken, mended
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.objective.passes import track
from tacit.regularizers import Regularizer

BatchPenalty = Callable[[Params, Tensor, Tensor, Tensor], Tensor]
"""One value a member from stacked parameters, inputs, targets and the members' numbers."""


def train(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    plan: Plan,
    *,
    seeds: Iterable[int],
    penalties: Mapping[Regularizer, Strengths] | None = None,
    dropout: float | Sequence[float] | Tensor | None = None,
    batch_penalty: BatchPenalty | None = None,
) -> Run:
    """Train all members on loss + Σ_k λ_k R_k at once.

    A member's weights are those that a plain loop gives alone: batches in the order of
    `order_generator(seed)`, masks of `mask_generator(seed)`. Members that stop are frozen and cost
    nothing further. Denormal numbers are flushed on the CPU while it runs.

    Args:
        ensemble: where the members start; on the device and in the dtype to train in.
        loss: mean loss of a batch, as loss(outputs, targets).
        data: (inputs, targets) that all share, or `Data`.
        plan: optimizer, epochs, batch size, stopping.
        seeds: one a member, for its batch order and its masks; equal seeds share both.
        penalties: penalties with one strength for all, or one a member.
        dropout: the rate of each member's dropout layers; by default as the layers say.
        batch_penalty: a penalty that depends on the batch, batch_penalty(params, inputs, targets,
            members): one value for each of the members of these numbers.
    """
    check_ensemble(ensemble)
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}: pass ensembles.Plan(optimizer, …).")
    seeds = check_seeds(seeds, len(ensemble))
    work = _begin(ensemble, loss, data, plan, seeds, penalties, dropout)
    work = replace(work, batch_penalty=batch_penalty)
    for part in (work.data, work.validation):
        if part is not None:
            check_loss(ensemble, loss, part)
    if dropout is not None:
        check_droppable(ensemble)
    _check_averaged(plan, ensemble)
    outcome = Outcome(ensemble, max(plan.epochs_of(len(ensemble))), plan.kept)
    with flushed_denormals(), torch.enable_grad():
        for epoch in track(range(outcome.epochs), total=outcome.epochs, label="epochs"):
            before = work.theta.clone()
            average, value = work.epoch(epoch)
            improved = outcome.improved(work.members, value, work.min_delta)
            done = outcome.done(work.members, value, epoch, plan)
            outcome.keep(work, before, average, improved, done)
            if bool(done.all()):
                break
            if bool(done.any()):
                work = work.of(torch.nonzero(~done)[:, 0])
    return outcome.run()


def _check_averaged(plan: Plan, ensemble: Ensemble) -> None:
    one = ensemble.member(0)
    for regularizer in plan.averaged:
        if any(len(own) > 1 for own in regularizer.bind(one).active.values()):
            raise InputError(
                f"averaged: {regularizer.name!r} has several coefficients on one tensor; its "
                "gradients cannot be averaged apart. Average families of one coefficient."
            )


@dataclass(eq=False)
class Work:
    """Members that are still training, with all that is theirs, stacked."""

    ensemble: Ensemble
    loss: Loss
    plan: Plan
    members: Tensor
    """Their numbers in the ensemble."""
    layout: Layout
    theta: Tensor
    """Parameters, (members, parameters)."""
    state: State
    rate: Tensor
    data: Owned
    validation: Owned | None
    chance: Chance
    penalties: Penalties
    dropout: Tensor | None
    batch_penalty: BatchPenalty | None = None
    steps: int = 0

    @property
    def min_delta(self) -> float:
        """What an improvement must exceed."""
        return 0.0 if self.plan.stopping is None else self.plan.stopping.min_delta

    def of(self, kept: Tensor) -> "Work":
        """The same with some of these members."""
        self.chance.keep(kept)
        return replace(
            self,
            members=self.members[kept],
            theta=self.theta[kept],
            state={key: held[kept] for key, held in self.state.items()},
            rate=self.rate[kept],
            data=self.data.of(kept),
            validation=None if self.validation is None else self.validation.of(kept),
            penalties=self.penalties.of(kept),
            dropout=None if self.dropout is None else self.dropout[kept],
        )

    def rate_at(self, epoch: int) -> Tensor:
        """Step sizes in an epoch."""
        return self.rate * factor_at(self.plan.optimizer, epoch)

    def epoch(self, epoch: int) -> tuple[Average, Tensor]:
        """One epoch in place: averages over the points stepped from, and the monitored value."""
        rate = self.rate_at(epoch)
        average = Average(self.theta, self.layout, self.plan.averaged)
        losses, added = torch.zeros_like(rate), torch.zeros_like(rate)
        order = self.chance.order(self.data.examples)
        for inputs, targets in self.data.batches(order, self.plan.batch_size):
            average.add(self.theta)
            loss, penalty, slope = self._slope(inputs, targets)
            size = inputs.shape[1]
            losses.add_(loss, alpha=size)
            added.add_(penalty, alpha=size)
            self.steps += 1
            self.plan.optimizer.step(self.theta, slope, self.state, rate, self.steps)
        return average, self._monitored(losses / self.data.examples, added / self.data.examples)

    def _slope(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, penalties, and the gradient of their sum, (members, parameters)."""
        theta = mended(self.theta) if self.penalties.fragile else self.theta
        leaves = {n: p.detach().requires_grad_() for n, p in self.layout.views(theta).items()}
        loss, penalty = self._function(leaves, inputs, targets)
        found = torch.autograd.grad(
            (loss + penalty).sum(), list(leaves.values()), materialize_grads=True
        )
        slope = self.layout.rows(dict(zip(leaves, found, strict=True)))
        with torch.no_grad():
            added = self.penalties.add(self.theta, slope)
            if self.penalties.fragile:
                slope[broken(self.theta)] = torch.nan
        return loss.detach(), penalty.detach() + added, slope

    @cached_property
    def _function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Losses and penalties of these members as one function, compiled once if at all."""
        forward, losses = self.ensemble.forward, vmap(self.loss)
        drop = self.chance.drop(self.dropout)

        def function(params: Params, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss = losses(forward(params, inputs, drop), targets)
            added = self.penalties.traced(params) + torch.zeros_like(loss)
            if self.batch_penalty is not None:
                own = self.batch_penalty(params, inputs, targets, self.members)
                if own.shape != loss.shape:
                    raise InputError(
                        f"batch_penalty returned shape {tuple(own.shape)} for {len(loss)} members: "
                        "return one value a member."
                    )
                added = added + own
            return loss, added

        return function if self.plan.compile is None else self.plan.compile(function)

    def _monitored(self, loss: Tensor, penalty: Tensor) -> Tensor:
        stopping = self.plan.stopping
        if stopping is None or stopping.monitor == "objective":
            return loss + penalty
        if self.validation is None:
            return loss
        return mean_loss(
            self.ensemble.at(self.layout.views(self.theta)), self.loss, self.validation
        )


def _begin(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    plan: Plan,
    seeds: list[int],
    penalties: Mapping[Regularizer, Strengths] | None,
    dropout: float | Sequence[float] | Tensor | None,
) -> Work:
    params = {n: p.detach() for n, p in ensemble.params.items()}
    layout, first, members = Layout.of(params), ensemble.first, len(ensemble)
    theta = layout.rows(params)
    stopping = plan.stopping
    validation = None if stopping is None else stopping.validation
    return Work(
        ensemble=ensemble,
        loss=loss,
        plan=plan,
        members=torch.arange(members, device=first.device),
        layout=layout,
        theta=theta,
        state=plan.optimizer.start(theta),
        rate=rates(plan.optimizer, members, first),
        data=own_data(data, members, first),
        validation=None if validation is None else own_data(validation, members, first),
        chance=Chance(seeds, first.device),
        penalties=own_penalties(penalties, params),
        dropout=None if dropout is None else own_rates(dropout, members, first),
    )
