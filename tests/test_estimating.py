"""Both forms of estimate, and one fit per checkpoint against the theory of early stopping."""

import math
import re

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import theory
from tacit.estimating import time_varying

STEP = 0.05


def linear_objective(data):
    return tacit.Objective(nn.Linear(5, 1, bias=False).double(), F.mse_loss, data)


MODEL, DATA = tanh_mlp(1), random_data(1)
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, DATA)
RIDGE = tacit.l2()


def test_an_objective_stands_for_model_loss_and_data():
    known = {tacit.l2(scope="*.bias", name="biases"): 0.1}
    for options in ({}, {"known": known}, {"nonnegative": True}, {"population": math.inf}):
        expected = tacit.estimate(MODEL, F.mse_loss, DATA, [RIDGE], **options)
        by_name = tacit.estimate(
            model=MODEL, loss=F.mse_loss, data=DATA, regularizers=[RIDGE], **options
        )
        forms = [
            tacit.estimate(OBJECTIVE, [RIDGE], **options),
            tacit.estimate(OBJECTIVE, RIDGE, **options),
            tacit.estimate(OBJECTIVE, regularizers=[RIDGE], **options),
            tacit.estimate(objective=OBJECTIVE, regularizers=[RIDGE], **options),
        ]
        for fit in (by_name, *forms):
            assert fit.to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "objective and loss": (
            lambda: tacit.estimate(OBJECTIVE, F.mse_loss, DATA, [RIDGE]),
            "was given Objective, function, tuple, list",
        ),
        "objective alone": (lambda: tacit.estimate(OBJECTIVE), "was given Objective: an Objective"),
        "objective and data": (
            lambda: tacit.estimate(OBJECTIVE, data=DATA, regularizers=[RIDGE]),
            "was given Objective, tuple, list",
        ),
        "model and objective": (
            lambda: tacit.estimate(MODEL, objective=OBJECTIVE, regularizers=[RIDGE]),
            "was given Objective, Sequential, list",
        ),
        "two objectives": (
            lambda: tacit.estimate(OBJECTIVE, [RIDGE], objective=OBJECTIVE),
            "was given Objective, Objective, list",
        ),
        "no objective": (
            lambda: tacit.estimate(objective=MODEL, regularizers=[RIDGE]),
            "was given Sequential, list",
        ),
        "a model and regularizers": (
            lambda: tacit.estimate(MODEL, [RIDGE]),
            "called without data, regularizers",
        ),
        "no regularizers": (
            lambda: tacit.estimate(MODEL, F.mse_loss, DATA),
            "called without regularizers",
        ),
        "nothing": (lambda: tacit.estimate(), "called without model, loss, data, regularizers"),
    }.values(),
)
def test_mixtures_of_both_forms_are_refused(call, message):
    with pytest.raises(tacit.InputError, match=re.escape(message)) as error:
        call()
    assert "estimate(objective, regularizers)" in str(error.value)


def test_time_varying_gives_one_fit_per_checkpoint():
    X, y = random_data(8)
    objective = linear_objective((X, y))
    theta, checkpoints = torch.zeros(5, 1, dtype=torch.float64), {}
    for t in range(1, 31):
        theta = theta + STEP / len(X) * X.T @ (y - X @ theta)
        if t in (1, 10, 30):
            checkpoints[t] = {"weight": theta.T}
    fits = time_varying(objective, checkpoints, tacit.l2())
    assert list(fits) == [1, 10, 30]
    for t, fit in fits.items():
        matrix, theta = theory.early_stopping(X, STEP, t), checkpoints[t]["weight"][0]
        expected = float(theta @ matrix @ theta / (theta @ theta))
        assert fit.strengths["l2"] == pytest.approx(expected, rel=1e-9)
    with_known = time_varying(objective, checkpoints, tacit.l2(), known={tacit.l2(): 0.1})
    assert with_known[10].strengths["l2"] == pytest.approx(fits[10].strengths["l2"] - 0.1)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ({}, "checkpoints is empty"),
        ([{}], "checkpoints is a list"),
        ({3: None}, "checkpoint 3 is None"),
        ({"end": {"weight": torch.ones(1, 2)}}, "checkpoint 'end'"),
    ],
)
def test_wrong_checkpoints_are_refused(checkpoints, message):
    objective = linear_objective(random_data(0))
    with pytest.raises(tacit.InputError, match=re.escape(message)):
        time_varying(objective, checkpoints, tacit.l2())
    with pytest.raises(tacit.InputError, match="an objective is a NoneType"):
        time_varying(None, {1: {}}, tacit.l2())


@pytest.mark.parametrize("steps", [1, 3])
def test_a_trajectory_has_a_fit_for_every_so_many_steps(steps):
    """A ridge that grows with time, in descent on L + λ_t‖θ‖²."""
    model, data, rate = tanh_mlp(1), random_data(1), 1e-2
    objective, positions = tacit.Objective(model, F.mse_loss, data), [params_of(model)]
    for t in range(7):
        gradient = objective.gradient(positions[-1])
        ridge = 0.01 * (1 + t // 3)
        positions.append(
            {n: p - rate * (gradient[n] + 2 * ridge * p) for n, p in positions[-1].items()}
        )
    path = tacit.Trajectory.from_positions(positions, rate)
    fits = tacit.time_varying(objective, path, tacit.l2(), steps=steps)
    expected = {t * rate: 0.01 * (1 + t // 3) for t in range(0, 8 - steps, steps)}
    assert list(fits) == pytest.approx(list(expected))
    assert [fit.strengths["l2"] for fit in fits.values()] == pytest.approx(list(expected.values()))
    assert all(fit.sources[0].steps == steps for fit in fits.values())
    with pytest.raises(tacit.InputError, match="steps=9, but the trajectory has 7"):
        tacit.time_varying(objective, path, tacit.l2(), steps=9)
    with pytest.raises(tacit.InputError, match="are for a trajectory"):
        tacit.time_varying(objective, {0: params_of(model)}, tacit.l2(), steps=2)
