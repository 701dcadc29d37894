"""What each regularizer adds, against dense oracles, and what chance would add, against its law."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from scipy import stats
from support.models import minimise, params_of, random_data, tanh_mlp
from support.systems import SEEDS, draw, equations, quick, random_system
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.equations.equations import Block
from tacit.fitting.chance import chances
from tacit.fitting.solving import System
from tacit.identifiability import chance, null_distribution, ordered_shares, unique_shares


def dense_explained(design, targets):
    """Strengths of one group against the targets of the others."""
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
    given = equations(design, targets, blocks=2)
    count = design.shape[1]
    whole = dense_explained(design, targets)
    assert whole == pytest.approx(tacit.fit(given).explained, rel=1e-8)
    for column, share in enumerate(unique_shares(given).values()):
        others = [c for c in range(count) if c != column]
        assert share == pytest.approx(whole - dense_explained(design[:, others], targets), abs=1e-8)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    shares = ordered_shares(given, [f"r{c}" for c in order])
    for position, column in enumerate(order):
        before = dense_explained(design[:, order[:position]], targets)
        after = dense_explained(design[:, order[: position + 1]], targets)
        assert shares[f"r{column}"] == pytest.approx(after - before, abs=1e-8)
    assert sum(shares.values()) == pytest.approx(whole, rel=1e-8)


def test_families_leave_as_a_whole_under_their_names():
    model, data = tanh_mlp(0), random_data(0)
    families = [tacit.layerwise(tacit.l2()), tacit.smooth_l1(1e-2)]
    found = tacit.estimate(model, F.mse_loss, data, families)
    assert list(unique_shares(found)) == ["l2", "smooth_l1"]
    alone = tacit.estimate(model, F.mse_loss, data, families[1])
    gone = found.explained - alone.explained
    assert unique_shares(found)["l2"] == pytest.approx(gone, abs=1e-12)
    assert unique_shares(found.equations) == unique_shares(found)
    both = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), *families])
    assert list(ordered_shares(both)) == ["l2", "l2[*]", "smooth_l1"]
    assert unique_shares(both)["l2"] == pytest.approx(0, abs=1e-12)


def test_shares_of_a_nonnegative_fit_are_those_of_nonnegative_refits():
    design = draw(1, 60, 3)
    target = design @ torch.tensor([1.0, -0.5, 0.3]).double() + 0.3 * draw(2, 60)
    found = tacit.fit(equations(design, target), nonnegative=True)
    for column, share in enumerate(unique_shares(found).values()):
        others = design[:, [c for c in range(3) if c != column]]
        left = reference.explained(others, reference.fit_nonnegative(others, target), target)
        assert share == pytest.approx(found.explained - left, abs=1e-10)
    assert sum(ordered_shares(found).values()) == pytest.approx(found.explained)
    assert chance(found)["r1"] == 1
    assert chance(found)["r0"] == pytest.approx(chance(equations(design[:, [0, 2]], target))["r0"])


def test_orders_that_leave_out_or_repeat_are_refused():
    given = equations(draw(3, 20, 2), draw(4, 20))
    for order, words in ((["r0"], "every"), (["r0", "r0"], "twice"), (["r0", "x"], "there are r0")):
        with pytest.raises(tacit.InputError, match=words):
            ordered_shares(given, order)
    with pytest.raises(tacit.InputError, match="list of names"):
        ordered_shares(given, "r0")
    with pytest.raises(tacit.InputError, match="pass a Fit"):
        unique_shares([1.0])


@pytest.mark.parametrize(("rows", "others"), [(3, 0), (10, 0), (10, 3), (200, 2)])
def test_a_random_direction_adds_a_beta_distributed_part_whatever_the_target_is(rows, others):
    """Beta(½, (p − k)/2) of what the others leave; p-values are then uniform."""
    beside, target = draw(100, rows, others) ** 3, draw(101, rows).exp()
    parts, values = [], []
    for seed in range(600):
        design = torch.cat([beside, draw(7000 + seed, rows, 1)], dim=1)
        given = equations(design, target)
        values.append(chance(given)[f"r{others}"])
        rest = 1 - dense_explained(beside, target[:, None])
        parts.append(unique_shares(given)[f"r{others}"] / rest)
        law = stats.beta(0.5, (rows - others - 1) / 2)
        assert values[-1] == pytest.approx(law.sf(parts[-1]), abs=1e-6)
    assert stats.kstest(parts, law.cdf).pvalue > 0.01
    assert stats.kstest(values, "uniform").pvalue > 0.01


def scoped(design, target, split):
    """Two layers; the last column is zero in the second."""
    whole = equations(design, target)
    rows, last = torch.cat([design, target[:, None]], dim=1), design.shape[1] - 1
    columns = tuple(range(last + 1))
    second = rows[split:][:, [*columns[:-1], last + 1]]
    blocks = (
        Block("a", columns, rows[:split], split, 0, 0.0),
        Block("b", columns[:-1], second, len(second), 0, 0.0),
    )
    return replace(whole, blocks=blocks)


@pytest.mark.parametrize("split", [4, 15])
def test_a_direction_in_some_layers_is_compared_with_directions_in_those(split):
    """The exact law of the ratio of quadratic forms, against naive draws and as a p-value."""
    beside, target = draw(102, 30, 2), draw(103, 30)
    beside[:split] *= 2
    values = []
    for seed in range(500):
        column = draw(8000 + seed, 30, 1)
        column[split:] = 0
        values.append(chance(scoped(torch.cat([beside, column], dim=1), target, split))["r2"])
    assert stats.kstest(values, "uniform").pvalue > 0.01
    rest = target - beside @ reference.fit(beside, target)
    others = torch.linalg.qr(beside).Q
    drawn = draw(104, 40_000, 30)
    drawn[:, split:] = 0
    parts = (drawn @ rest).square() / (drawn.square().sum(1) - (drawn @ others).square().sum(1))
    own = torch.zeros(30).double()
    own[:split] = draw(105, split)
    observed = (own @ rest) ** 2 / (own @ own - (own @ others).square().sum())
    value = chance(scoped(torch.cat([beside, own[:, None]], dim=1), target, split))["r2"]
    assert value == pytest.approx(float((parts >= observed).double().mean()), abs=0.01)


def test_chances_at_the_edges():
    design, target = draw(5, 10, 2), draw(6, 10)
    exact = equations(design, design @ torch.tensor([1.0, 1e-6]).double())
    assert max(chance(exact).values()) < 1e-20
    assert chance(equations(design, design[:, 0]))["r1"] == 1  # it adds nothing
    assert min(chance(equations(design[:2], target[:2])).values()) > 0.99  # any two would do
    twins = equations(design[:, [0, 0, 1]], target)
    assert [chance(twins)[name] for name in ("r0", "r1")] == [1, 1]
    assert chance(twins)["r2"] == pytest.approx(chance(equations(design, target))["r1"])
    assert chance(equations(design, 0 * target)) == {"r0": 1, "r1": 1}
    huge = replace(exact, blocks=tuple(replace(b, rows=10**9) for b in exact.blocks))
    assert max(chance(huge).values()) == 0
    assert chances(exact, System(design), target, []) == {}


def dense_draws(design, target, sizes, column, shuffles, seed):
    """Explained fractions with one column's entries permuted within each tensor, all held whole."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        [piece[torch.randperm(len(piece), generator=generator)] for _ in range(shuffles)]
        for piece in design[:, column].split(sizes)
    ]
    for index in range(shuffles):
        shuffled = design.clone()
        shuffled[:, column] = torch.cat([piece[index] for piece in pieces])
        yield dense_explained(shuffled, target[:, None])


