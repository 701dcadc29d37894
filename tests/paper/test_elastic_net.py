"""The elastic-net figure: the published fit against a naive version, its rows and drawing."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.experiments import run
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit_paper import elastic_net, figure_plots, plots, read_text
from tacit_paper.elastic_net.checks import (
    EFFECTIVE_CELLS,
    UNIDENTIFIED_KINDS,
    median_errors,
    select_effective_cells,
    select_estimate,
)
from tacit_paper.elastic_net.figure import summarise
from tacit_paper.elastic_net.nonsmooth import crossing_share
from tacit_paper.elastic_net.training import Member, Sweep, draw_data_set
from tacit_paper.published_fit import (
    FitSettings,
    GradientProducts,
    fit_as_published,
    gradient_products,
)

TINY = replace(
    elastic_net.QUICK,
    strengths=(0.1, 1.0),
    seeds=2,
    optimizers=("sgd", "adam"),
    width=20,
    examples=300,
    train=256,
    epochs=12,
    fit_epochs=20,
    polished=((1, 1),),
    retrained=((1, 1, 1),),
    nonsmooth=((1, 1),),
)


@pytest.fixture(scope="module")
def rows():
    """Without polishing, whose precision the key numbers of the quick reproduction check."""
    return pd.DataFrame(list(run(elastic_net, TINY, finished=["polished 0 to 1"])))


def naive_published_fit(model, X, y, regularizers, order, settings):
    """The published fit as published: the gradient of every minibatch, torch's Adam, autograd."""
    params = {n: p.detach() for n, p in model.named_parameters()}
    columns = [
        torch.cat([t.flatten() for t in next(iter(r.gradient(params).values())).values()])
        for r in regularizers
    ]
    log_strengths = torch.zeros(len(regularizers), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_strengths], lr=settings.rate)
    lowest, epochs_without_low, epochs = math.inf, 0, 0
    for _ in range(settings.epochs):
        total = 0.0
        for batch in order.split(16):
            loss = F.mse_loss(model(X[batch]), y[batch])
            gradient = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
            )
            pairs = zip(log_strengths.exp(), columns, strict=True)
            penalty = sum(strength * column for strength, column in pairs)
            mismatch = (gradient + penalty).square().mean()
            total += float(mismatch.detach())
            optimizer.zero_grad()
            mismatch.backward()
            optimizer.step()
        epochs += 1
        epochs_without_low = 0 if total < lowest else epochs_without_low + 1
        lowest = min(lowest, total)
        if epochs_without_low >= settings.patience:
            break
    return log_strengths.detach().exp(), epochs


def test_the_published_fit_from_inner_products_is_the_naive_one():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    ensemble = ensembles.initialise(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), [0, 1, 2]
    )
    regularizers = [tacit.smooth_l1(0.1), tacit.l2()]
    settings = FitSettings(rate=0.05, epochs=40, patience=5)
    products = gradient_products(
        ensemble, F.mse_loss, (X, y), regularizers, batch_size=16, shuffles=1
    )
    strengths, epochs, _ = fit_as_published(products, settings)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for m in range(3):
        expected, expected_epochs = naive_published_fit(
            ensemble.module(m), X, y, regularizers, order, settings
        )
        assert strengths[m].tolist() == pytest.approx(expected.tolist(), rel=1e-8)
        assert epochs[m] == expected_epochs


def test_stopping_and_plateaus_are_torchs():
    """One strength on one batch: a noisy loss against torch's scheduler and a plain count."""
    generator = np.random.default_rng(1)
    products = GradientProducts(
        squares=1 + 0.1 * generator.random((5, 1, 1)), inner=0.1 * generator.random((5, 1, 1, 1)),
        gram=np.full((1, 1, 1), 0.01), parameters=3,
    )  # fmt: skip
    published = fit_as_published(
        products, FitSettings(rate=0.1, epochs=300, patience=30, plateau=3)
    )
    log_strength = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_strength], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    generator, lowest, epochs_without_low, epochs = np.random.default_rng(0), math.inf, 0, 0
    while epochs < 300 and epochs_without_low < 30:
        shuffle = int(generator.integers(5, size=1)[0])
        strength = log_strength.exp()
        loss = (
            float(products.squares[shuffle, 0, 0])
            + 2 * strength * float(products.inner[shuffle, 0, 0, 0]) + strength**2 * 0.01
        ).sum() / 3  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        epochs_without_low = 0 if value < lowest else epochs_without_low + 1
        lowest = min(value, lowest)
        epochs += 1
        scheduler.step(value)
    assert published.epochs[0] == epochs
    assert published.losses[0] == pytest.approx(lowest)
    assert published.strengths[0, 0] == pytest.approx(float(log_strength.detach().exp()), rel=1e-9)
    assert optimizer.param_groups[0]["lr"] < 0.05


