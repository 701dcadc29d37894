"""Fits under Λ ⪰ 0 agree with a conic solver, and say what the constraint costs."""

import math

import clarabel
import numpy as np
import pytest
import torch
from scipy import sparse
from support.bad_calls import assert_refused
from support.scoring import strengths_of
from support.systems import draw, equations, reports
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations.sources import Family
from tacit.fitting.semidefinite import solve_semidefinite
from tacit.fitting.solving import System
from tacit.regularizers.quadratic import quadratic_matrix


def conic_solution(design, target, orders):
    """The strengths by Clarabel: min ½‖r‖², r = design · x − target, first columns in cones.

    Its triangles go down columns; those of `symmetric()` go along rows.
    """
    rows, count = design.shape
    quadratic = sparse.block_diag([sparse.csc_matrix((count, count)), sparse.eye(rows)])
    residual = sparse.hstack([sparse.csc_matrix(design.numpy()), -sparse.eye(rows)])
    selected, start = [], 0
    for n in orders:
        place = {pair: i for i, pair in enumerate((i, j) for i in range(n) for j in range(i, n))}
        selected += [start + place[i, j] for j in range(n) for i in range(j + 1)]
        start += n * (n + 1) // 2
    in_cone = -sparse.eye(count + rows).tocsr()[selected]
    cones = [clarabel.ZeroConeT(rows), *map(clarabel.PSDTriangleConeT, orders)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
    solver = clarabel.DefaultSolver(
        quadratic.tocsc(),
        np.zeros(count + rows),
        sparse.vstack([residual, in_cone]).tocsc(),
        np.concatenate([target.numpy(), np.zeros(start)]),
        cones,
        settings,
    )
    return torch.from_numpy(np.array(solver.solve().x)[:count])


def conic_system(seed):
    """A random system: some with two matrices, free columns, few rows, equal or scaled columns."""
    generator = torch.Generator().manual_seed(seed)
    orders = [int(n) for n in torch.randint(1, 7, (1 + seed % 2,), generator=generator)]
    inside = sum(n * (n + 1) // 2 for n in orders)
    count = inside + seed % 3
    rows = (count + 9, max(1, count // 2), 3 * count)[seed // 2 % 3]
    design = torch.randn(rows, count, generator=generator, dtype=torch.float64)
    if seed % 5 == 1:
        design[:, -1] = design[:, 0]
    if seed % 5 == 2:
        scales = torch.empty(count, dtype=torch.float64).uniform_(-3, 3, generator=generator)
        design = design * 10**scales
    return design, torch.randn(rows, generator=generator, dtype=torch.float64), orders


def cones_of(orders):
    ends = np.cumsum([n * (n + 1) // 2 for n in orders]).tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("seed", range(24))
def test_objective_and_optimality_conditions_agree_with_a_conic_solver(seed):
    design, target, orders = conic_system(seed)
    cones = cones_of(orders)
    strengths = solve_semidefinite(System(design), target[:, None], cones)[:, 0]
    square, scale = float(target @ target), design.norm() * target.norm()
    ours = float((design @ strengths - target).square().sum()) / square
    theirs = float((design @ conic_solution(design, target, orders) - target).square().sum())
    # Where a column of Λ is zero there may be an infimum and no minimum, which nothing reaches.
    determined = System(design).rank == design.shape[1]
    assert ours == pytest.approx(theirs / square, abs=1e-9 if determined else 1e-6)
    gradient = design.T @ (design @ strengths - target)
    for cone in cones:
        matrix, G = (quadratic_matrix(v[cone], "symmetric") for v in (strengths, gradient))
        assert torch.linalg.eigvalsh(matrix)[0] >= -1e-13 * matrix.norm()
        assert torch.linalg.eigvalsh(G)[0] >= -1e-9 * scale
        assert abs(float((matrix * G).sum())) <= (1e-10 if determined else 1e-6) * square
    rounding = torch.finfo(torch.float64).eps * design.norm() ** 2 * strengths.norm()
    assert gradient[cones[-1].stop :].abs().sum() <= 1e-12 * scale + rounding


@pytest.mark.parametrize("seed", [3, 9])
def test_few_equations_of_a_high_condition_number(seed):
    """Singular values from 1 to 1e-6, and a long Λ, on the way to which the conditions worsen."""
    design, target, orders = draw(seed, 4, 9), draw(seed + 50, 4), [3, 2]
    u, s, vh = torch.linalg.svd(design, full_matrices=False)
    design = u * torch.logspace(0, -6, len(s), dtype=torch.float64) @ vh
    strengths = solve_semidefinite(System(design), target[:, None], cones_of(orders))[:, 0]
    ours = float((design @ strengths - target).square().sum())
    theirs = float((design @ conic_solution(design, target, orders) - target).square().sum())
    assert ours <= theirs + 1e-7
    for cone in cones_of(orders):
        matrix = quadratic_matrix(strengths[cone], "symmetric")
        assert torch.linalg.eigvalsh(matrix)[0] >= -1e-13 * matrix.norm()


def test_random_systems_include_deficient_ones_and_bound_ones():
    systems = [conic_system(seed) for seed in range(24)]
    deficient = [System(design).rank < design.shape[1] for design, _, _ in systems]
    assert 8 <= sum(deficient) < 24


def matrix_equations(design, target, order, **options):
    """Equations whose first columns are a symmetric matrix."""
    size = order * (order + 1) // 2
    plain = equations(design, target, **options)
    families = (Family("symmetric", "symmetric", size), *plain.families[size:])
    return tacit.Equations(families, plain.names, plain.targets, plain.blocks, plain.sources)


def true_strengths(matrix):
    i, j = torch.triu_indices(len(matrix), len(matrix))
    return matrix[i, j] * torch.where(i == j, 1.0, 2.0).double().sqrt()


def test_a_solution_inside_the_cone_is_the_unconstrained_one_exactly():
    root, design = draw(0, 3, 3), draw(1, 30, 7)
    strengths = torch.cat([true_strengths(root @ root.T), torch.tensor([-0.7]).double()])
    system = matrix_equations(design, design @ strengths, 3, blocks=2)
    fit = tacit.fit(system, psd=True)
    assert fit.strengths == tacit.fit(system).strengths == fit.unconstrained.strengths
    assert not fit.psd_binds
    assert fit.error_bars.keys() == fit.unconstrained.error_bars.keys() == {"layers"}
    torch.testing.assert_close(fit.matrix(), root @ root.T)


def test_a_matrix_of_low_rank_is_recovered_from_exact_equations():
    root, design = draw(0, 5, 2), draw(1, 40, 15)
    fit = tacit.fit(matrix_equations(design, design @ true_strengths(root @ root.T), 5), psd=True)
    torch.testing.assert_close(fit.matrix(), root @ root.T, atol=1e-8, rtol=0)
    assert torch.linalg.eigvalsh(fit.matrix())[0] >= -1e-13
    assert not reports(fit, "held_semidefinite")


def test_a_negative_matrix_becomes_zero_and_says_so():
    design = torch.linalg.qr(draw(1, 20, 6)).Q  # G = −Aᵀb at Λ = 0 is then minus the true matrix
    target = design @ true_strengths(-torch.eye(3).double())
    fit = tacit.fit(matrix_equations(design, target, 3), psd=True)
    assert not any(fit.strengths.values())
    assert fit.explained == 0
    assert reports(fit, "held_semidefinite")
    assert fit.error_bars == {}
    assert "Λ ⪰ 0" in fit.summary()
    assert "± none: Λ ⪰ 0" in fit.summary()
    assert fit.to_dict()["psd"] is True


def test_a_target_of_zero_has_strengths_of_zero():
    fit = tacit.fit(matrix_equations(draw(0, 9, 6), torch.zeros(9).double(), 3), psd=True)
    assert not any(fit.strengths.values())


def test_groups_of_draws_are_solved_one_by_one():
    design, targets = draw(0, 12, 6), draw(1, 12, 3)
    cones = [slice(0, 6)]
    together = solve_semidefinite(System(design), targets, cones)
    for group in range(3):
        one = solve_semidefinite(System(design), targets[:, group : group + 1], cones)
        torch.testing.assert_close(together[:, group], one[:, 0])
    fit = tacit.fit(matrix_equations(design, targets, 3), psd=True)
    mean = solve_semidefinite(System(design), targets.mean(1, keepdim=True), cones)[:, 0]
    torch.testing.assert_close(strengths_of(fit), mean, atol=1e-9, rtol=0)


def test_one_endpoint_has_a_semidefinite_solution_of_small_norm():
    """One equation 2Λθ = b has many solutions; for θᵀb > 0 a positive definite one among them."""
    design = torch.zeros(2, 3).double()  # θ = (1, 0): 2Λ₁₁ = b₁ and 2Λ₁₂ = b₂
    design[0, 0], design[1, 1] = 2.0, math.sqrt(2)
    fit = tacit.fit(matrix_equations(design, torch.tensor([2.0, 1.0]).double(), 2), psd=True)
    matrix = fit.matrix()
    torch.testing.assert_close(matrix[0], torch.tensor([1.0, 0.5]).double())
    assert 0.25 <= matrix[1, 1] < 0.5  # 0.25 is the least
    assert fit.explained == pytest.approx(1, abs=1e-12)
    assert not reports(fit, "held_semidefinite")
    assert not reports(fit, "runaway")


def test_a_matrix_without_a_best_value_is_reported():
    """θ = (1, 0) with θᵀb < 0: Λθ can come near (0, b₂/2), which only an infinite Λ reaches."""
    design = torch.zeros(2, 3).double()
    design[0, 0], design[1, 1] = 2.0, math.sqrt(2)
    fit = tacit.fit(matrix_equations(design, torch.tensor([-1.0, 1.0]).double(), 2), psd=True)
    assert fit.explained == pytest.approx(0.5, abs=1e-2)
    assert reports(fit, "runaway")
    assert reports(fit, "held_semidefinite")


def test_shares_refit_under_the_same_constraint():
    design, target = draw(3, 30, 7), draw(4, 30)
    fit = tacit.fit(matrix_equations(design, target, 3), psd=True)
    without = System(design[:, 6:]).solve(target[:, None])
    alone = float((design[:, 6:] @ without)[:, 0] @ target / (target @ target))
    assert fit.unique["symmetric"] == pytest.approx(fit.explained - alone)
    assert sum(fit.shares.values()) == pytest.approx(fit.explained)
    shares = tacit.fitting.ordered_shares(fit)
    assert sum(shares.values()) == pytest.approx(fit.explained)


def early_stopped():
    """A linear model whose endpoint has an indefinite Λ of least norm."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([[1.0, -0.5, 0.2]]))
    return tacit.Objective(model, F.mse_loss, (X, X @ torch.tensor([[1.5], [0.5], [0.1]]).double()))


def test_estimate_takes_the_constraint():
    objective, matrix = early_stopped(), tacit.regularizers.symmetric()
    free = tacit.estimate(objective, matrix)
    fit = tacit.estimate(objective, matrix, psd=True, population=math.inf)
    assert torch.linalg.eigvalsh(free.matrix())[0] < -1e-3
    assert torch.linalg.eigvalsh(fit.matrix())[0] > -1e-12
    assert fit.psd_binds
    assert fit.error_bars == {}


def test_what_holds_only_for_free_fits_is_refused():
    fit = tacit.estimate(early_stopped(), tacit.regularizers.symmetric(), psd=True)
    for call in (
        lambda: tacit.score_examples(fit),
        lambda: tacit.null_distribution(fit, fit.equations.names[0]),
        lambda: tacit.identifiability.compare(fit, {"a": ["symmetric"]}),
        lambda: tacit.fitting.chance.chance(fit),
    ):
        assert_refused(call, ["Λ ⪰ 0"], "fit.unconstrained")


def test_layers_that_have_parts_of_the_matrix_are_refused():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)).double()
    X = draw(0, 9, 2)
    fit = tacit.estimate(model, F.mse_loss, (X, X[:, :1]), tacit.regularizers.symmetric(), psd=True)
    assert_refused(lambda: fit.layers, ["Λ ⪰ 0", "layer"], "fit.unconstrained.layers")


SYSTEM = matrix_equations(draw(0, 9, 6), draw(1, 9), 3)
CASES = {
    "no matrix": (lambda: tacit.fit(equations(draw(0, 9, 2), draw(1, 9)), psd=True), ["symmetric"]),
    "both constraints": (lambda: tacit.fit(SYSTEM, psd=True, nonnegative=True), ["nonnegative"]),
    "not a bool": (lambda: tacit.fit(SYSTEM, psd=1), ["psd is 1", "True or False"]),
    "a diagonal matrix": (
        lambda: tacit.fit(
            equations(draw(0, 9, 2), draw(1, 9), kinds=["diagonal", "diagonal"]), psd=True
        ),
        ["diagonal()", "nonnegative=True"],
    ),
}


@pytest.mark.parametrize(("call", "words"), CASES.values(), ids=CASES.keys())
def test_wrong_calls_are_refused(call, words):
    with pytest.raises(tacit.InputError) as error:
        call()
    assert all(word in str(error.value) for word in words)
