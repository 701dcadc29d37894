"""Screens of models whose penalties are known, and of some without one."""

from dataclasses import replace

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from support.systems import draw, equations_of_parts
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective
from tacit.equations import target as target_module
from tacit.identifiability.group_tests import GroupTests
from tacit_paper.minimising import minimise


class Columns(nn.Module):
    """A linear map whose inputs are divided among ten layers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(2, 3) for _ in range(10)).double()

    def forward(self, x):
        parts = x.split(2, dim=1)
        return sum(layer(part) for layer, part in zip(self.layers, parts, strict=True)).tanh()


def network(penalty=None, seed=0):
    """Ten layers at the minimum of loss + penalty(params), with the weights before."""
    model, (X, y) = Columns(seed), random_data(seed, inputs=20, outputs=3, count=200)
    y, start = (y + 1).tanh(), params_of(model)  # biases are needed
    params = dict(model.named_parameters())

    def objective():
        return F.mse_loss(model(X), y) + (0.0 if penalty is None else penalty(params))

    minimise(objective, params.values(), iterations=2000)
    return Objective(model, F.mse_loss, (X, y)), start


def ridge(strength, *, least=1):
    return lambda params: (
        strength * sum(p.square().sum() for p in params.values() if p.ndim >= least)
    )


@pytest.fixture(scope="module")
def ridge_screen():
    return tacit.screen(network(ridge(0.01))[0])


def test_the_penalty_that_was_applied_is_the_answer(ridge_screen):
    assert ridge_screen.verdict == "answer"
    assert ridge_screen.fit.strengths == pytest.approx({"l2": 0.01}, rel=1e-5)
    assert ridge_screen.fit.equations.origin is not None  # for score_examples and the like
    first = ridge_screen.groups[0]
    assert first.members[0] == "l2"
    assert first.named == ("l2",)
    assert first.confirmed
    assert sum(group.confirmed for group in ridge_screen.groups) == 1


def test_a_scope_is_told_from_all_parameters():
    screen = tacit.screen(network(ridge(0.01, least=2))[0])
    assert screen.fit.strengths == pytest.approx({"l2[matrices]": 0.01}, rel=1e-5)
    assert screen.groups[0].named == ("l2[matrices]",)


def test_a_sum_over_scopes_is_found_in_parts():
    """Matrices and biases have strengths of their own, which no single candidate has."""

    def penalty(params):
        return ridge(0.002, least=2)(params) + 0.04 * sum(
            p.square().sum() for p in params.values() if p.ndim == 1
        )

    screen = tacit.screen(network(penalty)[0])
    assert screen.verdict == "answer"
    assert screen.fit.explained > 0.9999
    # Of pairs with the same span, that whose columns are least alike; l2, their sum, is no rival.
    expected = {"l2[matrices]": 0.002, "l2[biases]": 0.04}
    assert screen.fit.strengths == pytest.approx(expected, rel=1e-4)
    assert {*screen.groups[0].named} == {*expected}


def test_two_penalties_of_one_group_are_both_found():
    def penalty(params):
        lasso = [F.smooth_l1_loss(p, 0 * p, beta=0.1, reduction="sum") for p in params.values()]
        return ridge(0.01)(params) + 0.01 * sum(lasso)

    screen = tacit.screen(network(penalty)[0])
    assert screen.fit.strengths == pytest.approx({"l2": 0.01, "smooth_l1(0.1)": 0.01}, rel=1e-4)


def test_a_penalty_of_biases_is_found():
    """A smooth l1 that is wider than all biases, less the same of matrices, is this penalty."""
    model, (X, y) = Columns(), random_data(0, inputs=20, outputs=3, count=200)
    point = {n: p if p.ndim == 1 else 2 * p for n, p in params_of(model).items()}
    target = tacit.endpoint_target(Objective(model, F.mse_loss, (X, y)), params=point)
    gradient = {n: 0.04 * p * (p.ndim == 1) for n, p in point.items()}
    exact = replace(target, points=(replace(target.points[0], vectors=(gradient,)),))
    screen = tacit.screen(exact)
    assert screen.verdict == "answer"
    assert screen.fit.strengths == pytest.approx({"l2[biases]": 0.02})
    assert screen.groups[0].named == ("l2[biases]",)


def test_a_small_part_is_found_where_it_completes_the_answer():
    """Without the lasso, which adds 0.09 % of the target, ridge comes out 9 % too strong."""

    def penalty(params):
        lasso = [F.smooth_l1_loss(p, 0 * p, beta=0.1, reduction="sum") for p in params.values()]
        grams = [p.T @ p - torch.eye(2).double() for p in params.values() if p.ndim == 2]
        orthogonality = sum(gram.square().sum() for gram in grams)
        return ridge(0.01)(params) + 0.001 * sum(lasso) + 0.1 * orthogonality

    screen = tacit.screen(network(penalty)[0])
    assert screen.verdict == "answer"
    expected = {"l2": 0.01, "smooth_l1(0.1)": 0.001, "orthogonality": 0.1}
    assert screen.fit.strengths == pytest.approx(expected, rel=1e-4)
    assert {name for group in screen.groups for name in group.named} == {*expected}


def test_the_distance_to_the_start_is_found():
    model = Columns()
    start = {n: p + 0.5 for n, p in params_of(model).items()}

    def penalty(params):
        return 0.01 * sum((p - start[n]).square().sum() for n, p in params.items())

    screen = tacit.screen(network(penalty)[0], start=start)
    assert screen.fit.strengths == pytest.approx({"distance_to": 0.01}, rel=1e-5)


def test_known_penalties_are_subtracted():
    def penalty(params):
        lasso = [F.smooth_l1_loss(p, 0 * p, beta=0.1, reduction="sum") for p in params.values()]
        return ridge(0.01)(params) + 0.01 * sum(lasso)

    objective, _ = network(penalty)
    screen = tacit.screen(objective, known={tacit.l2(): 0.01})
    assert screen.fit.strengths == pytest.approx({"smooth_l1(0.1)": 0.01}, rel=1e-4)


def test_at_a_minimum_of_the_loss_there_is_no_signal():
    objective, start = network()
    screen = tacit.screen(objective, start=start)
    assert screen.verdict in ("no signal", "nothing")
    assert screen.fit is None
    assert not any(group.confirmed for group in screen.groups)


def test_one_layer_is_written_in_the_singular():
    model, data = nn.Linear(5, 1).double(), random_data(0)
    screen = tacit.screen(Objective(model, F.mse_loss, data), cost="weights")
    assert "confirmed: 1 layer cannot give" in screen.reason
    assert "over 1 layer\n" in str(screen)


def test_unfinished_training_is_at_most_aligned():
    model, (X, y) = Columns(1), random_data(1, inputs=20, outputs=3, count=200)
    start = params_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(20):
        optimizer.zero_grad()
        F.mse_loss(model(X), y.tanh()).backward()
        optimizer.step()
    screen = tacit.screen(Objective(model, F.mse_loss, (X, y.tanh())), start=start)
    assert screen.verdict in ("aligned", "nothing")
    assert "training had not finished" in screen.reason


def test_few_layers_are_only_ranked():
    model = tanh_mlp(0, (5, 8, 1))
    X, y = random_data(0)
    minimise(
        lambda: F.mse_loss(model(X), y) + ridge(0.01)(dict(model.named_parameters())),
        model.parameters(),
    )
    screen = tacit.screen(Objective(model, F.mse_loss, (X, y)))
    assert screen.verdict == "ranked"
    assert "2 layers" in screen.reason
    assert screen.fit is None
    best = max(screen.table, key=lambda row: row.held_out)
    assert best.name == "l2"
    assert best.held_out == pytest.approx(1.0, abs=1e-6)


def test_a_candidate_that_few_layers_have_is_only_ranked():
    few = tacit.l2(scope=["layers.[0-3].*"])
    waves = tacit.regularizer(
        "waves", lambda params: sum((99 * p).sin().sum() for p in params.values())
    )
    target = tacit.endpoint_target(network(ridge(0.01))[0])
    screen = tacit.screen(target.equations([few, waves]))
    assert screen.verdict == "ranked"
    assert "of which 4 of 10 layers have equations" in screen.reason
    assert "no p-value below 0.12" in screen.reason


def test_rows_of_the_table_agree_with_fits(ridge_screen):
    objective, _ = network(ridge(0.01))
    row = next(row for row in ridge_screen.table if row.name == "power(4)")
    power = tacit.regularizers.power(4.0)
    alone = tacit.estimate(objective, [power])
    assert row.alone == pytest.approx(alone.explained, rel=1e-6)
    assert row.strength == pytest.approx(alone.strengths["power"], rel=1e-6)
    assert row.interval == pytest.approx(alone.intervals()["layers"]["power"], rel=1e-5)
    chosen = next(row for row in ridge_screen.table if row.chosen)
    assert chosen.added == pytest.approx(chosen.alone) == pytest.approx(1.0)


def test_only_the_chosen_candidates_are_diagnosed(monkeypatch):
    """What takes several times as long as the equations themselves is done for the fit alone."""
    calls = []
    whole = target_module.find_near_zero

    def count(candidates, *args, **at_point):
        calls.append([r.name for r in candidates.estimated])
        return whole(candidates, *args, **at_point)

    monkeypatch.setattr(target_module, "find_near_zero", count)
    tacit.screen(network(ridge(0.01))[0])
    assert calls == [["l2"]]


def test_the_summary_names_the_verdict_and_the_group(ridge_screen):
    text = str(ridge_screen)
    assert text.startswith("l2: confirmed, with 100.0% of the target explained.")
    assert "over 10 layers" in text
    assert "l2 *" in text
    assert max(map(len, text.splitlines())) <= 100
    assert len(ridge_screen.plot().axes) == 1


def test_columns_that_are_alike_are_one_group():
    design = draw(0, 40, 4)
    design[:, 1] = design[:, 0] + 0.3 * draw(1, 40)
    design[:, 3] = design[:, 1] + 0.3 * draw(2, 40)
    parts = [
        (str(i), 0, 0, torch.cat([part, draw(i, 10, 1)], 1))
        for i, part in enumerate(design.split(10))
    ]
    tests = GroupTests(equations_of_parts(parts, 4), [(f"r{i}", "") for i in range(4)])
    assert sorted(map(sorted, tests.groups)) == [[0, 1, 3], [2]]


def screen_of_two_alike(strengths, rest, own=0.33):
    """Of columns that are alike in ten layers, with a part of the target that is of neither."""
    parts = []
    for i in range(10):
        common = draw(210 + i, 40, 1)
        design = torch.cat([common + own * draw(j + i, 40, 1) for j in (30, 50)], dim=1)
        target = design @ torch.tensor(strengths)[:, None].double() + rest * draw(470 + i, 40, 1)
        parts.append((str(i), 0, 0, torch.cat([design, target], 1)))
    return tacit.screen(equations_of_parts(parts, 2))


def test_two_that_are_alike_or_nearly_cancel_are_not_the_answer():
    """They come close to a third penalty; where they explain all, they may be what was applied."""
    assert screen_of_two_alike([1.0, 1.0], rest=0.0).verdict == "answer"
    screen = screen_of_two_alike([1.0, 1.0], rest=0.1)
    assert len(screen.fit.strengths) == 2
    assert screen.fit.explained > 0.99
    assert screen.verdict == "aligned"
    assert "come close to many others" in screen.reason
    screen = screen_of_two_alike([1.0, -1.0], rest=0.08)
    assert screen.verdict != "answer"
    assert len(screen.fit.strengths if screen.fit else ()) < 2
    exact = screen_of_two_alike([1.0, -1.0], rest=0.0)
    assert exact.verdict == "answer"
    assert [problem.kind for problem in exact.fit.problems] == ["negative"]


def test_a_member_that_is_undecided_is_not_named_in_the_verdict():
    screen = screen_of_two_alike([0.5, 0.5], rest=1.0, own=0.03)
    (group,) = screen.groups
    assert group.confirmed
    assert not group.named
    assert f"{group.members[0]} (or another of 2 that are alike)" in screen.reason


def test_parts_of_a_family_are_tested_without_what_contains_them():
    """The decay of all matrices less that of some is that of the others, which is found."""
    parts = []
    for i in range(10):
        first, last, target = draw(10 + i, 40, 1), 0.5 * draw(30 + i, 40, 1), 0.01 * draw(i, 80, 1)
        of_first, of_last = torch.cat([first, 0 * last]), torch.cat([0 * first, last])
        design = torch.cat([of_first + of_last, of_first, of_last], dim=1)
        target = target + 0.1 * of_first + 0.25 * of_last
        parts.append((str(i), 0, 0, torch.cat([design, target], dim=1)))
    kinds = [("l2", "matrices"), ("l2", "weight_decay[0]"), ("l2", "weight_decay[1]")]
    tests = GroupTests(equations_of_parts(parts, 3), kinds)
    assert sorted(map(sorted, tests.groups)) == [[0, 1], [2]]
    assert max(tests.p_values) < 0.01
    assert sorted(tests.chosen) == [1, 2]


def test_a_member_that_explains_hardly_more_is_not_named():
    """It beats the other in every epoch, but epochs have more in common than the penalty."""
    parts = []
    for i in range(10):
        column = draw(10 + i, 200, 1)
        rival, rest = column + 0.05 * draw(30 + i, 200, 1), 0.2 * draw(50 + i, 200, 1)
        parts.append(("layer", i, 0, torch.cat([column, rival, column + rest], dim=1)))
    tests = GroupTests(equations_of_parts(parts, 2), [("a", ""), ("b", "")])
    assert tests.chosen == [0]
    assert tests.p_beside([0], [1]) < 0.01
    assert not tests.beats_rivals(0, [0, 1])


def test_a_small_part_counts_only_where_nothing_is_noise():
    """Where draws show noise, a part of 0.4 % that completes the answer may be noise as well."""
    for noise, chosen in ((0.0, [0, 1]), (0.02, [0])):
        parts = []
        for i in range(10):
            columns = torch.cat([draw(10 + i, 40, 1), draw(30 + i, 40, 1)], dim=1)
            target = columns @ torch.tensor([[1.0], [0.06]]).double()
            targets = target + noise * draw(50 + i, 40, 2) if noise else target
            parts.append((str(i), 0, 0, torch.cat([columns, targets], dim=1)))
        tests = GroupTests(equations_of_parts(parts, 2), [("a", ""), ("b", "")])
        assert sorted(tests.chosen) == chosen


@pytest.mark.parametrize(("other", "verdict"), [(0.0, "answer"), (0.75, "aligned")])
def test_noise_that_could_hide_another_penalty_leaves_no_answer(other, verdict):
    """Two groups of draws: no test finds the rest, but a third of the signal is not explained."""
    parts = []
    for i in range(10):
        column, unknown = draw(10 + i, 40, 1), draw(30 + i, 40, 1)
        noise = 0.5 * draw(50 + i, 40, 2)
        parts.append((str(i), 0, 0, torch.cat([column, column + other * unknown + noise], dim=1)))
    screen = tacit.screen(equations_of_parts(parts, 1))
    assert not any(p.kind == "unexplained" for p in screen.fit.problems)
    assert screen.verdict == verdict
    assert ("too large here to say" in screen.reason) == (verdict == "aligned")


class Chain(nn.Module):
    """A classifier of ten layers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def classifier_screen(seed, smoothing=0.0, decay=0.0, iterations=300):
    """A screen of a classifier after L-BFGS on the loss with smoothed labels and ridge."""
    model = Chain(seed).double()
    X = torch.randn(80, 5).double()
    y = torch.randint(3, (80,))

    def loss():
        penalty = decay * sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(X), y, label_smoothing=smoothing) + penalty

    minimise(loss, model.parameters(), iterations=iterations)
    return tacit.screen(Objective(model, F.cross_entropy, (X, y)))