def test_every_network_has_a_row_per_estimate(rows):
    units = set(elastic_net.work(TINY, "cpu"))
    assert set(rows.unit) == units - {"polished 0 to 1"}
    counts = rows.groupby(["estimate", "optimizer"]).size()
    for estimate in ("last", "drift", "published"):
        for optimizer in ("sgd", "adam"):
            assert counts[estimate, optimizer] == 8
    assert set(rows.estimate) >= {"retrained true", "retrained drift", "retrained last"}
    exact = select_estimate(rows, "last").set_index(["l1", "l2", "seed"])
    for row in select_estimate(rows, "published").itertuples():
        distance = abs(row.l2_hat / exact.loc[(row.l1, row.l2, row.seed), "l2_hat"] - 1)
        assert row.l2_distance == pytest.approx(distance)


def test_a_subset_of_units_gives_the_same_rows(rows):
    finished = [unit for unit in elastic_net.work(TINY, "cpu") if unit != "sgd"]
    subset = pd.DataFrame(list(run(elastic_net, TINY, finished=finished)))
    expected = rows[rows.unit == "sgd"].reset_index(drop=True)[subset.columns]
    times = [column for column in subset.columns if column.endswith("_seconds")]
    pd.testing.assert_frame_equal(
        subset.drop(columns=times), expected.drop(columns=times), check_dtype=False
    )


def test_signs_are_averaged_as_in_a_plain_loop():
    """Subgradient descent on loss + λ₁ Σ|θ| + λ₂ ‖θ‖² by autograd, one network in float32."""
    sweep = Sweep(TINY, [Member(1.0, 0.1, 0)], "cpu", smooth=False)
    run = sweep.train(epochs=[3])
    torch.manual_seed(1000)
    initial = ensembles.initialise(
        lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)), [1000]
    )
    model, order = initial.module(0), ensembles.order_generator(2000)
    X, y = draw_data_set(TINY, 0)
    signs = []
    for _ in range(3):
        signs = []
        for batch in torch.randperm(len(X), generator=order).split(TINY.batch_size):
            params = list(model.parameters())
            theta = torch.cat([p.flatten() for p in params])
            signs.append(theta.detach().sign())
            loss = F.mse_loss(model(X[batch]), y[batch])
            gradients = torch.autograd.grad(loss + theta.abs().sum() + 0.1 * theta @ theta, params)
            with torch.no_grad():
                for p, gradient in zip(params, gradients, strict=True):
                    p -= TINY.rate * gradient
    last = torch.cat([p.detach().flatten() for p in run.last.module(0).parameters()])
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(last, theta, rtol=1e-4, atol=1e-5)
    both = torch.stack(signs).mean(0).abs() < 1
    assert float(crossing_share(run)[0]) == pytest.approx(float(both.double().mean()), abs=0.02)
    assert both.any()


def test_mean_signs_recover_the_penalty_that_signs_at_one_point_do_not(rows):
    estimates = rows[rows.unit == "nonsmooth"].groupby("estimate")
    assert estimates.size().to_dict() == {
        f"nonsmooth {name}": 2 for name in ("drift", "last", "nonzero", "published")
    }
    errors = (estimates.l1_hat.median() - 1).abs()
    assert errors["nonsmooth drift"] < 0.02
    assert errors["nonsmooth last"] > 0.5


def test_the_published_panels_are_means_with_standard_errors(rows):
    chosen = select_estimate(rows, "published")
    cells = chosen[chosen.l2 == 0.1].groupby("l1")
    mean, low, high = summarise(cells, "l1")
    for l1, cell in cells:
        values = cell.l1_hat.to_numpy()
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert mean[l1] == pytest.approx(values.mean())
        assert [low[l1], high[l1]] == pytest.approx([values.mean() - error, values.mean() + error])


def test_retraining_recovers_the_weights(rows):
    retrained = rows[rows.estimate == "retrained true"]
    assert (retrained.distance < 1e-3 * retrained.control_distance).all()


def test_the_figure_is_drawn_from_the_rows(rows, tmp_path):
    for name, plot in figure_plots(elastic_net).items():
        for path in plots.save(plot(rows), tmp_path, name):
            assert path.stat().st_size > 10_000
    assert all(math.isfinite(result.value) for result in elastic_net.check(rows))


def test_the_paper_preset_is_the_papers():
    paper = elastic_net.PAPER
    assert len(paper.strengths) ** 2 * paper.seeds == 360
    assert (paper.train, paper.batch_size, paper.epochs, paper.patience) == (4000, 32, 200, 15)
    X, y = draw_data_set(paper, 0)
    assert X.shape == (4000, 10)
    assert y.shape == (4000, 1)
    assert set(paper.polished) == set(EFFECTIVE_CELLS)


@pytest.fixture(scope="module")
def stored_rows():
    """The stored rows of the paper's size."""
    root = Path(__file__).parents[2]
    return pd.read_parquet(root / "results" / "paper" / "elastic-net" / "rows.parquet")


