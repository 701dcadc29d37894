"""Steps of SGD with momentum: what it carries over from earlier gradients is taken out."""

import math
from dataclasses import replace

import pytest
import torch
from support.descent import descend
from support.models import random_data, tanh_mlp
from support.systems import equations_of_parts
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations.blocks import Block
from tacit.equations.equations import Equations
from tacit.equations.factors import triangular_factor

BETA, RATE, RIDGE, BURN_IN = 0.9, 0.002, 0.1, 60


def train(model, data, optimizer, steps, *, updates=1):
    """A recorder of full-batch steps, each of several updates."""
    recorder = tacit.record(model, optimizer)
    for _ in range(steps):
        for _ in range(updates):
            optimizer.zero_grad()
            F.mse_loss(model(data[0]), data[1]).backward()
            optimizer.step()
        recorder.step()
    return recorder


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.5}])
def test_the_ridge_is_exact_from_the_first_step_of_an_empty_buffer(options):
    """It was 0.083 for 0.01 (0.072 with Nesterov), at 7 % explained, and called unsettled."""
    data, model = random_data(3), tanh_mlp(3)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=BETA, weight_decay=0.02, **options
    )
    trajectory = train(model, data, optimizer, 12).trajectory()
    objective = tacit.Objective(model, F.mse_loss, data)
    fit = tacit.fit(tacit.trajectory_equations(objective, trajectory, tacit.l2()))
    assert fit.strengths["l2"] == pytest.approx(0.01, rel=1e-8)
    assert fit.explained == pytest.approx(1, abs=1e-8)
    assert not fit.problems
    from_target = tacit.trajectory_target(objective, trajectory).equations(tacit.l2())
    assert tacit.fit(from_target).strengths == fit.strengths
    flow = tacit.trajectory_equations(objective, trajectory, tacit.l2(), reference=tacit.rk4(1))
    assert flow.sources[0].memory == pytest.approx(10)  # a flow has the momentum's own effect


def test_steps_of_several_updates_and_changing_rates_carry_the_sum():
    """The carried part makes displacements those of descent with the step η/(1−β)."""
    data, model = random_data(3), tanh_mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=BETA)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    recorder, expected = tacit.record(model, optimizer), []
    for _ in range(3):
        moved = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(data[0]), data[1]).backward()
            time = optimizer.param_groups[0]["lr"] / (1 - BETA)
            moved = {n: moved[n] - time * p.grad for n, p in model.named_parameters()}
            optimizer.step()
            schedule.step()
        recorder.step()
        expected.append(moved)
    trajectory = recorder.trajectory()
    for moved, carried, own in zip(
        trajectory.displacements, trajectory.carried, expected, strict=True
    ):
        for name, part in own.items():
            torch.testing.assert_close(moved[name] - carried[name], part, rtol=1e-9, atol=1e-13)


def test_without_momentum_nothing_is_carried():
    data, model, step = random_data(6), tanh_mlp(6), 1e-2
    positions = descend(tanh_mlp(6), data, step, 3)
    recorder = train(model, data, torch.optim.SGD(model.parameters(), lr=step), 3)
    trajectory = recorder.trajectory()
    assert not trajectory.carried
    assert not trajectory.momentum
    by_hand = tacit.Trajectory.from_positions(positions, step)
    objective = tacit.Objective(model, F.mse_loss, data)
    one, two = (tacit.trajectory_equations(objective, t, tacit.l2()) for t in (trajectory, by_hand))
    assert torch.equal(one.factor(), two.factor())
    assert not one.means


