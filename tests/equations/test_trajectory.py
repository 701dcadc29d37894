"""Forces along the way: plain and penalised descent, the step-size law, heavy ball."""

import itertools
import math

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import reference


def descend(model, data, step, count, *, ridge=0.0, momentum=0.0, burn_in=0):
    """Positions of full-batch (heavy-ball) descent on mean squared error + ridge·‖θ‖²."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=step, momentum=momentum, weight_decay=2 * ridge
    )
    positions = []
    for iteration in range(burn_in + count + 1):
        if iteration >= burn_in:
            positions.append(params_of(model))
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
    return positions


def test_plain_descent_against_euler_is_rounding_and_says_so():
    model, data, step = tanh_mlp(0), random_data(0), 1e-2
    positions = descend(model, data, step, 12)
    trajectory = tacit.Trajectory.from_positions(positions, step)
    objective = tacit.Objective(model, F.mse_loss, data)
    equations = tacit.trajectory_equations(objective, trajectory, [tacit.l2()])
    found = tacit.fit(equations)
    for number, point in enumerate(trajectory.points):
        residual = float(equations.steps()[number].factor()[:, 1:].norm())
        size = float(reference.flat(point).norm())
        assert residual <= 10 * torch.finfo(torch.float64).eps * size / step
    assert [problem.kind for problem in found.problems] == ["no signal"]


@pytest.mark.parametrize("ridge", [1e-4, 1e-1])
def test_the_ridge_of_a_penalised_descent_is_found(ridge):
    model, data, step = tanh_mlp(1), random_data(1), 1e-2
    positions = descend(model, data, step, 10, ridge=ridge)
    objective = tacit.Objective(model, F.mse_loss, data)
    trajectory = tacit.Trajectory.from_positions(positions, [step] * 10)
    found = tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))
    assert found.strengths["l2"] == pytest.approx(ridge, rel=1e-10)
    assert not found.problems


def test_a_known_ridge_leaves_no_signal():
    model, data, step = tanh_mlp(1), random_data(1), 1e-2
    positions = descend(model, data, step, 10, ridge=0.1)
    equations = tacit.trajectory_equations(
        tacit.Objective(model, F.mse_loss, data),
        tacit.Trajectory.from_positions(positions, step),
        [tacit.l2()],
        known={tacit.l2(): 0.1},
    )
    assert [problem.kind for problem in tacit.fit(equations).problems] == ["no signal"]


def test_targets_equal_the_dense_ones():
    model, data, step = tanh_mlp(2), random_data(2), 3e-2
    positions = descend(model, data, step, 3, ridge=0.05)
    trajectory = tacit.Trajectory.from_positions(positions, step)
    equations = tacit.trajectory_equations(
        tacit.Objective(model, F.mse_loss, data), trajectory, [tacit.l2(), tacit.smooth_l1(0.1)]
    )
    dense = loss_of(model, F.mse_loss, data)
    rows = []
    for point, moved in zip(trajectory.points, trajectory.displacements, strict=True):
        design = reference.design([tacit.l2(), tacit.smooth_l1(0.1)], point)
        target = reference.euler_target(dense, point, moved, step)
        rows.append(torch.cat([design, target[:, None]], dim=1))
    rows = torch.cat(rows)
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, rows.T @ rows, rtol=1e-10, atol=1e-12)


def test_the_flow_equals_the_dense_one():
    model, data = tanh_mlp(2), random_data(2)
    objective, point = tacit.Objective(model, F.mse_loss, data, batch_size=20), params_of(model)
    found = tacit.rk4(substeps=3)(objective, point, 0.1)
    dense = loss_of(model, F.mse_loss, data)
    expected = reference.flow_displacement(dense, point, 0.1, substeps=3)
    torch.testing.assert_close(reference.flat(found), expected, rtol=1e-12, atol=1e-14)


def step_size_ratio(step, *, momentum=0.0, burn_in=0, seed=3):
    """Recovered strength of ‖∇L‖² over the theory's, for one step of (heavy-ball) descent."""
    model, data = tanh_mlp(seed), random_data(seed)
    positions = descend(model, data, step, 1, momentum=momentum, burn_in=burn_in)
    objective = tacit.Objective(model, F.mse_loss, data)
    trajectory = tacit.Trajectory.from_positions(positions, step / (1 - momentum))
    found = tacit.fit(
        tacit.trajectory_equations(
            objective,
            trajectory,
            [tacit.regularizers.gradient_norm(objective)],
            reference=tacit.rk4(),
        )
    )
    assert found.explained > 0.95
    theory = step * (1 + momentum) / (4 * (1 - momentum) ** 2)
    return found.strengths["gradient_norm"] / theory


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_descent_carries_a_quarter_of_its_step_size(seed):
    assert step_size_ratio(1e-3, seed=seed) == pytest.approx(1, abs=0.01)


def test_the_law_is_of_first_order_in_the_step_size():
    steps = [4e-3, 2e-3, 1e-3, 5e-4]
    errors = [abs(step_size_ratio(step) - 1) for step in steps]
    slopes = [math.log(a / b) / math.log(2) for a, b in itertools.pairwise(errors)]
    assert slopes == pytest.approx([1, 1, 1], abs=0.1)