def quartic():
    return tacit.regularizer("quartic", lambda p: sum(t.pow(4).sum() for t in p.values()))


@pytest.mark.parametrize("column", [0, 1, 2])
def test_permutations_agree_with_dense_refits(column):
    model, data = tanh_mlp(7), random_data(7)
    objective = tacit.Objective(model, F.mse_loss, data)
    families = [tacit.l2(), tacit.smooth_l1(1e-1), quartic()]
    name = families[column].name
    null = null_distribution(objective, families, name, shuffles=20, seed=3)
    params = params_of(model)
    design, target = reference.design(families, params), -reference.flat(objective.gradient())
    sizes = [p.numel() for p in params.values()]
    expected = list(dense_draws(design, target, sizes, column, 20, 3))
    assert list(null.draws) == pytest.approx(expected, rel=1e-9)
    found = tacit.fit(tacit.endpoint_equations(objective, families))
    assert null.observed == pytest.approx(found.explained, rel=1e-10)
    unique = unique_shares(found)[name]
    assert null.observed - null.without == pytest.approx(unique, abs=1e-10)
    again = null_distribution(objective, families, name, shuffles=20, seed=3)
    assert null == again


def test_known_penalties_kinks_scopes_and_rows_are_as_in_the_equations():
    """The rows of weights that are not zero; the shuffled column covers the first layer alone."""
    model, data = tanh_mlp(8), random_data(8)
    with torch.no_grad():
        model[0].weight[:2] = 0
    objective = tacit.Objective(model, F.mse_loss, data)
    families, applied = [tacit.l1(), tacit.layerwise(tacit.l2())], tacit.smooth_l1(0.1)
    options = {"known": {applied: 0.02}, "rows": "*.weight"}
    null = null_distribution(objective, families, "l2[0]", shuffles=30, seed=4, **options)
    params = params_of(model)
    rows = torch.cat([(p != 0).flatten() & (p.ndim > 1) for p in params.values()])
    design = reference.design(families, params)[rows]
    target = (
        -reference.flat(objective.gradient()) - 0.02 * reference.design([applied], params)[:, 0]
    )
    first = int((params["0.weight"] != 0).sum())
    sizes = [first, len(design) - first]
    expected = list(dense_draws(design, target[rows], sizes, 1, 30, 4))
    assert list(null.draws) == pytest.approx(expected, rel=1e-9)
    found = tacit.fit(tacit.endpoint_equations(objective, families, **options))
    assert null.observed == pytest.approx(found.explained, rel=1e-10)