@pytest.mark.slow
def test_layers_that_share_their_examples_do_not_confirm_what_depends_on_the_data():
    """Of 24 other classifiers without a penalty, one had a claim, and none of label smoothing."""
    screens = [classifier_screen(seed) for seed in range(940_001, 940_013)]
    claims = [row.name for screen in screens for row in screen.table if row.chosen]
    assert "label_smoothing" not in claims
    assert sum(screen.verdict in ("answer", "aligned") for screen in screens) <= 1
    assert any("same examples" in s.left_out.get("label_smoothing", "") for s in screens)


@pytest.mark.parametrize(("rest", "verdict"), [(0.0, "answer"), (0.1, "nothing")])
def test_label_smoothing_at_an_endpoint_leaves_no_rest(rest, verdict):
    """It explains 99 % where a classifier fits all examples about equally well."""
    model = Chain(0).double()
    data = torch.randn(60, 5).double(), torch.randint(3, (60,))
    plain = Objective(model, F.cross_entropy, data)
    smoothed = tacit.difference_target(tacit.techniques.label_smoothing(plain, 0.1), plain)
    vector = {}
    for name, part in smoothed.points[0].vectors[0].items():
        noise = torch.randn_like(part)
        vector[name] = rest * part.norm() / noise.norm() * noise - part
    target = tacit.endpoint_target(plain)
    point = replace(target.points[0], vectors=(vector,))
    screen = tacit.screen(replace(target, points=(point,)))
    assert screen.verdict == verdict
    assert ("label_smoothing was left out" in screen.reason) == (verdict == "nothing")


