"""Dropout by moments: columns and penalties against single models, its rows and drawing."""

import json
import math
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from support.experiments import run
from support.pages import ROOT
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit_paper import dropout_moments, plots, store
from tacit_paper.dropout.training import Images, build_network
from tacit_paper.dropout_moments.columns import moments_column, moments_penalty
from tacit_paper.dropout_moments.config import EveryLayer, Networks, Retraining
from tacit_paper.dropout_moments.figure import ARMS
from tacit_paper.dropout_moments.retraining import _compare

QUICK = dropout_moments.QUICK
TINY = replace(
    QUICK,
    training=replace(
        QUICK.training, seeds=(123, 42), train=300, epochs=6, milestones=(4,), noise=0.4,
        fit_epochs=10,
    ),
    networks=(Networks(3, 8, (0.1, 0.3), seeds=2),),
    every_layer=EveryLayer(networks=(Networks(3, 8, (0.3,), seeds=2),), epochs=3),
    examples=200,
    one_layer=Networks(1, 8, (0.0, 0.5), seeds=2),
    retraining=Retraining(Networks(3, 8, (0.1, 0.3), seeds=2), train=250, batch_size=64),
)  # fmt: skip


def test_dropout_by_moments_is_that_of_each_member_at_its_rate():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (30,), generator=generator)
    ensemble = ensembles.initialise(
        lambda: build_network(5, 3, 12, dropout_layers=2).double(), range(3)
    )
    rates, data = [0.1, 0.3, 0.5], (inputs, labels)
    (column,) = moments_column(ensemble, data, rates).values()
    penalty = moments_penalty(ensemble, torch.tensor(rates, dtype=torch.float64), 30)
    chosen = torch.tensor([2, 0])  # members that are still training
    params = {n: p[chosen].requires_grad_() for n, p in ensemble.params.items()}
    values = penalty(params, inputs.expand(2, 30, 5), labels.expand(2, 30), chosen)
    gradients = torch.autograd.grad(values.sum(), list(params.values()))
    for position, m in enumerate(chosen.tolist()):
        model = ensemble.module(m)
        for layer in (model[2], model[5]):
            layer.p = rates[m]
        objective = tacit.Objective(model, F.cross_entropy, data)
        regularizer = tacit.regularizers.dropout_moments(objective)
        expected = regularizer.gradient(ensemble.member(m))["dropout_moments"]
        assert float(values[position].detach()) == pytest.approx(
            float(regularizer.value(ensemble.member(m))), rel=1e-9
        )
        for (name, batched), gradient in zip(column.items(), gradients, strict=True):
            assert torch.allclose(batched[m], expected[name], rtol=0, atol=1e-12)
            assert torch.allclose(gradient[position], expected[name], rtol=1e-8, atol=1e-10)


def test_penalties_are_computed_on_the_first_examples_of_a_batch():
    ensemble = ensembles.initialise(
        lambda: build_network(5, 3, 6, dropout_layers=2).double(), range(2)
    )
    inputs, labels = torch.randn(2, 20, 5).double(), torch.randint(0, 10, (2, 20))
    rates, members = torch.tensor([0.2, 0.4]).double(), torch.arange(2)
    part = moments_penalty(ensemble, rates, 8)(ensemble.params, inputs, labels, members)
    whole = moments_penalty(ensemble, rates, 20)
    expected = whole(ensemble.params, inputs[:, :8], labels[:, :8], members)
    assert torch.allclose(part, expected)
    # A network that has diverged does not stop the others.
    diverged = {
        n: p.clone().index_fill_(0, members[:1], math.nan) for n, p in ensemble.params.items()
    }
    values = moments_penalty(ensemble, rates, 8)(diverged, inputs, labels, members)
    assert torch.allclose(values[1], part[1])


def test_networks_are_compared_by_the_divergence_of_their_predictions():
    """Networks that ignore the inputs and predict fixed probabilities."""
    probabilities = torch.tensor([[0.5, 0.5], [0.8, 0.2]], dtype=torch.float64)

    def networks(rows):
        model = nn.Sequential(nn.Linear(1, 2)).double()
        ensemble = ensembles.from_models([model] * 2)
        weight = torch.zeros_like(ensemble.params["0.weight"])
        return ensemble.with_params({"0.weight": weight, "0.bias": rows.log()})

    examples = (torch.randn(6, 1).double(), torch.tensor([0, 0, 0, 0, 0, 1]))
    images = Images(examples, examples, examples)
    same, other = _compare(networks(probabilities), networks(probabilities[[0, 0]]), images)
    assert same["divergence"] == pytest.approx(0, abs=1e-12)
    # KL(dropout ‖ retrained), not the reverse.
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert other["divergence"] == pytest.approx(expected)
    assert other["prediction_distance"] == pytest.approx(math.sqrt(2 * 0.3**2))
    assert other["test_accuracy"] == pytest.approx(5 / 6)


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(run(dropout_moments, TINY)))


