"""The numbers behind the problems of a fit, against direct computations."""

import pytest
import torch
from support.systems import draw, equations

import tacit
from tacit.fitting.evidence import gather_evidence
from tacit.fitting.solving import System


def gather(system, *, nonnegative=False):
    fit, count = tacit.fit(system, nonnegative=nonnegative), len(system.names)
    factor = system.factor()
    return gather_evidence(
        system,
        System(factor[:, :count]),
        factor[:, count:],
        torch.tensor(list(fit.strengths.values()), dtype=torch.float64),
        fit.explained,
        fit.residual_ratio,
        nonnegative=nonnegative,
    )


def test_contributions_and_residuals_are_those_of_the_dense_system():
    design, target = draw(0, 60, 3), draw(1, 60)
    strengths = torch.linalg.lstsq(design, target).solution
    evidence = gather(equations(design, target))
    sizes = (design * strengths).norm(dim=0) / target.norm()
    assert evidence.contributions.tolist() == pytest.approx(sizes.tolist(), rel=1e-10)
    residual = float((target - design @ strengths).norm() / target.norm())
    assert evidence.residuals.tolist() == pytest.approx([residual] * 3, rel=1e-10)
    assert evidence.target_norm == pytest.approx(float(target.norm()))


def test_the_adjusted_fraction_of_noise_is_about_zero():
    fractions = [gather(equations(draw(s, 40, 8), draw(100 + s, 40))).adjusted for s in range(200)]
    assert abs(sum(fractions) / 200) < 0.02


def test_noise_is_the_variance_of_the_mean_over_groups():
    design, signal = draw(2, 50, 2), draw(3, 50)
    targets = signal[:, None] + 0.3 * draw(4, 50, 5)
    system = equations(design, targets)
    mean = targets.mean(1)
    expected = float(targets.var(1).sum() / 5 / mean.square().sum())
    assert gather(system).noise == pytest.approx(expected, rel=1e-10)


def test_a_nonnegative_fit_keeps_its_unconstrained_strengths():
    design = draw(5, 50, 2)
    system = equations(design, design @ torch.tensor([1.0, -0.5]).double())
    evidence = gather(system, nonnegative=True)
    assert evidence.strengths[1] == 0
    assert evidence.unconstrained.tolist() == pytest.approx([1, -0.5])


def test_a_combination_of_unit_columns_cancels():
    design = draw(6, 80, 4)
    design[:, 2] = design[:, 0] - 2 * design[:, 1]
    evidence = gather(equations(design, draw(7, 80)))
    ((columns, coefficients),) = evidence.dependent
    unit = design / design.norm(dim=0)
    assert set(columns) == {0, 1, 2}
    assert (
        float((unit[:, columns] @ torch.tensor(coefficients, dtype=torch.float64)).norm()) < 1e-10
    )
    assert not evidence.nearly_dependent
