"""Weak evidence is reported as problems with remedies, and good fits have none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import minimise, random_data, tanh_mlp
from support.partly_trained import partly_trained, random_direction
from support.systems import draw, equations, problem_kinds, problem_rows, reports
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import ProblemKind
from tacit.fitting import problems
from tacit.fitting.problems import PROBLEMS, markdown_table

DOCS = Path(__file__).parents[2] / "docs"


class AnyNumber(dict):
    """A value for every number in a message."""

    def __missing__(self, key):
        return 0.5


def test_the_table_has_every_kind_in_the_order_of_gravity():
    assert list(dict.fromkeys(row.kind for row in PROBLEMS)) == list(ProblemKind)
    assert len(ProblemKind) <= 12


def test_the_table_in_the_documentation_is_the_table():
    text = (DOCS / "reading-a-fit.md").read_text()
    assert markdown_table() in text, "copy the output of problems.markdown_table() there"
    assert "{" not in markdown_table()


@pytest.mark.parametrize("row", PROBLEMS, ids=lambda row: row.test.__name__)
def test_the_summary_prints_every_row_of_the_table(row):
    design = draw(0, 50, 2)
    fit = tacit.fit(equations(design, design[:, 0] + design[:, 1]))
    assert not fit.problems
    message = row.message.format_map(AnyNumber(shown="r0, r1"))
    problem = tacit.Problem(row.kind, message, row.remedy, ("r0", "r1"))
    text = " ".join(replace(fit, problems=(problem,)).summary().split())
    assert f"[1] {row.kind}: {message} {row.remedy}" in text


@pytest.mark.parametrize("signal", [1.0, 0.0])
def test_every_problem_is_evaluated_once(monkeypatch, signal):
    calls = dict.fromkeys((row.test for row in PROBLEMS), 0)

    def counting(test):
        def count_and_test(evidence):
            calls[test] += 1
            return test(evidence)

        return count_and_test

    counted = [row._replace(test=counting(row.test)) for row in PROBLEMS]
    monkeypatch.setattr(problems, "PROBLEMS", counted)
    design = draw(1, 50, 2)
    design[:, 1] = design[:, 0] + 1e-4 * draw(2, 50)  # collinear, and so weak and negative too
    fit = tacit.fit(equations(design, signal * draw(3, 50)))
    assert len(fit.problems) == (2 if signal else 1)
    # No signal hides all others.
    assert sum(calls.values()) == (len(PROBLEMS) if signal else 1)
    assert max(calls.values()) == 1


def test_problems_are_reported_in_the_order_of_gravity():
    objective = partly_trained(402)
    candidates = [tacit.l2(), tacit.l2(name="copy"), random_direction("other", 3)]
    kinds = problem_kinds(tacit.fit(tacit.endpoint_equations(objective, candidates)))
    assert len(set(kinds)) > 1
    assert kinds == sorted(kinds, key=list(ProblemKind).index)


def test_every_problem_has_a_remedy():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2(), tacit.l2(name="copy")]))
    assert {"unexplained", "unidentified"} <= set(problem_kinds(fit))
    for problem in fit.problems:
        assert problem.message.endswith(".")
        assert len(problem.remedy) > 20


def test_a_collinear_pair_is_named_and_dropping_one_of_it_solves_the_problem():
    design = draw(0, 200, 3)
    design[:, 2] = design[:, 1] * 5 + 1e-4 * draw(1, 200)
    target = design[:, :2].sum(1) + 0.1 * draw(2, 200)
    fit = tacit.fit(equations(design, target))
    assert problem_rows(fit)[0] == ["nearly_dependent"]
    assert set(fit.problems[0].names) == {"r1", "r2"}
    assert not tacit.fit(equations(design[:, :2], target)).problems


def test_an_exact_fit_of_nearly_collinear_columns_is_not_reported_as_collinear():
    design = draw(3, 200, 2)
    design[:, 1] = design[:, 0] + 1e-3 * draw(4, 200)
    fit = tacit.fit(equations(design, design @ torch.tensor([1.0, 2.0]).double()))
    assert fit.condition > 1e3
    assert not fit.problems
    assert list(fit.strengths.values()) == pytest.approx([1, 2], rel=1e-9)


def test_three_dependent_columns_are_named_together():
    design = draw(5, 200, 4)
    design[:, 3] = design[:, 0] - design[:, 1]
    fit = tacit.fit(equations(design, design[:, 0] + design[:, 2]))
    (problem,) = [p for p in fit.problems if p.kind == "unidentified"]
    assert set(problem.names) == {"r0", "r1", "r3"}
    assert "least norm" in problem.message
    assert fit.condition == float("inf")
    assert fit.inflation["r2"] == pytest.approx(1, abs=0.1)


def test_smooth_l1_and_ridge_collapse_when_all_weights_are_small():
    torch.manual_seed(6)
    model, data = nn.Linear(5, 3).double(), random_data(6, outputs=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-4)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.smooth_l1(1e-1)])
    (problem,) = [p for p in fit.problems if p.kind == "unidentified"]  # reported once
    assert "smoothing width" in problem.message
    assert set(problem.names) == {"l2", "smooth_l1"}
    narrow = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.smooth_l1(1e-5)])
    assert "unidentified" not in problem_kinds(narrow)


def test_other_columns_of_cosine_near_one_are_not_reported_as_collapsed():
    design = draw(7, 200, 2)
    design[:, 1] = design[:, 0] + 0.01 * draw(8, 200)
    fit = tacit.fit(equations(design, design[:, 0] + draw(9, 200)))
    (problem,) = [p for p in fit.problems if p.kind == "unidentified"]
    assert "nearly cancel" in problem.message


def test_unexplained_names_both_causes_at_an_endpoint():
    design = draw(10, 200, 2)
    fit = tacit.fit(equations(design, design[:, 0] + 3 * draw(11, 200)))
    assert problem_kinds(fit)[0] == "unexplained"
    assert "another regularizer" in fit.problems[0].remedy
    assert "training had not finished" in fit.problems[0].remedy
    assert "unexplained" not in problem_kinds(
        tacit.fit(equations(design, design[:, 0] + 0.05 * draw(11, 200)))
    )


def test_a_negative_strength_is_reported_unless_it_is_negligible():
    design = draw(12, 200, 2)
    negative = tacit.fit(equations(design, design @ torch.tensor([1.0, -0.5]).double()))
    assert problem_kinds(negative) == ["negative"]
    assert negative.problems[0].names == ("r1",)
    negligible = tacit.fit(equations(design, design @ torch.tensor([1.0, -1e-5]).double()))
    assert not negligible.problems


def test_a_nonnegative_fit_reports_strengths_held_at_zero():
    design = draw(13, 200, 2)
    fit = tacit.fit(
        equations(design, design @ torch.tensor([1.0, -0.5]).double()), nonnegative=True
    )
    assert fit.strengths["r1"] == 0
    assert problem_kinds(fit) == ["unexplained", "negative"]
    assert "is zero, where the unconstrained fit has" in fit.problems[1].message
    assert "-0.5" in fit.problems[1].message


def test_an_indefinite_matrix_is_reported():
    X, y = random_data(14, inputs=4)
    model = nn.Linear(4, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.diagonal()]))
    assert bool((fit.matrix().diagonal() < 0).any())
    (problem,) = [p for p in fit.problems if p.kind == "negative"]  # not each negative entry
    assert "eigenvalues" in problem.message


def test_a_column_of_zeros_is_reported_and_its_strength_is_zero():
    model, data = tanh_mlp(15), random_data(15)
    current = dict(model.named_parameters())
    fit = tacit.estimate(
        model, F.mse_loss, data, [tacit.l2(), tacit.regularizers.distance_to(current)]
    )
    (problem,) = [p for p in fit.problems if p.kind == "unidentified"]
    assert problem.names == ("distance_to",)
    assert "is zero at these weights" in problem.message
    assert fit.strengths["distance_to"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_an_unpenalised_optimum_has_no_signal(dtype, seed):
    X, y = random_data(seed, count=100, inputs=8)
    theta = torch.linalg.lstsq(X, y).solution.T.to(dtype)
    model = nn.Linear(8, 1, bias=False).to(dtype)
    objective = tacit.Objective(model, F.mse_loss, (X.to(dtype), y.to(dtype)))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert problem_kinds(fit) == ["no signal"]
    assert "not mean that there was no regularization" in fit.problems[0].remedy


@pytest.mark.parametrize("seed", range(5))
def test_an_interpolating_model_in_float32_has_no_signal(seed):
    X, y = random_data(seed, count=6, inputs=20)
    theta = torch.linalg.lstsq(X, y).solution.T.float()
    model = nn.Linear(20, 1, bias=False)
    objective = tacit.Objective(model, F.mse_loss, (X.float(), y.float()))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert problem_kinds(fit) == ["no signal"]


@pytest.mark.parametrize("strength", [1e-6, 1e-4])
def test_a_small_ridge_is_recovered_without_problems(strength):
    X, y = random_data(16, count=100, inputs=8)
    gram = X.T @ X / 100 + strength * torch.eye(8).double()
    theta = torch.linalg.solve(gram, X.T @ y / 100).T
    model = nn.Linear(8, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert not fit.problems
    assert fit.strengths["l2"] == pytest.approx(strength, rel=1e-6)


def test_ridge_of_a_model_of_zeros_is_vanishing():
    model = nn.Linear(5, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    fit = tacit.estimate(model, F.mse_loss, random_data(17), [tacit.l2()])
    assert any("is zero at these weights" in problem.message for problem in fit.problems)


def beside_unexplained(fit):
    """The problems without the one that one step does not tell its noise."""
    return [p for p in fit.problems if p.kind != "unexplained"]


def test_a_strength_below_the_unexplained_part_is_faint():
    design = draw(20, 200, 2)
    target = design @ torch.tensor([1.0, 0.04]).double() + 0.1 * draw(21, 200)
    fit = tacit.fit(equations(design, target, mode="trajectory"))
    (problem,) = beside_unexplained(fit)
    assert (problem.kind, problem.names) == ("weak", ("r1",))
    assert problem_rows(fit)[-1] == ["faint"]
    assert "order of magnitude" in problem.remedy
    smaller = design @ torch.tensor([1.0, 0.01]).double() + 0.1 * draw(21, 200)
    problems = beside_unexplained(tacit.fit(equations(design, smaller, mode="trajectory")))
    assert [(p.kind, p.names) for p in problems] == [("weak", ("r1",))]  # reported once
    assert "a random direction" in problems[0].message
    larger = design @ torch.tensor([1.0, 0.5]).double() + 0.1 * draw(21, 200)
    assert not beside_unexplained(tacit.fit(equations(design, larger, mode="trajectory")))


def test_what_a_column_adds_is_measured_apart_from_the_others():
    """Of two columns with cosine 0.98, each adds a fifth of its length."""
    design = draw(22, 200, 2)
    design[:, 1] = design[:, 0] + 0.2 * design[:, 1]
    target = design.sum(1) + 0.3 * draw(23, 200)
    problems = tacit.fit(equations(design, target)).problems
    assert {p.names for p in problems if "beyond the others" in p.message} == {("r0",), ("r1",)}
    independent = draw(22, 200, 2)
    target = independent.sum(1) + 0.3 * draw(23, 200)
    assert not beside_unexplained(tacit.fit(equations(independent, target, mode="trajectory")))


def test_faint_considers_only_the_rows_of_a_column():
    """A layer that is fitted badly does not make the strength of an exact layer faint."""
    whole = equations(draw(24, 200, 2), draw(25, 200))
    blocks = [
        replace(whole.blocks[0], layer=layer, columns=(column,), rows=99, factor=torch.tensor(rows))
        for layer, column, rows in (
            ("a", 0, [[1.0, 0.01], [0.0, 0.0]]), ("b", 1, [[1.0, 1.0], [0.0, 0.8]]),
        )
    ]  # fmt: skip
    exact = [replace(block, factor=block.factor.double()) for block in blocks]
    fit = tacit.fit(replace(whole, blocks=tuple(exact)))
    assert list(fit.strengths.values()) == pytest.approx([0.01, 1])
    assert not reports(fit, "faint")
    exact[0] = replace(exact[0], factor=torch.tensor([[1.0, 0.01], [0.0, 0.02]]).double())
    assert reports(tacit.fit(replace(whole, blocks=tuple(exact))), "faint")


def test_a_nearly_collinear_pair_is_named_beside_an_exact_one():
    X, y = random_data(8, count=80)
    model = tanh_mlp(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lasso = tacit.smooth_l1(0.1)
    for _ in range(400):
        optimizer.zero_grad()
        penalty = 0.01 * lasso.value(dict(model.named_parameters())).sum()
        (F.mse_loss(model(X), y) + penalty).backward()
        optimizer.step()
    copies = [tacit.l2(), tacit.l2(name="copy"), lasso, tacit.smooth_l1(0.101, name="near")]
    fit = tacit.estimate(model, F.mse_loss, (X, y), copies)
    pairs = {frozenset(p.names) for p in fit.problems if p.kind == "unidentified"}
    assert pairs == {frozenset({"l2", "copy"}), frozenset({"smooth_l1", "near"})}
    assert not any(p.kind == "weak" and "smooth_l1" in p.names for p in fit.problems)
    # Which of two opposite columns is negative is arbitrary, so the sign is not reported.
    down = tacit.regularizer("down", lambda p: -sum(t.square().sum() for t in p.values()))
    opposite = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2(), down])
    assert not any(p.kind == "negative" for p in opposite.problems)


def test_a_good_fit_in_bfloat16_is_not_reported_as_no_signal():
    torch.manual_seed(5)
    X, y = random_data(5, count=400, inputs=300)
    strength = 0.3
    gram = X.T @ X / 400 + strength * torch.eye(300).double()
    theta = torch.linalg.solve(gram, X.T @ y / 400).T
    model = nn.Linear(300, 1, bias=False).bfloat16()
    objective = tacit.Objective(model, F.mse_loss, (X.bfloat16(), y.bfloat16()))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert fit.explained > 0.95
    assert "no signal" not in problem_kinds(fit)
    assert fit.strengths["l2"] == pytest.approx(strength, rel=0.05)


def test_a_strength_of_zero_in_an_exact_fit_is_no_problem():
    model, data = tanh_mlp(1), random_data(1)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    idle = random_direction("idle", 1)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.smooth_l1(1e-2), idle])
    assert abs(fit.shares["idle"]) < 1e-6
    assert not fit.problems


def test_a_negative_sign_is_not_reported_for_what_chance_explains():
    design = draw(1, 200, 2)
    target = design[:, 0] - 0.01 * design[:, 1] + 0.3 * draw(2, 200)
    fit = tacit.fit(equations(design, target))
    assert fit.strengths["r1"] < 0
    assert problem_kinds(fit) == ["unexplained", "weak"]
    assert reports(fit, "chance_in_residual")
    assert "leave it out" in fit.problems[1].remedy
    clear_target = design[:, 0] - 0.5 * design[:, 1] + 0.3 * draw(2, 200)
    assert problem_kinds(tacit.fit(equations(design, clear_target)))[-1] == "negative"


@pytest.mark.parametrize("seed", range(6))
def test_a_nonnegative_fit_separates_negative_strengths_from_chance(seed):
    design = draw(30 + seed, 200, 3)
    target = design @ torch.tensor([1.0, -0.5, 0.0]).double() + 0.1 * draw(40 + seed, 200)
    fit = tacit.fit(equations(design, target), nonnegative=True)
    assert problem_kinds(fit, "r1") == ["unexplained", "negative"]
    assert [row[0][:6] for row in problem_rows(fit, "r2")[1:]] == ["chance"]
    assert problem_kinds(fit, "r0") == ["unexplained"]


def test_single_entries_of_matrices_are_not_reported_as_chance():
    objective, family = partly_trained(401), tacit.regularizers.diagonal(scope="4.bias")
    fit = tacit.fit(tacit.endpoint_equations(objective, [family]))
    assert "weak" not in problem_kinds(fit)


def collinear_candidates(model):
    """Candidates that are collinear with l2 at this model, and the names of the collinear group."""
    current = {n: p.detach().clone() for n, p in model.named_parameters()}
    zeros = {n: torch.zeros_like(p) for n, p in current.items()}
    center = {n: 1e-4 * draw(5 + i, *p.shape) for i, (n, p) in enumerate(current.items())}

    def distance(params):
        return sum((p - center[n]).square().sum() for n, p in params.items())

    return {
        "distance": ([tacit.regularizers.distance_to(zeros)], {"l2", "distance_to"}),
        "scaled": ([tacit.regularizer("half", lambda p: distance(p) / 2)], {"l2", "half"}),
        "layers": ([tacit.layerwise(tacit.l2())], {"l2", "l2[0]", "l2[2]", "l2[4]"}),
    }


@pytest.mark.parametrize("case", ["distance", "scaled", "layers"])
def test_only_collinear_columns_are_named_and_dropping_any_one_solves_the_problem(case):
    objective = partly_trained(410)
    added, collinear = collinear_candidates(objective.model)[case]
    unrelated = [tacit.smooth_l1(1e-1), random_direction("other", 3)]
    system = tacit.endpoint_equations(objective, [tacit.l2(), *unrelated, *added])
    (problem,) = [p for p in tacit.fit(system).problems if p.kind == "unidentified"]
    assert set(problem.names) == collinear
    assert not any("weak" in problem_kinds(tacit.fit(system), name) for name in collinear)
    for dropped in collinear:
        others = [i for i, name in enumerate(system.names) if name != dropped]
        assert "unidentified" not in problem_kinds(tacit.fit(system.select_columns(others)))


def test_a_combination_is_written_with_its_coefficients():
    design = draw(6, 100, 4)
    design[:, 2] = 5 * design[:, 0]
    exact = tacit.fit(equations(design, draw(7, 100)))
    (problem,) = [p for p in exact.problems if p.kind == "unidentified"]
    assert problem.names == ("r0", "r2")
    assert "1.00·r0 − 1.00·r2 = 0" in problem.message.replace(
        "−1.00·r0 + 1.00·r2", "1.00·r0 − 1.00·r2"
    )
    design[:, 2] = design[:, 0] + design[:, 1] + 1e-3 * draw(8, 100)
    near = tacit.fit(equations(design, draw(7, 100)))
    (problem,) = [p for p in near.problems if p.kind == "unidentified"]
    assert set(problem.names) == {"r0", "r1", "r2"}
    assert problem.names[0] == "r2"  # the largest coefficient first: it is the one to drop
    unit = design[:, :3].norm(dim=0) / design[:, 2].norm()
    for column in (0, 1):
        assert f"{float(unit[column]):.2f}·r{column}" in problem.message
    assert "1.00·r2" in problem.message
    assert f"{near.inflation['r2']:.2g}" in problem.message


@pytest.mark.parametrize("distance", [0.0, 1e-4])
def test_two_pairs_are_two_problems(distance):
    """Their singular values are equal, so that singular vectors mix the pairs."""
    design = draw(9, 100, 5)
    design[:, 1] = -2 * design[:, 0] + distance * draw(10, 100)
    design[:, 4] = 3 * design[:, 3] + distance * draw(11, 100)
    problems = tacit.fit(equations(design, draw(12, 100))).problems
    pairs = {p.names for p in problems if p.kind == "unidentified"}
    assert pairs == {("r0", "r1"), ("r3", "r4")}


def test_collapsed_pairs_are_named_where_equations_are_too_few():
    """Six pairs in nine rows: both remedies help, more endpoints and a smaller beta."""
    rows = torch.eye(9, 12, dtype=torch.float64)
    rows[:, 6:] = rows[:, :6]
    kinds = ["l2"] * 6 + ["smooth_l1"] * 6
    fit = tacit.fit(equations(rows[:, :12], draw(30, 9), kinds=kinds))
    assert reports(fit, "underdetermined")
    assert sum(row == ["collapsed"] for row in problem_rows(fit)) == 6
    assert "weak" not in problem_kinds(fit)


def test_all_negative_strengths_are_one_problem():
    design = draw(31, 300, 10)
    fit = tacit.fit(equations(design, -design.sum(1)))
    (problem,) = fit.problems
    assert problem.names == fit.equations.names
    assert "comes out as -1, -1, -1, -1, -1, -1 and 4 more" in problem.message


def test_a_strength_that_rounding_changes_is_reported_also_where_it_explains_nearly_all():
    """Explained by 99 %, so that there is a signal; but rounding is half as large as the target."""
    column = draw(3, 12)
    target = column + 0.1 * draw(4, 12)
    system = equations(column[:, None], target)
    length = float(target.norm())

    def kinds(part):
        blocks = tuple(replace(block, floor=part * length) for block in system.blocks)
        return [problem.kind for problem in tacit.fit(replace(system, blocks=blocks)).problems]

    assert kinds(0.5) == [ProblemKind.NOISY]  # 0.5/√12 is 14 % of the target
    assert ProblemKind.NOISY not in kinds(0.1)  # 3 %
