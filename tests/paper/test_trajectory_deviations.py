"""The trajectory figure: deviations are noise, and the mean of whole epochs has a penalty."""

import json
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from support.experiments import run
from support.pages import ROOT
from torch.nn import functional as F

import tacit
from tacit_paper import plots, trajectory_deviations
from tacit_paper.trajectory_deviations.config import Network
from tacit_paper.trajectory_deviations.penalties import draw_deviations

SMALL = replace(trajectory_deviations.QUICK, flow_steps=40, grid=5, draws=400, orders=100)


@pytest.fixture(scope="module")
def rows():
    records = list(run(trajectory_deviations, SMALL))
    assert json.loads(json.dumps(records)) == records  # plain values
    return pd.DataFrame(records)


def _losses(x, y, b, w):
    return (torch.tanh(w * x + b) - y).square()


def test_deviations_are_those_of_batches_and_have_mean_zero():
    x = torch.linspace(-1, 1, SMALL.points, dtype=torch.float64)
    data = (x, torch.sin(x))
    points = [{"w": x[3], "b": x[60]}, {"w": x[90], "b": x[10]}]
    deviations = draw_deviations(SMALL, data, points)
    assert deviations.shape == (400, 4)
    # With batches of all examples nothing is left.
    assert draw_deviations(replace(SMALL, batch=SMALL.points), data, points).abs().max() < 1e-15
    # The covariance of a mean of B of n examples, without replacement.
    losses = partial(_losses, *data, points[0]["b"])
    examples = torch.func.jacrev(losses)(points[0]["w"])
    mean = tacit.Objective(Network((0.0, 0.0)), F.mse_loss, data).gradient(points[0])
    assert float(examples.mean()) == pytest.approx(float(mean["w"]))
    variance = examples.var() / SMALL.batch * (1 - SMALL.batch / SMALL.points)
    drawn = draw_deviations(replace(SMALL, draws=8000), data, points)[:, 0]
    assert float(drawn.var()) == pytest.approx(float(variance), rel=0.08)
    assert abs(float(drawn.mean())) < 4 * float(variance / 8000) ** 0.5


def test_whole_epochs_follow_the_two_penalties_of_theory_at_first_order(rows):
    """Strengths go to η/4 each, linearly in η; `rows` has a third of the step of the other."""
    both = "‖∇L‖², variance of ∇L"
    coarse = replace(SMALL, epoch_step=3 * SMALL.epoch_step)
    *_, other = trajectory_deviations.work(coarse, "cpu")["epochs"]()
    table = rows[rows.unit == "epochs"].set_index("candidates").loc[both]
    assert other["candidates"] == both
    assert table.ratio_norm == pytest.approx(1, abs=0.05)
    assert table.ratio_variance == pytest.approx(1, abs=0.15)
    assert table.explained > 0.999
    for column in ("ratio_norm", "ratio_variance"):
        assert abs(other[column] - 1) > 1.8 * abs(table[column] - 1)


def test_single_steps_have_no_penalty(rows):
    redrawn = rows[rows.unit == "redrawn"].set_index("candidates")
    assert (redrawn.together < 0.01).all()
    assert (redrawn.explained <= redrawn.high).all()
    assert (redrawn.low < redrawn["median"]).all()
    ridge = rows[rows.unit == "minibatch"].explained.iloc[0]
    assert redrawn.explained["ridge"] == pytest.approx(ridge)
    (claim,) = trajectory_deviations.CLAIMS
    assert claim.measure(rows).agrees
    for column, unit in (("together", "redrawn"), ("explained", "epochs")):
        changed = rows.copy()
        changed.loc[changed.unit == unit, column] = 0.5
        assert not claim.measure(changed).agrees


def test_stored_rows_agree_with_the_verdict_and_are_drawn(tmp_path):
    stored = pd.read_parquet(ROOT / "results/paper/trajectory-deviations/rows.parquet")
    assert all(result.holds for result in trajectory_deviations.check(stored))
    assert all(claim.measure(stored).agrees for claim in trajectory_deviations.CLAIMS)
    figure = trajectory_deviations.plot(stored)
    texts = {text.get_text() for axes in figure.get_axes() for text in axes.texts}
    assert {"start of both", "end of the flow", "end of SGD"} <= texts
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000
