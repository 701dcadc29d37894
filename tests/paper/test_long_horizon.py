"""The long-horizon figure: distances in closed form, their orders, its rows and drawing."""

import json
import math
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from support.experiments import run
from support.models import random_data, tanh_mlp
from support.pages import ROOT
from torch.nn import functional as F

import tacit
from tacit_paper import find_experiment, long_horizon, plots, read_text
from tacit_paper import least_squares as ls
from tacit_paper.long_horizon.distances import ModifiedLoss, distances_from_flows

TINY = replace(
    long_horizon.QUICK, steps=6, network_steps=4, network_examples=60, hidden=(8, 4), substeps=2
)


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(run(long_horizon, TINY)))


def test_distances_on_least_squares_are_those_in_closed_form():
    """With H = 2XᵀX/n, descent is a power of H and each flow an exponential of H."""
    eta, steps = 0.03, 20
    X, _, y = ls.draw(noise=0.1, examples=500)
    start = ls.as_params(torch.zeros(10))
    rows = list(distances_from_flows(ls.objective(X, y), start, eta, steps=steps, substeps=10))
    eigenvalues, eigenvectors = torch.linalg.eigh(2 * X.T @ X / len(X))
    minimum = eigenvectors.T @ torch.linalg.lstsq(X, y[:, None]).solution[:, 0]
    for k in (1, 7, steps):
        descent = (1 - eta * eigenvalues) ** k
        plain = (-eta * k * eigenvalues).exp()
        modified = (-eta * k * eigenvalues * (1 + eta / 2 * eigenvalues)).exp()
        row = rows[k - 1]
        assert row["plain"] == pytest.approx(float(((descent - plain) * minimum).norm()), rel=1e-6)
        expected = float(((descent - modified) * minimum).norm())
        assert row["modified"] == pytest.approx(expected, rel=1e-6)
        assert row["moved"] == pytest.approx(float(((1 - descent) * minimum).norm()), rel=1e-9)


def test_distances_have_the_orders_of_theory():
    """Half the step over the same time: half the plain distance, a quarter of the modified one."""
    X, y = random_data(0, 60)
    last_rows = {}
    for eta, steps in ((0.02, 10), (0.01, 20)):
        model = tanh_mlp(0)
        objective = tacit.Objective(model, F.mse_loss, (X, y))
        *_, last_rows[steps] = distances_from_flows(
            objective, objective.params, eta, steps=steps, substeps=4
        )
    assert last_rows[10]["plain"] / last_rows[20]["plain"] == pytest.approx(2, rel=0.05)
    assert last_rows[10]["modified"] / last_rows[20]["modified"] == pytest.approx(4, rel=0.05)


def test_the_modified_gradient_is_that_of_the_modified_loss():
    model, (X, y) = tanh_mlp(1), random_data(1)
    objective, eta = tacit.Objective(model, F.mse_loss, (X, y)), 0.3
    modified = ModifiedLoss(objective, eta).gradient(objective.params)
    column = tacit.regularizers.gradient_norm(objective).gradient(objective.params)["gradient_norm"]
    for name, gradient in objective.gradient().items():
        torch.testing.assert_close(modified[name], gradient + eta / 4 * column[name])


def test_units_do_not_depend_on_each_other(rows):
    units = list(long_horizon.work(TINY, "cpu"))
    assert units == ["least squares, η = 0.01", "least squares, η = 0.03", "tanh", "ReLU"]
    chosen = {"least squares, η = 0.03", "ReLU"}
    subset = list(run(long_horizon, TINY, finished=[unit for unit in units if unit not in chosen]))
    assert subset == [row for row in rows.to_dict("records") if row["unit"] in chosen]
    assert json.loads(json.dumps(subset)) == subset  # plain values
    counts = rows.groupby("unit").size()
    assert counts.to_dict() == dict(zip(units, (6, 6, 4, 4), strict=True))
    assert (rows.plain > 0).all()


def test_claims_rest_on_their_rows():
    stored = pd.read_parquet(ROOT / "results/paper/long-horizon/rows.parquet")
    assert all(claim.measure(stored).agrees for claim in long_horizon.CLAIMS)
    swapped = stored.rename(columns={"plain": "modified", "modified": "plain"})
    assert not any(claim.measure(swapped).agrees for claim in long_horizon.CLAIMS)
    *_, smoothness = long_horizon.CLAIMS
    assert smoothness.measure(stored[stored.unit != "ReLU"]) is None


def test_initial_weights_depend_only_on_the_seed_of_the_config(rows):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = list(run(long_horizon, TINY, finished=list(long_horizon.work(TINY, "cpu"))[:2]))
    assert torch.equal(torch.get_rng_state(), state)
    assert again == [row for row in rows.to_dict("records") if row["unit"] in ("tanh", "ReLU")]


def test_the_figure_is_drawn_from_stored_rows(rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    stored = pd.read_parquet(tmp_path / "rows.parquet")
    figure = long_horizon.plot(stored)
    titles = "".join(axes.get_title(loc="left")[:1] for axes in figure.get_axes())
    assert titles == "ABCD"
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000
    checks = long_horizon.check(stored)
    assert len(checks) == 4
    assert all(math.isfinite(result.value) for result in checks)
    assert all(result.holds for result in checks[:3])  # the theory does not cover ReLU, the last


def test_the_paper_preset_is_the_papers():
    paper = long_horizon.PAPER
    assert (paper.inputs, paper.examples, paper.noise, paper.steps) == (10, 500, 0.1, 50)
    assert paper.etas == (0.01, 0.03)
    assert (paper.network_examples, paper.hidden, paper.network_steps) == (1000, (64, 32), 30)
    experiment = find_experiment("long-horizon")
    json.dumps([asdict(experiment.PAPER), asdict(experiment.QUICK)])
    assert "outside the theory" in read_text(experiment).caption
