"""What each regularizer adds to the explained fraction, against dense refits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from support.models import random_data, tanh_mlp
from support.systems import SEEDS, draw, equations, equations_of_parts, quick, random_system
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.equations.blocks import Block
from tacit.equations.factors import triangular_factor
from tacit.fitting.shares import ordered_shares, products_of_points, unique_shares


def dense_explained(design, targets):
    """The explained fraction, with strengths of each group of draws against the other groups."""
    groups = targets.shape[1]
    if not design.shape[1]:
        return 0.0
    fitted = design @ torch.stack([reference.fit(design, t) for t in targets.T], dim=1)
    pairs = [(g, h) for g in range(groups) for h in range(groups) if g != h or groups == 1]
    part = sum(float(fitted[:, g] @ targets[:, h]) for g, h in pairs)
    return part / sum(float(targets[:, g] @ targets[:, h]) for g, h in pairs)


@quick
@given(SEEDS)
def test_unique_and_ordered_shares_agree_with_dense_refits(seed):
    design, target = random_system(seed, rank_loss=seed % 2)
    groups = 1 + seed % 3
    targets = target[:, None] + 0.3 * draw(seed, len(target), groups)
    system = equations(design, targets, blocks=2)
    count = design.shape[1]
    whole = dense_explained(design, targets)
    assert whole == pytest.approx(tacit.fit(system).explained, rel=1e-8)
    for column, share in enumerate(unique_shares(system).values()):
        others = [c for c in range(count) if c != column]
        assert share == pytest.approx(whole - dense_explained(design[:, others], targets), abs=1e-8)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    shares = ordered_shares(system, [f"r{c}" for c in order])
    for position, column in enumerate(order):
        before = dense_explained(design[:, order[:position]], targets)
        after = dense_explained(design[:, order[: position + 1]], targets)
        assert shares[f"r{column}"] == pytest.approx(after - before, abs=1e-8)
    assert sum(shares.values()) == pytest.approx(whole, rel=1e-8)


def test_a_family_is_left_out_as_a_whole_under_its_name():
    model, data = tanh_mlp(0), random_data(0)
    families = [tacit.layerwise(tacit.l2()), tacit.smooth_l1(1e-2)]
    fit = tacit.estimate(model, F.mse_loss, data, families)
    assert list(unique_shares(fit)) == ["l2", "smooth_l1"]
    without_l2 = tacit.estimate(model, F.mse_loss, data, families[1])
    lost = fit.explained - without_l2.explained
    assert unique_shares(fit)["l2"] == pytest.approx(lost, abs=1e-12)
    assert unique_shares(fit.equations) == unique_shares(fit)
    both = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), *families])
    assert list(ordered_shares(both)) == ["l2", "l2[*]", "smooth_l1"]
    assert unique_shares(both)["l2"] == pytest.approx(0, abs=1e-12)


def test_families_of_the_same_name_are_numbered():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()
    X = torch.randn(40, 4).double()
    scopes = [lambda n, i=i: n[0] in (str(i), str(i + 1)) for i in (0, 2, 4)]
    families = [tacit.layerwise(tacit.l2(scope=scope)) for scope in scopes]
    fit = tacit.estimate(model, F.mse_loss, (X, X.flip(1)), families)
    assert sum(ordered_shares(fit).values()) == pytest.approx(fit.explained)
    assert list(unique_shares(fit)) == ["l2", "l2[*]", "l2[*2]"]


def test_shares_of_a_nonnegative_fit_are_those_of_nonnegative_refits():
    design = draw(1, 60, 3)
    target = design @ torch.tensor([1.0, -0.5, 0.3]).double() + 0.3 * draw(2, 60)
    fit = tacit.fit(equations(design, target), nonnegative=True)
    for column, share in enumerate(unique_shares(fit).values()):
        others = design[:, [c for c in range(3) if c != column]]
        rest = reference.explained(others, reference.fit_nonnegative(others, target), target)
        assert share == pytest.approx(fit.explained - rest, abs=1e-10)
    assert sum(ordered_shares(fit).values()) == pytest.approx(fit.explained)


def test_orders_that_leave_out_or_repeat_a_regularizer_are_refused():
    system = equations(draw(3, 20, 2), draw(4, 20))
    for order, words in ((["r0"], "every"), (["r0", "r0"], "twice"), (["r0", "x"], "there are r0")):
        with pytest.raises(tacit.InputError, match=words):
            ordered_shares(system, order)
    with pytest.raises(tacit.InputError, match="list of names"):
        ordered_shares(system, "r0")
    with pytest.raises(tacit.InputError, match="pass a Fit"):
        unique_shares([1.0])


def test_the_unique_share_of_a_collinear_column_is_zero():
    design = draw(15, 50, 2)
    duplicated = equations(design[:, [0, 0, 1]], design.sum(1))
    shares = unique_shares(duplicated)
    assert [shares["r0"], shares["r1"]] == pytest.approx([0, 0], abs=1e-12)
    assert shares["r2"] > 0.1


def epochs_of(rows_by_epoch, count):
    """Equations of epochs from [design | target] of every epoch and layer, with their means."""
    layers = range(len(rows_by_epoch[0]))
    parts = [(str(i), e, 0, rows[i]) for e, rows in enumerate(rows_by_epoch) for i in layers]
    single = equations_of_parts(parts, count, mode="trajectory")
    means = []
    for first in (0, 1):
        chosen = rows_by_epoch[first::2]
        for i in layers:
            mean = triangular_factor(sum(rows[i] for rows in chosen) / len(chosen) ** 0.5)
            columns, height = tuple(range(count)), len(chosen[0][i])
            means.append(
                Block(str(i), columns, mean, height, 0, 0.0, source=first, points=len(chosen))
            )
    sources = tuple(replace(s, epoch=True) for s in single.sources)
    return replace(single, means=tuple(means), sources=sources)


def noisy_epochs(seed, noise, *, epochs=6, misfit=0.0):
    """Two layers, two columns with the strengths 1 and −½, and other noise in every epoch."""
    design = [draw(seed + i, 300, 2) for i in range(2)]
    extra = [misfit * draw(seed + 2 + i, 300) for i in range(2)]
    strengths = torch.tensor([1.0, -0.5]).double()
    return [
        [
            torch.cat(
                [d, (d @ strengths + m + noise * draw(100 * seed + 10 * e + i, 300))[:, None]], 1
            )
            for i, (d, m) in enumerate(zip(design, extra, strict=True))
        ]
        for e in range(1, epochs + 1)
    ]


@pytest.mark.parametrize("epochs", [4, 5, 6])
def test_products_of_points_are_those_of_all_pairs_of_every_second_epoch(epochs):
    rows = noisy_epochs(3, 1.0, epochs=epochs)
    equations = epochs_of(rows, 2)
    expected = torch.zeros(3, 3).double()
    for chosen in (range(0, epochs, 2), range(1, epochs, 2)):
        for e in chosen:
            for f in chosen:
                if e != f:
                    pairs = sum(rows[e][i].T @ rows[f][i] for i in range(2))
                    expected += pairs / (len(chosen) - 1)
    products = products_of_points(equations)
    torch.testing.assert_close(products, expected, rtol=1e-10, atol=1e-9)
    by_layer = [products_of_points(equations, layer) for layer in equations.layers]
    torch.testing.assert_close(sum(by_layer), products)
    fit = tacit.fit(equations)
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    share = float(strengths @ expected[:2, 2] / expected[2, 2])
    assert fit.explained == pytest.approx(min(share, 1.0), rel=1e-9)
    assert sum(ordered_shares(fit).values()) == pytest.approx(fit.explained, rel=1e-9)
    assert tacit.fit(equations.select_columns([1, 0])).explained == pytest.approx(fit.explained)
    stacked = tacit.stack([equations, equations])
    assert tacit.fit(stacked).explained == pytest.approx(fit.explained)


@pytest.mark.parametrize(("misfit", "expected"), [(0.0, 1.0), (0.8, 1.25 / (1.25 + 0.64))])
def test_noise_of_epochs_does_not_count_as_unexplained(misfit, expected):
    """Of a fit that is right, 38 % were explained, which was called unexplained."""
    explained = []
    for seed in range(40, 60):
        equations = epochs_of(noisy_epochs(seed, 1.4, misfit=misfit), 2)
        with_noise = tacit.fit(replace(equations, means=()))
        assert with_noise.explained < 0.5
        fit = tacit.fit(equations)
        explained.append(fit.explained)
        assert fit.strengths == with_noise.strengths
        if not misfit:
            assert not [p for p in fit.problems if p.kind == "weak"]
            assert fit.residual_ratio < 0.35 < with_noise.residual_ratio
            assert fit.cosine > 0.93
    assert sum(explained) / 20 == pytest.approx(expected, abs=0.04)


def test_means_are_saved_and_kept_by_layer(tmp_path):
    equations = epochs_of(noisy_epochs(5, 1.0), 2)
    equations.save(tmp_path / "epochs.safetensors")
    loaded = tacit.Equations.load(tmp_path / "epochs.safetensors")
    assert tacit.fit(loaded).explained == tacit.fit(equations).explained
    assert tacit.fit(loaded).layers["0"].explained > 0.9
    for changes in ({"points": 1}, {"points": 10**9}, {"source": 5}):
        wrong = tuple(replace(mean, **changes) for mean in equations.means)
        replace(equations, means=wrong).save(tmp_path / "wrong.safetensors")
        with pytest.raises(tacit.InputError, match="a mean over"):
            tacit.Equations.load(tmp_path / "wrong.safetensors")


def test_epochs_of_a_training_loop_are_explained_net_of_minibatch_noise():
    """Of a ridge that its interval holds, 10 % were explained: "unexplained"."""
    torch.manual_seed(0)
    (X, y), model = random_data(0, count=256), tanh_mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.02)
    averages = tacit.average_epochs(model, optimizer, epochs=12)
    for _ in range(60):
        for rows in torch.randint(0, 256, (32, 8)):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
        averages.end_epoch()
    target = averages.target(tacit.Objective(model, F.mse_loss, (X, y)))
    equations = target.equations(tacit.l2())
    vectors = [reference.flat(point.vectors[0]) for point in target.points]
    whole = sum(
        float(vectors[e] @ vectors[f]) / 5
        for first in (0, 1)
        for e in range(first, 12, 2)
        for f in range(first, 12, 2)
        if e != f
    )
    products = products_of_points(equations)
    assert products is not None
    assert float(products[-1, -1]) == pytest.approx(whole, rel=1e-8)
    fit, with_noise = tacit.fit(equations), tacit.fit(replace(equations, means=()))
    low, high = fit.intervals()["training"]["l2"]
    assert low <= 0.01 <= high
    assert fit.explained > 0.9
    assert with_noise.explained < 0.5
    assert not fit.problems
