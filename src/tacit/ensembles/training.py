"""Training all members as one program; each ends with the weights of a separate training loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import dropout_rates, per_member, prepare
from tacit.ensembles.data import MemberData
from tacit.ensembles.denormals import flushed_denormals
from tacit.ensembles.evaluation import differentiate, mean_loss
from tacit.ensembles.forward import check_compilable
from tacit.ensembles.members import Ensemble, check_seeds
from tacit.ensembles.optimizers import State, schedule_factor
from tacit.ensembles.penalties import Penalties, Strengths, expand_penalties
from tacit.ensembles.plan import Plan
from tacit.ensembles.randomness import MemberRandomness
from tacit.ensembles.run import FlatEpoch, Run, RunRecorder
from tacit.errors import InputError, check_type
from tacit.objective.losses import Loss
from tacit.objective.params import Params
from tacit.objective.passes import track
from tacit.regularizers import Regularizer

BatchPenalty = Callable[[Params, Tensor, Tensor, Tensor], Tensor]
"""batch_penalty(params, inputs, targets, members): one value per member."""


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

    Each member ends with the weights that a plain loop over one module gives, with batches in the
    order of `order_generator(seed)` and masks from `mask_generator(seed)`. Members that stop are
    frozen and cost nothing further. On a CPU, denormal numbers are flushed while training.

    Args:
        ensemble: the initial members, on the device and in the dtype to train in.
        loss: mean loss of a batch, loss(outputs, targets).
        data: (inputs, targets) that all members share, or `Data`.
        plan: optimizer, epochs, batch size, stopping.
        seeds: one per member, for its batch order and masks; members with equal seeds share both.
        penalties: penalties with one strength for all members, or one per member.
        dropout: the rate of each member's dropout layers; by default the rate of the layers.
        batch_penalty: a penalty that depends on the batch, batch_penalty(params, inputs, targets,
            members), with stacked arguments and the indices of the members that are still
            training. It returns one value for each of them.
    """
    ensemble, data = prepare(ensemble, loss, data)
    check_type("plan", plan, Plan, "ensembles.Plan(optimizer, …)")
    for regularizer in plan.averaged:
        if any(len(c) > 1 for c in regularizer.bind(ensemble.member(0)).active.values()):
            raise InputError(
                f"averaged: {regularizer.name!r} has several strengths on one tensor, and their "
                "gradients cannot be averaged separately. Average families with one strength."
            )
    validation = None if plan.stopping is None else plan.stopping.validation
    theta = ensemble.flatten(ensemble.params).detach()
    active = ActiveMembers(
        ensemble=ensemble,
        loss=loss,
        plan=plan,
        batch_penalty=batch_penalty,
        members=torch.arange(len(ensemble), device=theta.device),
        theta=theta,
        state=plan.optimizer.initial_state(theta),
        rates=per_member(
            "rate", plan.optimizer.rate, ensemble, lambda r: r > 0, "a finite number above 0"
        ),
        data=data,
        validation=None if validation is None else prepare(ensemble, loss, validation)[1],
        randomness=MemberRandomness(check_seeds(seeds, len(ensemble)), theta.device),
        penalties=expand_penalties(penalties, ensemble),
        dropout=None if dropout is None else dropout_rates(dropout, ensemble),
    )
    recorder = RunRecorder(ensemble, plan)
    with flushed_denormals(), torch.enable_grad():
        for number in track(range(recorder.max_epochs), total=recorder.max_epochs, label="epochs"):
            finished = recorder.record(number, active.train_epoch(number))
            if bool(finished.all()):
                break
            if bool(finished.any()):
                active = active.select(torch.nonzero(~finished)[:, 0])
    return recorder.run()


