"""The averaging figure: its law by direction, its identity, its rows and drawing."""

import json
import math
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from support.experiments import run
from support.pages import ROOT
from torch.func import grad
from torch.nn import functional as F

from tacit_paper import averaging, plots
from tacit_paper import least_squares as ls
from tacit_paper.averaging.least_squares import make_problem
from tacit_paper.averaging.networks import average_sgd
from tacit_paper.averaging.networks import make_problem as make_network

TINY = replace(
    averaging.QUICK, steps=(20,), seeds=1, width=8, train=128, warm_up=4, epochs=(1, 2),
    retrained=2, iterations=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    records = list(run(averaging, TINY))
    assert json.loads(json.dumps(records)) == records  # plain values
    return pd.DataFrame(records)


def test_estimates_by_direction_are_those_of_descent_step_by_step():
    """Descent by autograd, averaged by hand: −∇L = 2λ_j (θ_j − θ₀_j) at the mean of iterates."""
    X, y, start = make_problem(TINY)
    theta, total = start.clone().requires_grad_(), torch.zeros_like(start)
    for _ in range(20):
        (gradient,) = torch.autograd.grad(F.mse_loss(X @ theta, y), theta)
        theta = (theta - TINY.step * gradient).detach().requires_grad_()
        total += theta.detach()
    mean = (total / 20).requires_grad_()
    (gradient,) = torch.autograd.grad(F.mse_loss(X @ mean, y), mean)
    expected = -gradient / (2 * (mean.detach() - start))
    table = pd.DataFrame(list(averaging.work(TINY, "cpu")["least squares"]()))
    for kind in ("mean", "last"):
        directions = table[table.kind == kind]
        assert directions.strength.to_numpy() == pytest.approx(directions.theory, rel=1e-9)
    means = table[table.kind == "mean"]
    assert means.strength.to_numpy() == pytest.approx(expected.numpy(), rel=1e-9)
    scaled = means.strength * 2 * means.time
    assert scaled.between(1 - TINY.step, 2).all()
    many = replace(TINY, steps=(1000,))
    longest = pd.DataFrame(list(averaging.work(many, "cpu")["least squares"]()))
    last = longest[longest.kind == "last"]
    assert (last.strength * 2 * last.time).min() < 1e-6  # early stopping: no common strength


def test_the_gradient_at_the_mean_is_the_distance_to_the_start():
    """On a quadratic loss −∇L at the mean of θ_0 … θ_{t−1} is (θ_t − θ_0)/(ηt)."""
    X, y, start = make_problem(TINY)
    objective, params = ls.objective(X, y), ls.as_params(start)
    iterates = [params]
    for _ in range(30):
        gradient = objective.gradient(iterates[-1])["weight"]
        iterates.append({"weight": iterates[-1]["weight"] - 0.2 * gradient})
    mean = torch.stack([point["weight"] for point in iterates[:-1]]).mean(0)
    gradient = objective.gradient({"weight": mean})["weight"]
    expected = (iterates[-1]["weight"] - params["weight"]) / (0.2 * 30)
    assert (gradient + expected).norm() <= 1e-12 * expected.norm()


def test_averages_are_means_of_a_plain_loop_after_the_warm_up():
    (first, second), problem = average_sgd(TINY, make_network(TINY, 3), 3), make_network(TINY, 3)
    theta = {n: p.detach().clone() for n, p in problem.model.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    iterates = []
    for _ in range(TINY.warm_up + 2):
        for batch in torch.randperm(128, generator=generator).split(32):
            X, y = problem.X[batch], problem.y[batch]
            gradient = grad(lambda w, X=X, y=y: F.cross_entropy(problem.outputs(w, X), y))(theta)
            theta = {n: p - TINY.network_step * gradient[n] for n, p in theta.items()}
            iterates.append(theta)
    since = iterates[4 * TINY.warm_up :]
    for averages, count in ((first, 4), (second, 8)):
        for name, tensor in averages.mean.items():
            expected = torch.stack([point[name] for point in since[:count]]).mean(0)
            torch.testing.assert_close(tensor, expected)
            torch.testing.assert_close(averages.last[name], since[count - 1][name])
            start = iterates[4 * TINY.warm_up - 1][name]
            torch.testing.assert_close(averages.start[name], start)


def test_the_stored_networks_are_pulled_to_the_start():
    stored = pd.read_parquet(ROOT / "results/paper/averaging/rows.parquet")
    assert all(result.holds for result in averaging.check(stored))


def test_networks_are_pulled_to_the_start_of_averaging(rows):
    """Seeds and sizes that were not used to choose the figure's settings."""
    mean = rows[rows.kind == "mean"]
    networks = mean[mean.unit != "least squares"]
    assert (networks.explained_start > 0.85).all()
    assert (networks.explained_ridge < 0.7).all()
    assert (networks.strength_start * 2 * networks.time).between(1, 2.3).all()
    assert (networks.explained_layers >= networks.explained_start - 1e-9).all()
    retrained = rows[rows.kind == "retrained"].set_index("penalty")
    assert list(retrained.index) == ["pull to the start", "ridge", "none"]
    assert retrained.distance["pull to the start"] < 0.4 < retrained.distance["ridge"]
    assert retrained.divergence["pull to the start"] < retrained.divergence["ridge"]


def test_rows_are_plain_and_the_figure_is_drawn_from_them(rows, tmp_path):
    units = list(averaging.work(TINY, "cpu"))
    assert units == ["least squares", "network 0"]
    assert set(rows.unit) == set(units)
    rows.to_parquet(tmp_path / "rows.parquet")
    stored = pd.read_parquet(tmp_path / "rows.parquet")
    figure = averaging.plot(stored)
    assert [axes.get_title(loc="left")[:1] for axes in figure.get_axes()] == list("ABCD")
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000
    assert all(math.isfinite(result.value) for result in averaging.check(stored))
    json.dumps([asdict(averaging.PAPER), asdict(averaging.QUICK)])
