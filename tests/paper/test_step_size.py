"""The step-size figure: its second column against dense derivatives, its orders, its rows."""

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from support.experiments import run
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.pages import ROOT
from torch.func import grad, jacrev
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit_paper import data, find_experiment, plots, read_text, step_size, store
from tacit_paper.step_size.checks import select_least_squares, select_networks, select_trained
from tacit_paper.step_size.claims import count_rises
from tacit_paper.step_size.estimates import estimate_from_steps
from tacit_paper.step_size.figure import describe_missing
from tacit_paper.step_size.networks import build_network, load_data, train_networks
from tacit_paper.step_size.next_term import change_along_gradient, flow_change

TINY = replace(
    step_size.QUICK,
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
    return pd.DataFrame(list(run(step_size, TINY)))


def class_data(seed=0, count=40):
    """Inputs, and labels that depend on them."""
    X, Y = random_data(seed, count, inputs=3, outputs=3)
    return X, Y.argmax(1)


def flat_loss(model, loss, examples):
    """The loss as a function of all parameters in one vector, and that vector."""
    params = params_of(model)
    sizes = [p.numel() for p in params.values()]

    def value(vector):
        parts = zip(params.items(), vector.split(sizes), strict=True)
        return loss_of(model, loss, examples)({n: v.view_as(p) for (n, p), v in parts})

    return value, reference.flat(params)


@pytest.mark.parametrize("name", ["cross_entropy", "mse"])
def test_the_change_of_hg_along_g_is_the_dense_one(name):
    model = tanh_mlp(0, (3, 4, 4, 3))
    examples = class_data() if name == "cross_entropy" else random_data(1, 40, 3, 3)
    loss = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}[name]
    change = change_along_gradient(model, loss, examples, params_of(model))
    value, theta = flat_loss(model, loss, examples)
    gradient = grad(value)
    # The whole Jacobian of θ ↦ H(θ)g(θ), times g.
    dense = jacrev(lambda t: jacrev(gradient)(t) @ gradient(t))(theta) @ gradient(theta)
    assert (reference.flat(change) - dense).norm() <= 1e-11 * dense.norm()
    # Third derivatives contribute: it is not only H·Hg.
    H = jacrev(gradient)(theta)
    assert (dense - H @ H @ gradient(theta)).norm() > 0.05 * dense.norm()


def test_on_a_quadratic_the_change_of_hg_along_g_is_hhg():
    X, y = random_data(2)
    model = torch.nn.Linear(5, 1, bias=False).double()
    params = params_of(model)
    change = change_along_gradient(model, F.mse_loss, (X, y), params)["weight"][0]
    H = 2 * X.T @ X / len(X)
    g = 2 * X.T @ (X @ params["weight"][0] - y[:, 0]) / len(X)
    assert (change - H @ H @ g).norm() <= 1e-12 * change.norm()


def test_three_terms_of_the_flow_leave_a_remainder_of_order_three():
    model, examples = tanh_mlp(3, (3, 5, 3)), class_data(3)
    objective = tacit.Objective(model, F.cross_entropy, examples)
    params = params_of(model)
    g = objective.gradient(params)
    curvature = reference.flat(objective.hvp(g, params))
    change = reference.flat(change_along_gradient(model, F.cross_entropy, examples, params))
    etas, remainders = (0.05, 0.1, 0.2), []
    for eta in etas:
        flow = reference.flat(tacit.rk4(20)(objective, params, eta))
        target = flow / eta + reference.flat(g)
        remainders.append(float((target - eta / 2 * curvature + eta**2 / 6 * change).norm()))
    order = np.polyfit(np.log(etas), np.log(remainders), 1)[0]
    assert order == pytest.approx(3, abs=0.05)


def test_strengths_converge_to_theory_at_their_orders():
    config = replace(TINY, steps=3, substeps=10)
    etas = (0.02, 0.04, 0.08)
    table = pd.DataFrame(
        estimate_from_steps(config, tanh_mlp(4, (3, 5, 3)), F.cross_entropy, class_data(4), eta)
        for eta in etas
    )
    for column, expected in (("ratio_first", 1), ("ratio_second", 2), ("next_over_theory", 1)):
        errors = np.log(np.abs(table[column] - 1))
        assert np.polyfit(np.log(etas), errors, 1)[0] == pytest.approx(expected, abs=0.1)
    assert (table.ratio_second - 1).abs().max() < 0.01
    assert (table.explained_second > table.explained_first).all()
    assert (table.problems_second == "").all()
    g = tacit.Objective(tanh_mlp(4, (3, 5, 3)), F.cross_entropy, class_data(4)).gradient()
    mean_square = float(reference.flat(g).square().mean())
    assert table.r_ig.to_numpy() == pytest.approx(mean_square, rel=1e-12)