@dataclass(eq=False)
class ActiveMembers:
    """The members that are still training: weights, optimizer state, data and randomness."""

    ensemble: Ensemble
    loss: Loss
    plan: Plan
    batch_penalty: BatchPenalty | None
    members: Tensor
    """Their indices in the ensemble, ascending."""
    theta: Tensor
    """Weights, (members, parameters)."""
    state: State
    rates: Tensor
    """Step sizes before any milestone."""
    data: MemberData
    validation: MemberData | None
    randomness: MemberRandomness
    penalties: Penalties
    dropout: Tensor | None
    """Dropout rates, or None for those of the layers."""
    steps: int = 0

    def select(self, remaining: Tensor) -> "ActiveMembers":
        """Continue with some of these members.

        Trap: `randomness` is restricted in place, so this object must not be used afterwards.
        """
        self.randomness.restrict_to(remaining)
        return replace(
            self,
            members=self.members[remaining],
            theta=self.theta[remaining],
            state={key: average[remaining] for key, average in self.state.items()},
            rates=self.rates[remaining],
            data=self.data.select(remaining),
            validation=None if self.validation is None else self.validation.select(remaining),
            penalties=self.penalties.select(remaining),
            dropout=None if self.dropout is None else self.dropout[remaining],
        )

    def train_epoch(self, number: int) -> FlatEpoch:
        """Train one epoch in place, and return what is recorded of it."""
        optimizer, theta, examples = self.plan.optimizer, self.theta, self.data.examples
        rates = self.rates * schedule_factor(optimizer, number)
        start, sums = theta.clone(), torch.zeros_like(theta)
        columns = theta.new_zeros(len(theta), len(self.plan.averaged), theta.shape[1])
        loss_sum, penalty_sum = torch.zeros_like(rates), torch.zeros_like(rates)
        order = self.randomness.draw_orders(examples)
        for inputs, targets in self.data.batches(order, self.plan.batch_size):
            sums.add_(theta)
            for k, regularizer in enumerate(self.plan.averaged):
                columns[:, k].add_(self._regularizer_gradient(regularizer))
            loss, penalty, gradient = self._gradient(inputs, targets)
            loss_sum.add_(loss, alpha=inputs.shape[1])
            penalty_sum.add_(penalty, alpha=inputs.shape[1])
            self.steps += 1
            optimizer.step(theta, gradient, self.state, rates, self.steps)
        steps = -(-examples // self.plan.batch_size)
        rows = {
            "average": sums / steps,
            "displacement": theta.double() - start.double(),
            "time": steps * optimizer.flow_time(rates),
            "columns": (columns / steps).double(),
        }
        metric = optimizer.metric(self.state, self.steps)
        if metric is not None:
            rows["metric"] = metric
        monitored = self._monitored(loss_sum / examples, penalty_sum / examples)
        return FlatEpoch(self.members, theta, monitored, rows)

    def _regularizer_gradient(self, regularizer: Regularizer) -> Tensor:
        """∇R of every member, (members, parameters)."""
        if regularizer.entrywise is not None:
            return regularizer.entrywise.derivative(self.theta)
        params = self.ensemble.views(zero_nonfinite(self.theta))
        return self.ensemble.flatten(differentiate(vmap(regularizer.value), params).gradients)

    def _gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, penalties, and the gradient of their sum, (members, parameters)."""
        needs_finite = bool(self.penalties.differentiated)
        theta = zero_nonfinite(self.theta) if needs_finite else self.theta
        (loss, penalty), gradients, _ = differentiate(
            lambda params: self._differentiated(params, inputs, targets), self.ensemble.views(theta)
        )
        gradient = self.ensemble.flatten(gradients)
        with torch.no_grad():
            entrywise = self.penalties.add_entrywise(self.theta, gradient)
            if needs_finite:
                gradient[nonfinite_members(self.theta)] = torch.nan
        return loss, penalty + entrywise, gradient

    @cached_property
    def _differentiated(self) -> Callable[..., Tensor]:
        """Losses and penalties that autograd differentiates, compiled once if the plan says so."""
        forward, losses = self.ensemble.forward, vmap(self.loss)
        apply_dropout = self.randomness.dropout(self.dropout)

        def evaluate(params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
            loss = losses(forward(params, inputs, apply_dropout), targets)
            penalty = self.penalties.autograd_values(params) + torch.zeros_like(loss)
            if self.batch_penalty is not None:
                values = self.batch_penalty(params, inputs, targets, self.members)
                if values.shape != loss.shape:
                    raise InputError(
                        f"batch_penalty returned shape {tuple(values.shape)} for {len(loss)} "
                        "members: return one value per member."
                    )
                penalty = penalty + values
            return torch.stack([loss, penalty])

        if self.plan.compile is None:
            return evaluate
        check_compilable(self.ensemble.model)
        return self.plan.compile(evaluate)

    def _monitored(self, loss: Tensor, penalty: Tensor) -> Tensor:
        """The values that stopping is decided on."""
        stopping = self.plan.stopping
        if stopping is None or stopping.monitor == "objective":
            return loss + penalty
        if self.validation is None:
            return loss
        current = self.ensemble.with_params(self.ensemble.views(self.theta))
        return mean_loss(current, self.loss, self.validation)


def nonfinite_members(theta: Tensor) -> Tensor:
    """Mask of the members whose weights are no longer finite."""
    return ~theta.isfinite().all(1)


def zero_nonfinite(theta: Tensor) -> Tensor:
    """Replace the weights of members that are not finite by zeros.

    Some regularizers, such as the nuclear norm, raise an error on NaN.
    """
    return torch.where(nonfinite_members(theta).unsqueeze(1), torch.zeros_like(theta), theta)