class Regression:
    """Many runs at once of linear regression by minibatch SGD with momentum and weight decay."""

    def __init__(self, seed, runs, steps, *, count=100, inputs=5, batch=16):
        self.generator = torch.Generator().manual_seed(seed)
        self.X = self._draw(runs, count, inputs)
        self.y = self.X.sum(2, keepdim=True) + 0.5 * self._draw(runs, count, 1)
        self.start = weights = 0.3 * self._draw(runs, inputs, 1)
        buffer, self.rows, self.batches = torch.zeros_like(weights), [], []
        for step in range(BURN_IN + steps):
            chosen = torch.randint(0, count, (runs, batch), generator=self.generator)
            self.batches.append(chosen)
            index = chosen[:, :, None]
            Xb = self.X.gather(1, index.expand(-1, -1, inputs))
            gradient = self._gradient(Xb, self.y.gather(1, index), weights) + 2 * RIDGE * weights
            if step >= BURN_IN:  # the step's own gradient, without that of the loss
                target = gradient - self._gradient(self.X, self.y, weights)
                self.rows.append(torch.cat([2 * weights, target], dim=2))
            buffer = BETA * buffer + gradient
            weights = weights - RATE * buffer

    def _draw(self, *size):
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    @staticmethod
    def _gradient(X, y, weights):
        return 2 * X.mT @ (X @ weights - y) / X.shape[1]

    def equations(self, run):
        """The equations of one run, as `trajectory_equations` writes them."""
        rows = [part[run] for part in self.rows]
        single = equations_of_parts(
            [("", 0, step, part) for step, part in enumerate(rows)], 1, mode="trajectory"
        )
        means = [
            Block(
                "",
                (0,),
                triangular_factor(sum(rows[first : first + 8 - offset : 2]) / 2),
                5,
                0,
                0.0,
                step=first,
                points=4,
            )
            for start in range(0, len(rows) - 7, 8)
            for offset in (0, 1)
            for first in [start + offset]
        ]
        sources = tuple(replace(s, steps=len(rows)) for s in single.sources)
        return Equations(
            single.families, single.names, 1, single.blocks, sources, None, tuple(means)
        )


def test_the_simulated_equations_are_those_of_a_recorded_run():
    runs = Regression(7, 2, 20)
    model = nn.Linear(5, 1, bias=False).double()
    model.weight.data = runs.start[1].T.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=BETA, weight_decay=2 * RIDGE)
    X, y, recorder = runs.X[1], runs.y[1], None
    for step, chosen in enumerate(runs.batches):
        recorder = tacit.record(model, optimizer) if step == BURN_IN else recorder
        optimizer.zero_grad()
        F.mse_loss(model(X[chosen[1]]), y[chosen[1]]).backward()
        optimizer.step()
        if recorder:
            recorder.step()
    assert recorder is not None
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    recorded = tacit.trajectory_equations(objective, recorder.trajectory(), tacit.l2())
    simulated = runs.equations(1)
    for kind in ("blocks", "means"):
        for a, b in zip(getattr(recorded, kind), getattr(simulated, kind), strict=True):
            assert (a.step, a.points) == (b.step, b.points)
            torch.testing.assert_close(
                a.factor.T @ a.factor, b.factor.T @ b.factor, rtol=1e-7, atol=1e-9
            )
    one, two = tacit.fit(recorded), tacit.fit(simulated)
    assert one.explained == pytest.approx(two.explained, rel=1e-6)
    assert one.standard_errors["steps"]["l2"] == pytest.approx(
        two.standard_errors["steps"]["r0"], rel=1e-6
    )


@pytest.mark.parametrize(
    ("steps", "runs"),
    [
        (60, 60),
        pytest.param(200, 60, marks=pytest.mark.slow),
    ],
)
def test_intervals_from_steps_hold_the_ridge_at_momentum_09(steps, runs):
    """It was in 67 % of those of 60 steps; 65 % of them were called drifting, 47 % at 200 steps."""
    simulated = Regression(1000 * steps + runs, runs, steps)
    covered = alarms = 0
    for run in range(runs):
        fit = tacit.fit(simulated.equations(run))
        low, high = fit.intervals()["steps"]["r0"]
        covered += low <= RIDGE <= high
        alarms += bool(fit.problems)
    chance = 2 * math.sqrt(0.05 * 0.95 / runs)  # of a count that is 95 % on average
    assert covered >= (0.9 if runs >= 300 else 0.95 - 2 * chance) * runs
    assert alarms <= 0.05 * runs
