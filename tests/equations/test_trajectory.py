"""What moved the weights besides the loss gradient: penalised descent and the step-size law."""

import itertools
import math

import pytest
import torch
from support.descent import descend
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import reference


def test_plain_descent_leaves_only_rounding_and_no_signal():
    model, data, step = tanh_mlp(0), random_data(0), 1e-2
    positions = descend(model, data, step, 12)
    trajectory = tacit.Trajectory.from_positions(positions, step)
    objective = tacit.Objective(model, F.mse_loss, data)
    equations = tacit.trajectory_equations(objective, trajectory, [tacit.l2()])
    fit = tacit.fit(equations)
    for index, point in enumerate(trajectory.points):
        target_norm = float(equations.steps()[index].factor()[:, 1:].norm())
        parameter_norm = float(reference.flat(point).norm())
        assert target_norm <= 10 * torch.finfo(torch.float64).eps * parameter_norm / step
    assert [problem.kind for problem in fit.problems] == ["no signal"]


@pytest.mark.parametrize("ridge", [1e-4, 1e-1])
def test_the_ridge_of_a_penalised_descent_is_recovered(ridge):
    model, data, step = tanh_mlp(1), random_data(1), 1e-2
    positions = descend(model, data, step, 10, ridge=ridge)
    objective = tacit.Objective(model, F.mse_loss, data)
    trajectory = tacit.Trajectory.from_positions(positions, [step] * 10)
    fit = tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))
    assert fit.strengths["l2"] == pytest.approx(ridge, rel=1e-10)
    assert not fit.problems


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


def test_equations_equal_the_dense_ones():
    model, data, step = tanh_mlp(2), random_data(2), 3e-2
    positions = descend(model, data, step, 3, ridge=0.05)
    trajectory = tacit.Trajectory.from_positions(positions, step)
    equations = tacit.trajectory_equations(
        tacit.Objective(model, F.mse_loss, data), trajectory, [tacit.l2(), tacit.smooth_l1(0.1)]
    )
    dense_loss = loss_of(model, F.mse_loss, data)
    rows = []
    for point, displacement in zip(trajectory.points, trajectory.displacements, strict=True):
        design = reference.design([tacit.l2(), tacit.smooth_l1(0.1)], point)
        target = reference.euler_target(dense_loss, point, displacement, step)
        rows.append(torch.cat([design, target[:, None]], dim=1))
    rows = torch.cat(rows)
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, rows.T @ rows, rtol=1e-10, atol=1e-12)


def step_size_ratio(step, *, momentum=0.0, burn_in=0, seed=3):
    """Estimated over theoretical strength of ‖∇L‖², for one step of (heavy-ball) descent."""
    model, data = tanh_mlp(seed), random_data(seed)
    positions = descend(model, data, step, 1, momentum=momentum, burn_in=burn_in)
    objective = tacit.Objective(model, F.mse_loss, data)
    trajectory = tacit.Trajectory.from_positions(positions, step / (1 - momentum))
    fit = tacit.fit(
        tacit.trajectory_equations(
            objective,
            trajectory,
            [tacit.regularizers.gradient_norm(objective)],
            reference=tacit.rk4(),
        )
    )
    assert fit.explained > 0.95
    theory = step * (1 + momentum) / (4 * (1 - momentum) ** 2)
    return fit.strengths["gradient_norm"] / theory


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_descent_adds_a_quarter_of_its_step_size_times_the_squared_gradient_norm(seed):
    assert step_size_ratio(1e-3, seed=seed) == pytest.approx(1, abs=0.01)


def test_the_error_of_the_step_size_law_is_of_first_order():
    steps = [4e-3, 2e-3, 1e-3, 5e-4]
    errors = [abs(step_size_ratio(step) - 1) for step in steps]
    orders = [math.log(a / b) / math.log(2) for a, b in itertools.pairwise(errors)]
    assert orders == pytest.approx([1, 1, 1], abs=0.1)


@pytest.mark.parametrize("seed", [3, 4])
def test_heavy_ball_adds_its_multiple_of_the_squared_gradient_norm(seed):
    ratio = step_size_ratio(1e-4, momentum=0.5, burn_in=60, seed=seed)
    assert ratio == pytest.approx(1, abs=0.01)


def test_the_tensors_of_a_reference_are_not_changed():
    model, data, step = tanh_mlp(10), random_data(10), 1e-2
    reference = {n: torch.zeros_like(p) for n, p in params_of(model).items()}
    trajectory = tacit.Trajectory.from_positions(descend(model, data, step, 3), step)
    objective = tacit.Objective(model, F.mse_loss, data)
    tacit.trajectory_equations(objective, trajectory, [tacit.l2()], reference=lambda *_: reference)
    assert not any(tensor.any() for tensor in reference.values())


def test_small_steps_in_float32_have_no_signal():
    model, data = tanh_mlp(9).float(), random_data(9)
    data = tuple(part.float() for part in data)
    step = 1e-6
    positions = descend(model, data, step, 1)
    objective = tacit.Objective(model, F.mse_loss, data)
    fit = tacit.fit(
        tacit.trajectory_equations(
            objective,
            tacit.Trajectory.from_positions(positions, step),
            [tacit.regularizers.gradient_norm(objective)],
            reference=tacit.rk4(1),
        )
    )
    assert [problem.kind for problem in fit.problems] == ["no signal"]