@pytest.mark.slow
def test_label_smoothing_is_found_at_an_endpoint():
    screen = classifier_screen(940_021, smoothing=0.1, decay=0.02, iterations=3000)
    assert screen.verdict == "answer"
    assert {*screen.fit.strengths} == {"l2", "label_smoothing"}
    assert screen.fit.strengths["l2"] == pytest.approx(0.02, rel=0.02)


def test_equations_are_screened_with_their_own_candidates():
    parts = []
    for i in range(9):
        design = draw(10 + i, 8, 3)
        target = design @ torch.tensor([[0.0], [2.0], [0.0]]).double() + 0.01 * draw(i, 8, 1)
        parts.append((str(i), 0, 0, torch.cat([design, target], 1)))
    screen = tacit.screen(equations_of_parts(parts, 3))
    assert screen.fit.strengths == pytest.approx({"r1": 2.0}, rel=0.01)
    assert screen.verdict == "answer"


def test_endpoints_are_the_clusters_where_there_are_several():
    parts = []
    for i in range(9):
        design = draw(10 + i, 8, 3)
        parts.append(("layer", i, 0, torch.cat([design, design[:, :1]], 1)))
    screen = tacit.screen(equations_of_parts(parts, 3))
    assert screen.clusters == ("endpoints", 9)
    assert screen.groups[0].p == pytest.approx(3 * 2.0**-8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: tacit.screen(3), "screen was given a int"),
        (lambda o: tacit.screen(o, cost="free"), "cost"),
        (lambda o: tacit.screen(o, start={"w": torch.zeros(1)}), "no such tensor"),
        (lambda o: tacit.screen(o, start=params_of(o.model)), "copies from before training"),
        (
            lambda o: tacit.screen(tacit.endpoint_equations(o, tacit.l2()), start={}),
            "equations and start",
        ),
    ],
)
def test_wrong_calls_are_refused(call, message):
    model = tanh_mlp(0)
    with pytest.raises(InputError, match=message):
        call(Objective(model, F.mse_loss, random_data(0)))