def test_an_euler_reference_of_two_substeps_would_bias_by_one_half():
    model, data, step = tanh_mlp(3), random_data(3), 1e-4
    objective = tacit.Objective(model, F.mse_loss, data)
    positions = descend(model, data, step, 1)

    def two_steps(objective, point, time):
        half = tacit.euler(objective, point, time / 2)
        rest = tacit.euler(objective, {n: point[n] + half[n] for n in point}, time / 2)
        return {n: half[n] + rest[n] for n in point}

    found = tacit.fit(
        tacit.trajectory_equations(
            objective,
            tacit.Trajectory.from_positions(positions, step),
            [tacit.regularizers.gradient_norm(objective)],
            reference=two_steps,
        )
    )
    assert found.strengths["gradient_norm"] == pytest.approx(step / 8, rel=0.01)


@pytest.mark.parametrize("seed", [3, 4])
def test_heavy_ball_carries_its_own_multiple(seed):
    ratio = step_size_ratio(1e-4, momentum=0.5, burn_in=60, seed=seed)
    assert ratio == pytest.approx(1, abs=0.01)


def test_recording_a_loop_equals_its_positions():
    model, data, step = tanh_mlp(6), random_data(6), 1e-2
    positions = descend(tanh_mlp(6), data, step, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    by_hand, by_optimizer = tacit.record(model), tacit.record(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        by_hand.step(step)
        by_optimizer.step()
    expected = tacit.Trajectory.from_positions(positions, step)
    for recorded in (by_hand.trajectory(), by_optimizer.trajectory()):
        assert list(recorded.times) == list(expected.times)
        for name in positions[0]:
            for kind in ("points", "displacements"):
                for a, b in zip(getattr(recorded, kind), getattr(expected, kind), strict=True):
                    assert torch.equal(a[name], b[name])


def test_momentum_stretches_the_recorded_time():
    model = tanh_mlp(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    recorder = tacit.record(model, optimizer)
    X, y = random_data(7)
    for updates in (1, 2):
        for _ in range(updates):
            optimizer.zero_grad()
            F.mse_loss(model(X), y).backward()
            optimizer.step()
            scheduler.step()  # the time is read at the update, not here
        recorder.step()
    assert recorder.trajectory().times == pytest.approx([1.0, 0.5 + 0.25])


def test_dampening_counts_only_with_momentum():
    model = tanh_mlp(7)
    X, y = random_data(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    recorder = tacit.record(model, optimizer)
    F.mse_loss(model(X), y).backward()
    optimizer.step()
    recorder.step()
    assert recorder.trajectory().times == pytest.approx([0.1])


def test_a_reference_of_the_users_own_is_not_changed():
    model, data, step = tanh_mlp(10), random_data(10), 1e-2
    kept = {n: torch.zeros_like(p) for n, p in params_of(model).items()}
    trajectory = tacit.Trajectory.from_positions(descend(model, data, step, 3), step)
    objective = tacit.Objective(model, F.mse_loss, data)
    tacit.trajectory_equations(objective, trajectory, [tacit.l2()], reference=lambda *_: kept)
    assert not any(tensor.any() for tensor in kept.values())


def drifting_trajectory(strengths):
    """Steps of exact descent on L + λ_t‖θ‖² with a λ that changes."""
    model, data, step = tanh_mlp(8), random_data(8), 1e-2
    objective = tacit.Objective(model, F.mse_loss, data)
    point, points = params_of(model), []
    for strength in strengths:
        points.append(point)
        slope = objective.gradient(point)
        point = {n: p - step * (slope[n] + 2 * strength * p) for n, p in point.items()}
    trajectory = tacit.Trajectory.from_positions([*points, point], step)
    return tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))


def test_a_strength_that_moves_is_called_drifting():
    found = drifting_trajectory([0.1 + 0.01 * t for t in range(12)])
    assert "drifting" in {problem.kind for problem in found.problems}
    stacked = tacit.fit(tacit.stack([found.equations, found.equations]))
    assert "drifting" in {problem.kind for problem in stacked.problems}
    assert not drifting_trajectory([0.1] * 12).problems
    noisy = [0.1 * (1 + 0.05 * (-1) ** t) for t in range(12)]
    assert "drifting" not in {problem.kind for problem in drifting_trajectory(noisy).problems}


def test_float32_steps_drown_and_the_fit_says_so():
    model, data = tanh_mlp(9).float(), random_data(9)
    data = tuple(part.float() for part in data)
    step = 1e-6
    positions = descend(model, data, step, 1)
    objective = tacit.Objective(model, F.mse_loss, data)
    found = tacit.fit(
        tacit.trajectory_equations(
            objective,
            tacit.Trajectory.from_positions(positions, step),
            [tacit.regularizers.gradient_norm(objective)],
            reference=tacit.rk4(1),
        )
    )
    assert [problem.kind for problem in found.problems] == ["no signal"]
