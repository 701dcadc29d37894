"""Regularizers that cannot be told apart, or from chance, are named; the others are not."""

from functools import cache

import pytest
import torch
from support.models import minimise, random_data, tanh_mlp
from support.systems import draw, equations
from torch.nn import functional as F

import tacit
from tacit.fitting.shares import unique_shares


def kinds(fit, name=None):
    return [p.kind for p in fit.problems if name is None or name in p.names]


def direction(name, seed, scope=None):
    """A penalty whose gradient is one random direction."""

    def value(params):
        generator = torch.Generator().manual_seed(seed)
        return sum(
            (p * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum()
            for p in params.values()
        )

    return tacit.regularizer(name, value, scope=scope)


@cache
def partly_trained(seed):
    """A network after some steps of Adam with weight decay: real gradients, nothing exact."""
    model, data = tanh_mlp(seed, (5, 10, 6, 1)), random_data(seed)
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(20 * (1 + seed % 5)):
        steps.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        steps.step()
    return tacit.Objective(model, F.mse_loss, data)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), ("l2",), ("l2", "smooth_l1")], ids=len)
def test_a_random_direction_is_called_chance_in_all_but_one_of_a_hundred_trials(beside):
    """1,000 trials, 20 networks; an alarm is a fit that does not call the direction chance."""
    alarms, trials = 0, 0
    for seed in range(400, 420):
        names = [f"random {i}" for i in range(50)]
        families = [direction(name, 1000 * seed + i) for i, name in enumerate(names)]
        candidates = [tacit.l2(), tacit.smooth_l1(1e-1), *families]
        given = tacit.endpoint_equations(partly_trained(seed), candidates)
        others = [given.names.index(name) for name in beside]
        for name in names:
            found = tacit.fit(given.select_columns([*others, given.names.index(name)]))
            alarms += "chance" not in kinds(found, name) and "no signal" not in kinds(found)
            trials += 1
    assert trials == 1000
    assert alarms <= 20  # 10 expected; 50 would be five in a hundred


@pytest.mark.parametrize("scope", ["0", "*.weight"])
def test_a_random_direction_in_a_scope_is_called_chance_too(scope):
    alarms = 0
    for seed in range(430, 434):
        families = [direction(f"random {i}", 1000 * seed + i, scope) for i in range(50)]
        given = tacit.endpoint_equations(partly_trained(seed), [tacit.l2(), *families])
        for index in range(1, 51):
            found = tacit.fit(given.select_columns([0, index]))
            alarms += "chance" not in kinds(found, given.names[index])
    assert alarms <= 7  # of 200


def test_chance_is_not_said_of_penalties_that_were_at_work():
    """At the optimum every part of the fit is unique; some way before it, far beyond chance."""
    model, data = tanh_mlp(0), random_data(0)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2, tacit.smooth_l1(1e-2): 1e-3})
    pair = [tacit.l2(), tacit.smooth_l1(1e-2)]
    assert not tacit.estimate(model, F.mse_loss, data, pair).problems
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn_like(parameter)
    near = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    assert near.residual_ratio > 1e-2
    assert "chance" not in kinds(near)


def test_a_strength_of_nothing_in_an_exact_fit_is_no_problem():
    model, data = tanh_mlp(1), random_data(1)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    idle = direction("idle", 1)
    found = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.smooth_l1(1e-2), idle])
    assert abs(found.shares["idle"]) < 1e-6
    assert not found.problems


def test_the_sign_of_what_chance_explains_is_not_spoken_of():
    design = draw(1, 200, 2)
    target = design[:, 0] - 0.01 * design[:, 1] + 0.3 * draw(2, 200)
    found = tacit.fit(equations(design, target))
    assert found.strengths["r1"] < 0
    assert kinds(found) == ["chance"]
    assert "leave it out" in found.problems[0].remedy
    below = design[:, 0] - 0.5 * design[:, 1] + 0.3 * draw(2, 200)
    assert kinds(tacit.fit(equations(design, below))) == ["negative"]


@pytest.mark.parametrize("seed", range(6))
def test_chance_in_a_nonnegative_fit_is_said_of_what_is_held_at_zero_and_what_is_not(seed):
    design = draw(30 + seed, 200, 3)
    target = design @ torch.tensor([1.0, -0.5, 0.0]).double() + 0.1 * draw(40 + seed, 200)
    found = tacit.fit(equations(design, target), nonnegative=True)
    assert kinds(found, "r1") == ["negative"]
    assert kinds(found, "r2") == ["chance"]
    assert kinds(found, "r0") == []


