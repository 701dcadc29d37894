"""The error of a finite step size, from the fit at half the step, against the laws of descent."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit.regularizers import gradient_norm


def descent(step_size, *, weight_decay=0.0, momentum=0.0, updates=1):
    """Recorded steps of gradient descent, and the objective."""
    X, y = random_data(3, count=16)
    model = tanh_mlp(5, sizes=(5, 4, 1))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=step_size, weight_decay=weight_decay, momentum=momentum
    )
    recorder = tacit.record(model, optimizer)
    for _ in range(8):
        for _ in range(updates):
            optimizer.zero_grad()
            F.mse_loss(model(X), y).backward()
            optimizer.step()
        recorder.step()
    return tacit.Objective(model, F.mse_loss, (X, y)), recorder.trajectory()


def fits(step_size, regularizers, **options):
    """The fits at the full and at half the step size."""
    objective, path = descent(step_size, **options)
    candidates = [gradient_norm(objective), *regularizers]
    return [
        tacit.fit(tacit.trajectory_equations(objective, steps, candidates, reference=tacit.rk4(2)))
        for steps in (path, path.halved())
    ]


@pytest.mark.parametrize("step_size", [0.2, 0.01])
def test_the_error_of_the_law_of_descent_is_what_half_the_step_shows(step_size):
    fit, halved = fits(step_size, [])
    strength, law = fit.strengths["gradient_norm"], step_size / 4
    error = abs(strength - law)
    assert error > 2.3 * fit.standard_errors["steps"]["gradient_norm"]  # which does not hold it
    fit = fit.with_halved(halved)
    assert fit.step_errors["gradient_norm"] == pytest.approx(error, rel=0.1)
    assert abs(2 * halved.strengths["gradient_norm"] - law) == pytest.approx(error / 2, rel=0.1)


def test_a_strength_that_does_not_halve_with_the_step_is_compared_as_it_is():
    fit, halved = fits(0.03, [tacit.l2()], weight_decay=0.04)
    errors = fit.with_halved(halved).step_errors
    assert abs(fit.strengths["l2"] - 0.02) < errors["l2"] < 0.001
    assert abs(fit.strengths["gradient_norm"] - 0.0075) < 1.5 * errors["gradient_norm"] < 0.001


def test_the_summary_offers_the_halved_fit_and_prints_the_distance():
    fit, halved = fits(0.1, [])
    assert "Trajectory.halved()" in fit.summary()
    fit = fit.with_halved(halved)
    distance = abs(fit.strengths["gradient_norm"] - 2 * halved.strengths["gradient_norm"])
    assert f"distance {distance:.2g}" in " ".join(fit.summary().split())
    assert "Trajectory.halved()" not in fit.summary()
    assert fit.to_dict()["step_errors"] == fit.step_errors == {"gradient_norm": 2 * distance}
    objective, path = descent(0.1)
    euler = tacit.fit(tacit.trajectory_equations(objective, path, [tacit.l2()]))
    assert "half" not in euler.summary()  # one explicit step is exact at any size


def test_steps_that_depend_on_earlier_points_are_not_halved():
    for options, words in (({"momentum": 0.5}, "momentum 0.5"), ({"updates": 3}, "3 updates")):
        _, path = descent(0.05, **options)
        with pytest.raises(tacit.InputError, match=words):
            path.halved()


def test_another_fit_than_that_of_the_halved_steps_is_refused():
    fit, halved = fits(0.05, [])
    objective, path = descent(0.05)
    euler = tacit.fit(tacit.trajectory_equations(objective, path.halved(), [tacit.l2()]))
    for other in (fit, euler, halved.layers["0"]):
        with pytest.raises(tacit.InputError, match="at half the size"):
            fit.with_halved(other)
