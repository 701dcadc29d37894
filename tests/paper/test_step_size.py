"""The step-size experiment: its second column against dense derivatives, its orders, its rows."""

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from support.problems import loss_of, params_of, random_data, tanh_mlp
from torch.func import grad, jacrev
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit_paper import data, load, plots, store
from tacit_paper import step_size as experiment
from tacit_paper import step_size_networks as networks
from tacit_paper.step_size_check import cells, least_squares, trained
from tacit_paper.step_size_plot import missing

TINY = replace(
    experiment.QUICK,
    train=300,
    validation=100,
    test=100,
    widths=(16, 24),
    hidden=1,
    etas=(1e-3, 5e-2, 1e-1, 1e30),
    epochs=8,
    probe=100,
    steps=2,
    substeps=4,
    plain_etas=(1e-3, 1e-2, 1e-1),
)


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(experiment.run(TINY)))


def classes(seed=0, count=40):
    """Inputs, and labels that depend on them."""
    X, Y = random_data(seed, count, inputs=3, outputs=3)
    return X, Y.argmax(1)


def flat_loss(model, loss, examples):
    """The loss of all parameters as one vector, and that vector."""
    params = params_of(model)
    sizes = [p.numel() for p in params.values()]

    def value(vector):
        parts = zip(params.items(), vector.split(sizes), strict=True)
        return loss_of(model, loss, examples)({n: v.view_as(p) for (n, p), v in parts})

    return value, reference.flat(params)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_the_change_of_hg_along_g_is_the_dense_one(loss):
    model = tanh_mlp(0, (3, 4, 4, 3))
    examples = classes() if loss == "cross_entropy" else random_data(1, 40, 3, 3)
    function = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}[loss]
    found = experiment.change_along_gradient(model, function, examples, params_of(model))
    value, theta = flat_loss(model, function, examples)
    slope = grad(value)
    # The whole Jacobian of θ ↦ H(θ)g(θ), times g.
    dense = jacrev(lambda t: jacrev(slope)(t) @ slope(t))(theta) @ slope(theta)
    assert (reference.flat(found) - dense).norm() <= 1e-11 * dense.norm()
    # It is not H·Hg alone: third derivatives take part.
    H = jacrev(slope)(theta)
    assert (dense - H @ H @ slope(theta)).norm() > 0.05 * dense.norm()


def test_on_a_quadratic_it_is_h_h_g():
    X, y = random_data(2)
    model = torch.nn.Linear(5, 1, bias=False).double()
    params = params_of(model)
    found = experiment.change_along_gradient(model, F.mse_loss, (X, y), params)["weight"][0]
    H = 2 * X.T @ X / len(X)
    g = 2 * X.T @ (X @ params["weight"][0] - y[:, 0]) / len(X)
    assert (found - H @ H @ g).norm() <= 1e-12 * found.norm()


def test_the_target_is_its_taylor_series():
    """What three terms of the flow leave is of order η³."""
    model, examples = tanh_mlp(3, (3, 5, 3)), classes(3)
    objective = tacit.Objective(model, F.cross_entropy, examples)
    params = params_of(model)
    g = objective.gradient(params)
    force = reference.flat(objective.hvp(g, params))
    change = reference.flat(
        experiment.change_along_gradient(model, F.cross_entropy, examples, params)
    )
    etas, left = (0.05, 0.1, 0.2), []
    for eta in etas:
        flow = reference.flat(tacit.rk4(20)(objective, params, eta))
        target = flow / eta + reference.flat(g)
        left.append(float((target - eta / 2 * force + eta**2 / 6 * change).norm()))
    order = np.polyfit(np.log(etas), np.log(left), 1)[0]
    assert order == pytest.approx(3, abs=0.05)


def test_strengths_converge_to_theory_at_their_orders():
    config = replace(TINY, steps=3, substeps=10)
    etas, found = (0.02, 0.04, 0.08), []
    for eta in etas:
        found.append(
            experiment.probe(config, tanh_mlp(4, (3, 5, 3)), F.cross_entropy, classes(4), eta)
        )
    table = pd.DataFrame(found)
    for column, expected in (("ratio_first", 1), ("ratio_second", 2), ("next_over_theory", 1)):
        off = np.log(np.abs(table[column] - 1))
        assert np.polyfit(np.log(etas), off, 1)[0] == pytest.approx(expected, abs=0.1)
    assert (table.ratio_second - 1).abs().max() < 0.01
    assert (table.explained_second > table.explained_first).all()
    assert (table.problems_second == "").all()
    g = tacit.Objective(tanh_mlp(4, (3, 5, 3)), F.cross_entropy, classes(4)).gradient()
    mean_square = float(reference.flat(g).square().mean())
    assert table.r_ig.to_numpy() == pytest.approx(mean_square, rel=1e-12)


def test_the_second_column_is_no_penalty():
    family = experiment.along_flow(tanh_mlp(0, (3, 4, 3)), F.cross_entropy, classes())
    with pytest.raises(tacit.InputError, match="gradient of no penalty"):
        family.value(params_of(tanh_mlp(0, (3, 4, 3))))


