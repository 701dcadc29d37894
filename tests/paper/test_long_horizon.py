"""The long-horizon experiment: distances in closed form, their orders, its rows and figure."""

import json
import math
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from support.problems import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit_paper import least_squares as ls
from tacit_paper import load, plots
from tacit_paper import long_horizon as experiment

TINY = replace(
    experiment.QUICK, steps=6, network_steps=4, network_examples=60, hidden=(8, 4), substeps=2
)


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(experiment.run(TINY)))


def test_distances_on_least_squares_are_those_in_closed_form():
    """With H = 2XᵀX/n each way is a power or an exponential of H, from the same start."""
    eta, steps = 0.03, 20
    X, _, y = ls.draw(noise=0.1, examples=500)
    start = ls.point(torch.zeros(10))
    found = list(experiment.drift(ls.objective(X, y), start, eta, steps=steps, substeps=10))
    values, vectors = torch.linalg.eigh(2 * X.T @ X / len(X))
    away = vectors.T @ torch.linalg.lstsq(X, y[:, None]).solution[:, 0]
    for k in (1, 7, steps):
        descent = (1 - eta * values) ** k
        plain = (-eta * k * values).exp()
        modified = (-eta * k * values * (1 + eta / 2 * values)).exp()
        row = found[k - 1]
        assert row["plain"] == pytest.approx(float(((descent - plain) * away).norm()), rel=1e-6)
        expected = float(((descent - modified) * away).norm())
        assert row["modified"] == pytest.approx(expected, rel=1e-6)
        assert row["moved"] == pytest.approx(float(((1 - descent) * away).norm()), rel=1e-9)


def test_distances_have_the_orders_of_theory():
    """Over the same time, half the step: half the plain distance, a quarter of the modified."""
    X, y = random_data(0, 60)
    ends = {}
    for eta, steps in ((0.02, 10), (0.01, 20)):
        model = tanh_mlp(0)
        objective = tacit.Objective(model, F.mse_loss, (X, y))
        *_, ends[steps] = experiment.drift(
            objective, objective.params, eta, steps=steps, substeps=4
        )
    assert ends[10]["plain"] / ends[20]["plain"] == pytest.approx(2, rel=0.05)
    assert ends[10]["modified"] / ends[20]["modified"] == pytest.approx(4, rel=0.05)


def test_the_modified_gradient_is_that_of_the_modified_loss():
    model, (X, y) = tanh_mlp(1), random_data(1)
    objective, eta = tacit.Objective(model, F.mse_loss, (X, y)), 0.3
    found = experiment.Modified(objective, eta).gradient(objective.params)
    column = tacit.regularizers.gradient_norm(objective).gradient(objective.params)["gradient_norm"]
    for name, slope in objective.gradient().items():
        torch.testing.assert_close(found[name], slope + eta / 4 * column[name])


def test_units_do_not_depend_on_each_other(rows):
    names = experiment.units(TINY)
    assert names == ["least squares, η = 0.01", "least squares, η = 0.03", "tanh", "ReLU"]
    whole = rows.to_dict("records")
    some = {"least squares, η = 0.03", "ReLU"}
    part = list(experiment.run(TINY, finished=[name for name in names if name not in some]))
    assert part == [row for row in whole if row["unit"] in some]
    assert json.loads(json.dumps(part)) == part  # plain values
    counts = rows.groupby("unit").size()
    assert counts.to_dict() == dict(zip(names, (6, 6, 4, 4), strict=True))
    assert (rows.plain > 0).all()


def test_the_model_s_own_randomness_is_the_seed_s(rows):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = list(experiment.run(TINY, finished=experiment.units(TINY)[:2]))
    assert torch.equal(torch.get_rng_state(), before)
    assert again == [r for r in rows.to_dict("records") if r["unit"] in ("tanh", "ReLU")]


def test_the_figure_comes_from_stored_rows_alone(rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    stored = pd.read_parquet(tmp_path / "rows.parquet")
    figure = experiment.plot(stored)
    titles = "".join(axis.get_title(loc="left")[:1] for axis in figure.get_axes())
    assert titles == "ABCD"
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000
    found = experiment.check(stored)
    assert len(found) == 4
    assert all(math.isfinite(each.value) for each in found)
    assert all(each.holds for each in found[:3])  # all but ReLU, which the theory does not cover


def test_the_paper_preset_is_the_papers():
    paper = experiment.PAPER
    assert (paper.inputs, paper.examples, paper.noise, paper.steps) == (10, 500, 0.1, 50)
    assert paper.etas == (0.01, 0.03)
    assert (paper.network_examples, paper.hidden, paper.network_steps) == (1000, (64, 32), 30)
    module = load("long-horizon")
    json.dumps([asdict(module.PAPER), asdict(module.QUICK)])
    assert "outside the theory" in module.CAPTION