def test_a_penalty_that_was_at_work_beats_every_permutation_and_an_idle_one_does_not():
    model, data = tanh_mlp(9), random_data(9)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    objective = tacit.Objective(model, F.mse_loss, data)
    null = null_distribution(objective, [tacit.l2()], "l2", shuffles=199)
    assert null.observed == pytest.approx(1)
    assert null.p_value == 1 / 200
    flat = tacit.regularizer("flat", lambda params: sum(t.sum() for t in params.values()))
    assert null_distribution(objective, [flat], "flat", shuffles=50).p_value == 1
    idle = [
        null_distribution(objective, [constant(seed)], "random", shuffles=99, seed=seed).p_value
        for seed in range(9100, 9160)
    ]
    assert stats.kstest(idle, "uniform").pvalue > 0.01


def constant(seed):
    """A penalty whose gradient is one random direction."""

    def value(params):
        sizes = [p.numel() for p in params.values()]
        parts = draw(seed, sum(sizes)).split(sizes)
        return sum((p.flatten() @ d for p, d in zip(params.values(), parts, strict=True)))

    return tacit.regularizer("random", value)


def test_drawn_directions_follow_the_law_that_chance_uses():
    objective = tacit.Objective(tanh_mlp(10), F.mse_loss, random_data(10))
    families = [tacit.l2(), tacit.smooth_l1(1e-1)]
    null = null_distribution(objective, families, "smooth_l1", kind="direction", seed=9200)
    rows = tacit.endpoint_equations(objective, families).rows
    parts = [(value - null.without) / (1 - null.without) for value in null.draws]
    assert stats.kstest(parts, stats.beta(0.5, (rows - 2) / 2).cdf).pvalue > 0.01
    expected = chance(tacit.endpoint_equations(objective, families))["smooth_l1"]
    assert null.p_value == pytest.approx(expected, abs=0.05)


def test_wrong_calls_of_null_distribution_are_refused():
    objective = tacit.Objective(tanh_mlp(11), F.mse_loss, random_data(11))
    for arguments, options, words in (
        ((objective, [tacit.l2()], "l1"), {}, "there are l2"),
        ((objective, [tacit.l2()], "l2"), {"shuffles": 0}, "shuffles"),
        ((objective, [tacit.l2()], "l2"), {"kind": "sign"}, "direction"),
        ((objective.model, [tacit.l2()], "l2"), {}, "tacit.Objective"),
    ):
        with pytest.raises(tacit.InputError, match=words):
            null_distribution(*arguments, **options)