def test_rows_of_networks_costs_and_retraining(rows):
    assert set(rows.unit) == set(dropout_moments.work(TINY, "cpu"))
    counts = rows.kind.value_counts()
    assert counts["paper"] == 4
    assert counts["every layer"] == 2
    effects = rows[rows.kind.isin(["paper", "every layer"])]
    for name in ("explicit_dropout", "dropout_moments", "joint", "joint_all"):
        assert effects[f"{name}_explained"].notna().all()
    assert (effects.noise <= 0.4).all()
    costs = rows[rows.kind.str.endswith(", cost")]
    assert len(costs) == 3
    assert (costs.dropout_moments_seconds > 0).all()
    retrained = rows[rows.kind == "retrained"]
    assert retrained.groupby("penalty").size().to_dict() == dict.fromkeys(ARMS, 4)
    assert (retrained.divergence > 0).all()
    by_network = retrained.pivot_table("divergence", index=["rate", "seed"], columns="penalty")
    assert (by_network.nothing != by_network.moments).all()


def test_what_dropout_adds_is_measured_over_the_first_images():
    """With as many images as there are, the effect is that of all images."""
    unit = "dropout after all 3 layers of 8, q = 0.3"
    part, whole, more = (
        pd.DataFrame(dropout_moments.work(replace(TINY, examples=count), "cpu")[unit]())
        for count in (200, 300, 400)
    )
    assert (part.dropout_moments_strength != whole.dropout_moments_strength).iloc[0]
    assert whole.dropout_moments_strength.tolist()[:2] == more.dropout_moments_strength.tolist()[:2]


def test_the_figures_are_drawn_from_the_rows(rows, tmp_path):
    for path in plots.save(dropout_moments.plot(rows), tmp_path):
        assert path.stat().st_size > 10_000
    dropout_moments.plot_details(rows).savefig(tmp_path / "details.svg")
    assert (tmp_path / "details.svg").stat().st_size > 10_000
    assert all(math.isfinite(result.value) for result in dropout_moments.check(rows))
    json.dumps([asdict(dropout_moments.PAPER), asdict(QUICK)])


def test_no_dropout_layer_acts_at_depth_one(rows):
    networks = rows[rows.kind == "one layer"]
    assert (networks.dropout_layers == 0).all()
    assert networks.rate.nunique() == 2
    assert networks.groupby("seed").total_l2.nunique().tolist() == [1, 1]
    (claim,) = dropout_moments.CLAIMS
    assert claim.measure(rows).agrees
    acting = rows.assign(total_l2=rows.total_l2 * (1 + rows.rate))
    assert not claim.measure(acting).agrees


@pytest.fixture(scope="module")
def stored_rows():
    """The stored rows of the paper's size."""
    return store.read_result(ROOT / "results" / "paper" / "dropout-moments").rows


def documented_lines(rows):
    """The table of docs/method.md."""
    settings = {"paper": "the paper's", "every layer": "dropout after every layer"}
    for kind, setting in settings.items():
        for (depth, width, rate), group in rows[rows.kind == kind].groupby(
            ["depth", "width", "rate"]
        ):
            means = group.mean(numeric_only=True)
            yield (
                f"| {setting} | {depth:g}×{width:g} | {rate:g} | {len(group)} | "
                f"{means.explicit_dropout_explained:.2f} | {means.dropout_moments_explained:.2f} | "
                f"{means.dropout_moments_strength:.2f} |"
            )


def test_the_table_of_the_docs_is_that_of_the_stored_rows(stored_rows):
    text = (ROOT / "docs" / "method.md").read_text()
    expected = list(documented_lines(stored_rows))
    assert len(expected) >= 10
    assert "\n".join(expected) in text, "\n".join(expected)


def test_stored_rows_meet_every_key_number_but_one(stored_rows):
    checks = dropout_moments.check(stored_rows)
    assert len(checks) >= 15
    # As documented: at high rates second order in place of dropout is worse than no penalty.
    (failed,) = [result for result in checks if not result.holds]
    assert failed.label.startswith("retrained: KL with second order over")
    assert failed.tests == "expectation"
    (claim,) = dropout_moments.CLAIMS
    assert claim.measure(stored_rows).agrees


def test_only_dropout_by_moments_can_take_the_place_of_dropout(stored_rows):
    arms = stored_rows[stored_rows.penalty.notna()]
    assert arms.groupby(["rate", "penalty"]).size().eq(10).all()
    retrained = arms[arms.kind == "retrained"]
    assert set(arms[arms.kind == "diverged"].penalty) == {"explicit", "explicit, estimated"}
    by_rate = retrained.pivot_table("divergence", index="rate", columns="penalty")
    others = by_rate.drop(columns=["moments", "dropout again"]).min(axis=1)
    assert (by_rate.moments < others)[[0.3, 0.5]].all()
    assert by_rate.moments[0.1] < 1.05 * others[0.1]
    lost = retrained.assign(lost=retrained.dropout_accuracy - retrained.test_accuracy)
    lost = lost.pivot_table("lost", index="rate", columns="penalty")
    assert lost.moments.abs().max() < 0.0025
    assert lost.drop(columns=["moments", "dropout again"]).min(axis=None) > 0.004
