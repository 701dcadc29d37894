"""Weak evidence is said in words, and good fits carry none."""

from dataclasses import replace

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.systems import equations
from torch import nn
from torch.nn import functional as F

import tacit


def kinds(fit):
    return [problem.kind for problem in fit.problems]


def columns(seed, count, rows=200):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, generator=generator, dtype=torch.float64)


def noise(seed, rows=200):
    return columns(seed, 1, rows)[:, 0]


def test_every_problem_says_what_to_do():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    found = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2(), tacit.l2(name="twin")]))
    assert {"unexplained", "collinear"} <= set(kinds(found))
    for problem in found.problems:
        assert problem.message.endswith(".")
        assert len(problem.remedy) > 20


def test_a_collinear_pair_is_named_by_both_members_and_dropping_one_clears_it():
    design = columns(0, 3)
    design[:, 2] = design[:, 1] * 5 + 1e-4 * noise(1)
    target = design[:, :2].sum(1) + 0.1 * noise(2)
    found = tacit.fit(equations(design, target))
    assert kinds(found)[0] == "collinear"
    assert set(found.problems[0].names) == {"r1", "r2"}
    assert not tacit.fit(equations(design[:, :2], target)).problems


def test_an_exact_fit_of_nearly_collinear_columns_is_not_called_collinear():
    design = columns(3, 2)
    design[:, 1] = design[:, 0] + 1e-3 * noise(4)
    found = tacit.fit(equations(design, design @ torch.tensor([1.0, 2.0]).double()))
    assert found.condition > 1e3
    assert not found.problems
    assert list(found.strengths.values()) == pytest.approx([1, 2], rel=1e-9)


def test_three_dependent_columns_are_named_together():
    design = columns(5, 4)
    design[:, 3] = design[:, 0] - design[:, 1]
    found = tacit.fit(equations(design, design[:, 0] + design[:, 2]))
    (problem,) = [p for p in found.problems if p.kind == "collinear"]
    assert set(problem.names) == {"r0", "r1", "r3"}
    assert "least norm" in problem.message
    assert found.condition == float("inf")
    assert found.inflation["r2"] == pytest.approx(1, abs=0.1)


def test_smooth_l1_and_ridge_collapse_when_all_weights_are_small():
    torch.manual_seed(6)
    model, data = nn.Linear(5, 3).double(), random_data(6, outputs=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-4)
    found = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.smooth_l1(1e-1)])
    assert "collapsed" in kinds(found)
    assert "collinear" not in kinds(found)  # said once
    (problem,) = [p for p in found.problems if p.kind == "collapsed"]
    assert set(problem.names) == {"l2", "smooth_l1"}
    wide = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.smooth_l1(1e-5)])
    assert "collapsed" not in kinds(wide)


def test_other_columns_of_cosine_near_one_are_not_called_collapsed():
    design = columns(7, 2)
    design[:, 1] = design[:, 0] + 0.01 * noise(8)
    found = tacit.fit(equations(design, design[:, 0] + noise(9)))
    assert "collapsed" not in kinds(found)
    assert "collinear" in kinds(found)


def test_unexplained_names_both_causes_at_an_endpoint():
    design = columns(10, 2)
    found = tacit.fit(equations(design, design[:, 0] + 3 * noise(11)))
    assert kinds(found)[0] == "unexplained"
    assert "another regularizer" in found.problems[0].remedy
    assert "training had not finished" in found.problems[0].remedy
    assert "unexplained" not in kinds(tacit.fit(equations(design, design[:, 0] + 0.5 * noise(11))))


def test_a_negative_strength_is_said_and_a_hair_below_zero_is_not():
    design = columns(12, 2)
    below = tacit.fit(equations(design, design @ torch.tensor([1.0, -0.5]).double()))
    assert kinds(below) == ["negative"]
    assert below.problems[0].names == ("r1",)
    hair = tacit.fit(equations(design, design @ torch.tensor([1.0, -1e-5]).double()))
    assert not hair.problems


def test_a_nonnegative_fit_says_what_it_holds_at_zero():
    design = columns(13, 2)
    found = tacit.fit(
        equations(design, design @ torch.tensor([1.0, -0.5]).double()), nonnegative=True
    )
    assert found.strengths["r1"] == 0
    assert kinds(found) == ["negative"]
    assert "held at zero" in found.problems[0].message
    assert "-0.5" in found.problems[0].message


def test_an_indefinite_matrix_is_said():
    X, y = random_data(14, inputs=4)
    model = nn.Linear(4, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    found = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.diagonal()]))
    assert ("indefinite" in kinds(found)) == bool((found.matrix().diagonal() < 0).any())
    assert "negative" not in kinds(found)
    assert bool((found.matrix().diagonal() < 0).any())