def plain_training(config, split, width, eta):
    """One network by torch's SGD alone: its checkpoint and the checkpoint's epoch."""
    torch.manual_seed(config.seed)
    model = networks.network((64, *[width] * config.hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=eta)
    order = torch.Generator().manual_seed(config.seed)
    (X, y), (inputs, labels) = split.train, split.validation
    best, chosen, when = 0.0, None, 0
    for epoch in range(1, config.epochs + 1):
        for batch in torch.randperm(len(X), generator=order).split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(X[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            fitted = float((model(X).argmax(1) == y).float().mean())
            held_out = float((model(inputs).argmax(1) == labels).float().mean())
        if fitted >= config.enough and held_out > best:
            best, chosen, when = held_out, params_of(model), epoch
    return chosen, when, best


def test_each_network_is_the_one_that_a_plain_loop_trains():
    split = experiment._load(TINY, "cpu")
    found = networks.train(TINY, split, 16)
    for m in (1, 2):
        chosen, when, best = plain_training(TINY, split, 16, TINY.etas[m])
        assert int(found.epoch[m]) == when > 0
        assert float(found.validation[m]) == pytest.approx(best)
        for name, tensor in found.ensemble.member(m).items():
            torch.testing.assert_close(tensor, chosen[name], rtol=1e-4, atol=1e-5)


def test_networks_that_fail_are_named_with_the_reason(rows):
    every = cells(rows)
    assert len(every) == 8
    failed = every[~every.trained.astype(bool)]
    assert set(failed.eta) == {1e-3, 1e30}
    slow, wild = failed[failed.eta == 1e-3], failed[failed.eta == 1e30]
    assert slow.reason.str.contains("on the training set in 8 epochs").all()
    assert wild.reason.str.startswith("diverged").all()
    assert failed.ratio_first.isna().all()
    assert (failed.train_accuracy < TINY.enough).all()
    assert missing(rows).endswith("η = 0.001: all widths;  η = 1e+30: all widths (diverged).")
    assert "4 of 8" in missing(rows)
    assert missing(rows[rows.reason.isna() | (rows.reason == "")]).startswith("All networks")


def test_rows_of_networks_that_trained(rows):
    found = trained(rows)
    assert len(found) == 4
    assert set(found.parameters) == {64 * 16 + 170, 64 * 24 + 250}
    assert found.lambda_hat.to_numpy() == pytest.approx(
        (found.ratio_first * found.eta * found.parameters / 4).to_numpy()
    )
    assert (found.train_accuracy >= TINY.enough).all()
    assert found.ratio_first.between(0.5, 1.02).all()
    assert ((found.ratio_second - 1).abs() < (found.ratio_first - 1).abs()).all()


def test_units_do_not_depend_on_each_other(rows):
    assert experiment.units(TINY) == ["least squares", "width 16", "width 24"]
    assert set(rows.unit) == set(experiment.units(TINY))
    again = list(experiment.run(TINY, finished=["least squares", "width 16"]))
    json.dumps(again)  # plain values
    part = pd.DataFrame(again)
    whole = rows[rows.unit == "width 24"].reset_index(drop=True)[part.columns]
    measured = [c for c in part.columns if c.endswith("_seconds")]
    pd.testing.assert_frame_equal(
        part.drop(columns=measured), whole.drop(columns=measured), check_dtype=False
    )
    assert list(experiment.run(TINY, finished=experiment.units(TINY))) == []


def test_the_figure_comes_from_stored_rows_alone(rows, tmp_path):
    """Rows go through files as in a real run: a part a unit, each with columns of its own."""
    own = [{k: v for k, v in row.items() if v == v} for row in rows.to_dict("records")]
    module = SimpleNamespace(QUICK=TINY, units=experiment.units, run=lambda *_, **__: iter(own))
    stored = store.execute("step-size", module, "quick", tmp_path).rows
    figure = experiment.plot(stored)
    titles = [axis.get_title(loc="left")[:1] for axis in figure.get_axes()]
    assert titles == list("ABCD")
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000
    found = experiment.check(stored)
    assert all(math.isfinite(each.value) for each in found if "η ≤" not in each.label)
    orders = [each for each in found if each.label.startswith("least squares")]
    assert len(orders) == 2
    assert all(each.holds for each in orders)
    assert len(least_squares(stored)) == 3


def test_mnist_is_split_as_published(monkeypatch):
    generator = torch.Generator().manual_seed(9)

    def images(count):
        return torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)

    fake = data.Mnist(images(50), torch.arange(50), images(30), torch.arange(30))
    monkeypatch.setattr(data, "mnist", lambda: fake)
    config = replace(experiment.PAPER, train=20, validation=5, test=10)
    split = experiment._load(config, "cpu")
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(split.train[1], order[:20])
    assert torch.equal(split.validation[1], order[20:25])
    chosen = torch.randperm(30, generator=torch.Generator().manual_seed(1))[:10]
    assert torch.equal(split.test[1], chosen)
    pixels = fake.test_images[chosen].reshape(10, 784).float() / 255
    torch.testing.assert_close(split.test[0], (pixels - 0.1307) / 0.3081)


def test_the_paper_preset_is_the_papers():
    paper = experiment.PAPER
    assert len(paper.widths) * len(paper.etas) == 42
    assert (paper.train, paper.validation, paper.test) == (10_000, 1_000, 5_000)
    assert (paper.epochs, paper.batch_size, paper.hidden) == (50, 128, 5)
    assert (paper.probe, paper.steps, paper.substeps) == (2048, 5, 10)
    model = networks.network((784, *[50] * paper.hidden, 10))
    assert sum(p.numel() for p in model.parameters()) == 49_710
    assert [n for n, _ in model.named_parameters() if "bias" in n] == ["10.bias"]
    module = load("step-size")
    json.dumps([asdict(module.PAPER), asdict(module.QUICK)])
    assert "least squares" in module.CAPTION