def test_entries_of_matrices_are_not_judged_one_by_one():
    objective = partly_trained(401)
    one = tacit.regularizers.diagonal(scope="4.bias")
    found = tacit.fit(tacit.endpoint_equations(objective, [one]))
    assert "chance" not in kinds(found)


def candidates(model):
    """Families of which pairs or groups are the same penalty here, exactly or nearly."""
    here = {n: p.detach().clone() for n, p in model.named_parameters()}
    zeros = {n: torch.zeros_like(p) for n, p in here.items()}
    near = {n: 1e-4 * draw(5 + i, *p.shape) for i, (n, p) in enumerate(here.items())}

    def copy(params):
        return sum((p - near[n]).square().sum() for n, p in params.items())

    return {
        "distance": ([tacit.regularizers.distance_to(zeros)], {"l2", "distance_to"}),
        "scaled": ([tacit.regularizer("half", lambda p: copy(p) / 2)], {"l2", "half"}),
        "layers": ([tacit.layerwise(tacit.l2())], {"l2", "l2[0]", "l2[2]", "l2[4]"}),
    }


@pytest.mark.parametrize("case", ["distance", "scaled", "layers"])
def test_exactly_the_collinear_are_named_and_dropping_any_one_clears_it(case):
    objective = partly_trained(410)
    added, members = candidates(objective.model)[case]
    others = [tacit.smooth_l1(1e-1), direction("other", 3)]
    given = tacit.endpoint_equations(objective, [tacit.l2(), *others, *added])
    (problem,) = [p for p in tacit.fit(given).problems if p.kind == "collinear"]
    assert set(problem.names) == members
    assert not any("chance" in kinds(tacit.fit(given), name) for name in members)
    for member in members:
        kept = [i for i, name in enumerate(given.names) if name != member]
        assert "collinear" not in kinds(tacit.fit(given.select_columns(kept)))


def test_a_combination_is_written_with_its_coefficients():
    design = draw(6, 100, 4)
    design[:, 2] = 5 * design[:, 0]
    exact = tacit.fit(equations(design, draw(7, 100)))
    (problem,) = [p for p in exact.problems if p.kind == "collinear"]
    assert problem.names == ("r0", "r2")
    assert "1.00·r0 − 1.00·r2 = 0" in problem.message.replace(
        "−1.00·r0 + 1.00·r2", "1.00·r0 − 1.00·r2"
    )
    design[:, 2] = design[:, 0] + design[:, 1] + 1e-3 * draw(8, 100)
    near = tacit.fit(equations(design, draw(7, 100)))
    (problem,) = [p for p in near.problems if p.kind == "collinear"]
    assert set(problem.names) == {"r0", "r1", "r2"}
    assert problem.names[0] == "r2"  # the largest part first: it is the one to drop
    unit = design[:, :3].norm(dim=0) / design[:, 2].norm()
    for column in (0, 1):
        assert f"{float(unit[column]):.2f}·r{column}" in problem.message
    assert "1.00·r2" in problem.message
    assert f"{near.inflation['r2']:.2g}" in problem.message


@pytest.mark.parametrize("apart", [0.0, 1e-4])
def test_two_pairs_are_two_problems(apart):
    """Their singular values are alike, and singular vectors then mix the pairs."""
    design = draw(9, 100, 5)
    design[:, 1] = -2 * design[:, 0] + apart * draw(10, 100)
    design[:, 4] = 3 * design[:, 3] + apart * draw(11, 100)
    problems = tacit.fit(equations(design, draw(12, 100))).problems
    found = {p.names for p in problems if p.kind == "collinear"}
    assert found == {("r0", "r1"), ("r3", "r4")}


def test_what_a_collinear_member_adds_on_its_own_is_nothing():
    design = draw(15, 50, 2)
    twins = equations(design[:, [0, 0, 1]], design.sum(1))
    shares = unique_shares(twins)
    assert [shares["r0"], shares["r1"]] == pytest.approx([0, 0], abs=1e-12)
    assert shares["r2"] > 0.1