def test_the_second_column_has_no_value_to_train_with():
    candidate = flow_change(tanh_mlp(0, (3, 4, 3)), F.cross_entropy, class_data())
    with pytest.raises(tacit.InputError, match="candidate"):
        candidate.value(params_of(tanh_mlp(0, (3, 4, 3))))


def train_one_network(config, split, width, eta):
    """One network by torch's SGD: its checkpoint, and the checkpoint's epoch and accuracy."""
    torch.manual_seed(config.seed)
    model = build_network((64, *[width] * config.hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=eta)
    generator = torch.Generator().manual_seed(config.seed)
    (X, y), (validation_X, validation_y) = split.train, split.validation
    best_validation, checkpoint, checkpoint_epoch = 0.0, None, 0
    for epoch in range(1, config.epochs + 1):
        for batch in torch.randperm(len(X), generator=generator).split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(X[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((model(X).argmax(1) == y).float().mean())
            correct = model(validation_X).argmax(1) == validation_y
            validation = float(correct.float().mean())
        if accuracy >= config.enough and validation > best_validation:
            best_validation, checkpoint, checkpoint_epoch = validation, params_of(model), epoch
    return checkpoint, checkpoint_epoch, best_validation


def test_each_network_is_the_one_that_a_plain_loop_trains():
    split = load_data(TINY, "cpu")
    networks = train_networks(TINY, split, 16)
    for m in (1, 2):
        checkpoint, epoch, validation = train_one_network(TINY, split, 16, TINY.etas[m])
        assert int(networks.epoch[m]) == epoch > 0
        assert float(networks.validation[m]) == pytest.approx(validation)
        for name, tensor in networks.ensemble.member(m).items():
            torch.testing.assert_close(tensor, checkpoint[name], rtol=1e-4, atol=1e-5)


def test_networks_that_fail_are_named_with_the_reason(rows):
    networks = select_networks(rows)
    assert len(networks) == 8
    failed = networks[~networks.trained.astype(bool)]
    assert set(failed.eta) == {1e-3, 1e30}
    slow, diverged = failed[failed.eta == 1e-3], failed[failed.eta == 1e30]
    assert slow.reason.str.contains("on the training set in 8 epochs").all()
    assert diverged.reason.str.startswith("diverged").all()
    assert failed.ratio_first.isna().all()
    assert (failed.train_accuracy < TINY.enough).all()
    description = describe_missing(rows)
    assert description.endswith("η = 0.001: all widths;  η = 1e+30: all widths (diverged).")
    assert "4 of 8" in description
    without_failures = rows[rows.reason.isna() | (rows.reason == "")]
    assert describe_missing(without_failures).startswith("All networks")


def test_networks_that_trained_have_an_estimate(rows):
    trained = select_trained(rows)
    assert len(trained) == 4
    assert set(trained.parameters) == {64 * 16 + 170, 64 * 24 + 250}
    assert trained.lambda_hat.to_numpy() == pytest.approx(
        (trained.ratio_first * trained.eta * trained.parameters / 4).to_numpy()
    )
    assert (trained.train_accuracy >= TINY.enough).all()
    assert trained.ratio_first.between(0.5, 1.02).all()
    assert ((trained.ratio_second - 1).abs() < (trained.ratio_first - 1).abs()).all()


def test_claims_rest_on_their_rows():
    stored = pd.read_parquet(ROOT / "results/paper/step-size/rows.parquet")
    recovery, relationships, exclusions = step_size.CLAIMS
    assert all(claim.measure(stored).agrees for claim in step_size.CLAIMS)
    for column, factor in (("ratio_first", 1.5), ("ratio_second", 1.03)):
        assert not recovery.measure(stored.assign(**{column: factor * stored[column]})).agrees
    for column in ("r_ig", "test_accuracy"):
        assert not relationships.measure(stored.assign(**{column: -stored[column]})).agrees
    rising = stored.assign(test_accuracy=stored.lambda_hat.rank())  # then λ̂ decides alone
    assert not relationships.measure(rising).agrees
    few = stored.assign(trained=stored.trained.fillna(False).astype(bool) & (stored.eta > 0.04))
    assert not exclusions.measure(few).agrees


def test_pairs_of_one_width_are_counted():
    networks = pd.DataFrame(
        {
            "width": [1, 1, 1, 2, 2],
            "lambda_hat": [3.0, 1.0, 2.0, 1.0, 2.0],
            "test_accuracy": [0.5, 0.6, 0.7, 0.8, 0.9],
        }
    )
    assert count_rises(networks) == (2, 4)  # 1→2 of the first width, and the second width


def test_units_do_not_depend_on_each_other(rows):
    units = list(step_size.work(TINY, "cpu"))
    assert units == ["least squares", "width 16", "width 24"]
    assert set(rows.unit) == set(units)
    again = list(run(step_size, TINY, finished=["least squares", "width 16"]))
    json.dumps(again)  # plain values
    subset = pd.DataFrame(again)
    expected = rows[rows.unit == "width 24"].reset_index(drop=True)[subset.columns]
    times = [column for column in subset.columns if column.endswith("_seconds")]
    pd.testing.assert_frame_equal(
        subset.drop(columns=times), expected.drop(columns=times), check_dtype=False
    )
    assert list(run(step_size, TINY, finished=units)) == []


def test_the_figure_is_drawn_from_stored_rows(rows, tmp_path):
    """Rows go through files as in a real run: one file per unit, each with different columns."""
    work = {}
    for row in rows.to_dict("records"):
        record = {name: value for name, value in row.items() if value == value and name != "unit"}
        work.setdefault(row["unit"], []).append(record)
    experiment = SimpleNamespace(
        QUICK=TINY, work=lambda *_: {unit: lambda r=records: r for unit, records in work.items()}
    )
    stored = store.run_experiment("step-size", experiment, "quick", tmp_path).rows
    figure = step_size.plot(stored)
    titles = [axes.get_title(loc="left")[:1] for axes in figure.get_axes()]
    assert titles == list("ABCD")
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000
    checks = step_size.check(stored)
    assert all(math.isfinite(result.value) for result in checks if "η ≤" not in result.label)
    orders = [result for result in checks if result.label.startswith("least squares")]
    assert len(orders) == 2
    assert all(result.holds for result in orders)
    assert len(select_least_squares(stored)) == 3


def test_mnist_is_split_as_published(monkeypatch):
    generator = torch.Generator().manual_seed(9)

    def random_images(count):
        return torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)

    fake = data.Mnist(random_images(50), torch.arange(50), random_images(30), torch.arange(30))
    monkeypatch.setattr(data, "mnist", lambda: fake)
    split = load_data(replace(step_size.PAPER, train=20, validation=5, test=10), "cpu")
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(split.train[1], order[:20])
    assert torch.equal(split.validation[1], order[20:25])
    test_order = torch.randperm(30, generator=torch.Generator().manual_seed(1))[:10]
    assert torch.equal(split.test[1], test_order)
    pixels = fake.test_images[test_order].reshape(10, 784).float() / 255
    torch.testing.assert_close(split.test[0], (pixels - 0.1307) / 0.3081)


def test_the_paper_preset_is_the_papers():
    paper = step_size.PAPER
    assert len(paper.widths) * len(paper.etas) == 42
    assert (paper.train, paper.validation, paper.test) == (10_000, 1_000, 5_000)
    assert (paper.epochs, paper.batch_size, paper.hidden) == (50, 128, 5)
    assert (paper.probe, paper.steps, paper.substeps) == (2048, 5, 10)
    model = build_network((784, *[50] * paper.hidden, 10))
    assert sum(p.numel() for p in model.parameters()) == 49_710
    assert [n for n, _ in model.named_parameters() if "bias" in n] == ["10.bias"]
    experiment = find_experiment("step-size")
    json.dumps([asdict(experiment.PAPER), asdict(experiment.QUICK)])
    assert "least squares" in read_text(experiment).caption