def test_a_column_that_vanishes_is_said_and_its_strength_is_zero():
    model, data = tanh_mlp(15), random_data(15)
    here = dict(model.named_parameters())
    found = tacit.estimate(
        model, F.mse_loss, data, [tacit.l2(), tacit.regularizers.distance_to(here)]
    )
    (problem,) = [p for p in found.problems if p.kind == "vanishing"]
    assert problem.names == ("distance_to",)
    assert found.strengths["distance_to"] == 0
    assert "collinear" not in kinds(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_an_unpenalised_optimum_has_no_signal(dtype, seed):
    X, y = random_data(seed, count=100, inputs=8)
    theta = torch.linalg.lstsq(X, y).solution.T.to(dtype)
    model = nn.Linear(8, 1, bias=False).to(dtype)
    objective = tacit.Objective(model, F.mse_loss, (X.to(dtype), y.to(dtype)))
    found = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert kinds(found) == ["no signal"]
    assert "not mean that there was no regularization" in found.problems[0].remedy


@pytest.mark.parametrize("seed", range(5))
def test_an_interpolating_model_in_float32_has_no_signal(seed):
    X, y = random_data(seed, count=6, inputs=20)
    theta = torch.linalg.lstsq(X, y).solution.T.float()
    model = nn.Linear(20, 1, bias=False)
    objective = tacit.Objective(model, F.mse_loss, (X.float(), y.float()))
    found = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert kinds(found) == ["no signal"]


@pytest.mark.parametrize("strength", [1e-6, 1e-4])
def test_a_faint_ridge_is_still_a_signal(strength):
    X, y = random_data(16, count=100, inputs=8)
    gram = X.T @ X / 100 + strength * torch.eye(8).double()
    theta = torch.linalg.solve(gram, X.T @ y / 100).T
    model = nn.Linear(8, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    found = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert not found.problems
    assert found.strengths["l2"] == pytest.approx(strength, rel=1e-6)


def test_a_model_of_zeros_says_that_ridge_cannot_be_seen():
    model = nn.Linear(5, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    found = tacit.estimate(model, F.mse_loss, random_data(17), [tacit.l2()])
    assert "vanishing" in kinds(found)


def test_a_strength_below_what_stays_unexplained_is_called_faint():
    design = columns(20, 2)
    target = design @ torch.tensor([1.0, 0.04]).double() + 0.1 * noise(21)
    found = tacit.fit(equations(design, target))
    assert [(p.kind, p.names) for p in found.problems] == [("faint", ("r1",))]
    assert "order of magnitude" in found.problems[0].remedy
    fainter = design @ torch.tensor([1.0, 0.01]).double() + 0.1 * noise(21)
    problems = tacit.fit(equations(design, fainter)).problems
    assert [(p.kind, p.names) for p in problems] == [("chance", ("r1",))]  # said once
    louder = design @ torch.tensor([1.0, 0.5]).double() + 0.1 * noise(21)
    assert not tacit.fit(equations(design, louder)).problems


def test_what_a_column_adds_is_measured_apart_from_the_others():
    """Two columns of cosine .98: what each adds on its own is a fifth of its length."""
    design = columns(22, 2)
    design[:, 1] = design[:, 0] + 0.2 * design[:, 1]
    target = design.sum(1) + 0.3 * noise(23)
    problems = tacit.fit(equations(design, target)).problems
    assert {p.names for p in problems if p.kind == "faint"} == {("r0",), ("r1",)}
    apart = columns(22, 2)
    assert not tacit.fit(equations(apart, apart.sum(1) + 0.3 * noise(23))).problems


def test_faint_looks_at_the_rows_of_a_column_alone():
    """One layer fitted exactly, another badly: the first one's strength is none the less sure."""
    whole = equations(columns(24, 2), noise(25))
    blocks = [
        replace(whole.blocks[0], layer=layer, columns=(column,), rows=99, factor=torch.tensor(rows))
        for layer, column, rows in (
            ("a", 0, [[1.0, 0.01], [0.0, 0.0]]), ("b", 1, [[1.0, 1.0], [0.0, 0.8]]),
        )
    ]  # fmt: skip
    exact = [replace(block, factor=block.factor.double()) for block in blocks]
    found = tacit.fit(replace(whole, blocks=tuple(exact)))
    assert list(found.strengths.values()) == pytest.approx([0.01, 1])
    assert "faint" not in kinds(found)
    exact[0] = replace(exact[0], factor=torch.tensor([[1.0, 0.01], [0.0, 0.02]]).double())
    assert "faint" in kinds(tacit.fit(replace(whole, blocks=tuple(exact))))


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
    pairs = {frozenset(p.names) for p in fit.problems if p.kind == "collinear"}
    assert pairs == {frozenset({"l2", "copy"}), frozenset({"smooth_l1", "near"})}
    assert not any(p.kind == "chance" and "smooth_l1" in p.names for p in fit.problems)
    # Which of two opposite columns is negative is arbitrary, so the sign is not reported.
    down = tacit.regularizer("down", lambda p: -sum(t.square().sum() for t in p.values()))
    opposite = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2(), down])
    assert not any(p.kind == "negative" for p in opposite.problems)