def test_stored_rows_agree_with_the_docs(stored_rows):
    drift = median_errors(select_estimate(stored_rows, "drift"))
    for (l1, l2), row in drift.iterrows():
        if 0.01 <= l1 <= 1 and l2 <= 1:
            assert row.l1_error <= 0.05
        if l1 <= 1 and l2 in (0.1, 1):
            assert row.l2_error <= 0.02
    polished = median_errors(select_estimate(stored_rows, "polished"))
    assert len(polished) == 6
    assert float(polished[["l1_error", "l2_error"]].max().max()) <= 1e-5
    retrained = stored_rows[stored_rows.estimate == "retrained drift"]
    assert len(retrained) == 7
    assert (retrained.control_distance >= 10 * retrained.distance).all()
    certified = stored_rows[stored_rows.estimate.str.startswith("retrained")]
    assert [(certified.curvature < 0).sum(), len(certified)] == [16, 21]


def test_stored_fits_have_problems_where_they_must(stored_rows):
    last = select_estimate(stored_rows, "last")
    assert len(last) == 360
    too_strong = last[(last.l1 == 10) | ((last.l2 == 10) & (last.l1 >= 0.01))]
    assert (too_strong.problems != "").all()
    for estimate in ("last", "drift"):
        effective = select_effective_cells(select_estimate(stored_rows, estimate))
        assert not effective.problems.str.contains("|".join(UNIDENTIFIED_KINDS)).any()
    # A strength without a Problem can be relied on.
    unflagged = select_estimate(stored_rows, "drift").query("problems == ''")
    errors = pd.concat(
        [unflagged.l1_hat / unflagged.l1 - 1, unflagged.l2_hat / unflagged.l2 - 1], axis=1
    )
    assert len(unflagged) >= 100
    assert errors.abs().max(axis=1).median() < 0.03


def test_newly_trained_networks_are_the_stored_ones(stored_rows):
    """Two of the 360 trained again: in a smaller ensemble rounding may differ slightly."""
    members = [Member(1.0, 1.0, 6), Member(1.0, 1.0, 5)]
    sweep = Sweep(elastic_net.PAPER, members, "cpu")
    _, fits = sweep.fits(sweep.train())
    stored = select_estimate(stored_rows, "drift").set_index(["l1", "l2", "seed"])
    for member, fit in zip(members, fits, strict=True):
        row = stored.loc[(member.l1, member.l2, member.seed)]
        assert fit.strengths["l2"] == pytest.approx(row.l2_hat, rel=0.01)
        assert fit.strengths["smooth_l1"] == pytest.approx(row.l1_hat, rel=0.05)


# What the paper says, beside the stored rows.


def evidence_by_measure(rows):
    return {claim.measure.__name__: claim.measure(rows) for claim in elastic_net.CLAIMS}


def scale_estimate(estimate, column, factor):
    """A change of rows: one estimate is multiplied by a factor."""

    def change(rows):
        chosen = rows.estimate.str.contains(estimate)
        return rows.assign(**{column: rows[column].where(~chosen, rows[column] * factor)})

    return change


def swap_estimates(one, other):
    """A change of rows: two estimates change their names."""
    names = {one: other, other: one}
    return lambda rows: rows.assign(estimate=rows.estimate.replace(names))


CHANGES = {
    "measure_recovery": scale_estimate("polished|drift", "l1_hat", 1.2),
    "measure_intermediate": scale_estimate("drift", "l2_hat", 1.2),
    "measure_small": swap_estimates("last", "drift"),
    "measure_large": scale_estimate("last", "condition", 0),
    "measure_nonsmooth": swap_estimates("nonsmooth published", "nonsmooth drift"),
    "measure_curvature": lambda rows: rows.assign(verdict="not a minimum"),
    "measure_retraining": swap_estimates("retrained last", "retrained drift"),
}
"""By claim, a change of rows that refutes its verdict."""


def test_stored_rows_agree_with_all_verdicts(stored_rows):
    assert {claim.measure.__name__ for claim in elastic_net.CLAIMS} == set(CHANGES)
    for name, evidence in evidence_by_measure(stored_rows).items():
        assert evidence is not None, name
        assert evidence.agrees is True, evidence.text
        assert "nan" not in evidence.text


@pytest.mark.parametrize("name", CHANGES)
def test_changed_rows_disagree_with_the_verdict(name, stored_rows):
    assert not evidence_by_measure(CHANGES[name](stored_rows))[name].agrees


def test_small_presets_decide_only_what_their_rows_have(rows):
    texts = evidence_by_measure(rows)
    assert texts.pop("measure_nonsmooth") is not None
    assert set(texts.values()) == {None}


def test_the_text_has_the_numbers_of_the_rows(stored_rows):
    """How much the error falls, as the details of the figure say."""
    last, drift = (median_errors(select_estimate(stored_rows, e)) for e in ("last", "drift"))
    details = " ".join(read_text(elastic_net).details)
    for strength, symbol in (("l1_error", "λ₁"), ("l2_error", "λ₂")):
        ratios = last[strength] / drift[strength]
        assert (ratios > 10).sum() == 35
        assert f"{ratios.median():.0f}-fold for {symbol}" in details
