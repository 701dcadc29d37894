"""Reference displacements against the dense flow, and the bias of a coarse reference."""

import pytest
import torch
from support.descent import descend
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import reference


def test_runge_kutta_equals_the_dense_flow():
    model, data = tanh_mlp(2), random_data(2)
    objective, point = tacit.Objective(model, F.mse_loss, data, batch_size=20), params_of(model)
    displacement = tacit.rk4(substeps=3)(objective, point, 0.1)
    expected = reference.flow_displacement(loss_of(model, F.mse_loss, data), point, 0.1, substeps=3)
    torch.testing.assert_close(reference.flat(displacement), expected, rtol=1e-12, atol=1e-14)


def test_an_euler_reference_of_two_substeps_halves_the_strength():
    model, data, step = tanh_mlp(3), random_data(3), 1e-4
    objective = tacit.Objective(model, F.mse_loss, data)
    positions = descend(model, data, step, 1)

    def two_steps(objective, point, time):
        first = tacit.equations.euler(objective, point, time / 2)
        second = tacit.equations.euler(objective, {n: point[n] + first[n] for n in point}, time / 2)
        return {n: first[n] + second[n] for n in point}

    fit = tacit.fit(
        tacit.trajectory_equations(
            objective,
            tacit.Trajectory.from_positions(positions, step),
            [tacit.regularizers.gradient_norm(objective)],
            reference=two_steps,
        )
    )
    assert fit.strengths["gradient_norm"] == pytest.approx(step / 8, rel=0.01)
