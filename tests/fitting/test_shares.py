"""What each regularizer adds to the explained fraction, against dense refits."""

import pytest
import torch
from hypothesis import given
from support.models import random_data, tanh_mlp
from support.systems import SEEDS, draw, equations, quick, random_system
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.fitting.shares import ordered_shares, unique_shares


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
