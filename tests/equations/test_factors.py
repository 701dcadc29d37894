"""Factors of rows in slices, against QR of all rows."""

import math

import pytest
import torch

from tacit.equations import factors


class Slices:
    """Rows in slices, which counts how often they are read again."""

    def __init__(self, matrix):
        self.matrix, self.readings = matrix, 0

    def read(self):
        self.readings += 1
        return self.matrix.split(70)

    def factor(self):
        total = factors.FactorSum(self.matrix.shape[1])
        for part in self.matrix.split(70):
            total.add(part)
        return factors.factors_of([total], [self.read])[0]


def rows_of_condition(condition, width=6):
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, width, generator=generator, dtype=torch.float64)).Q
        for n in (500, width)
    )
    singular = torch.logspace(0, -math.log10(condition), width, dtype=torch.float64)
    return left * singular @ right.T


@pytest.mark.parametrize(
    ("condition", "readings"), [(5, 0), (1e3, 1), (1e5, 1), (1e6, 1), (1e10, 0)]
)
def test_factors_of_inner_products_are_as_accurate_as_qr(condition, readings, monkeypatch):
    monkeypatch.setattr(factors, "DIRECT", 100)
    scale = torch.tensor([1e-20, 1e10, 1.0, 1.0, 1e5, 1.0], dtype=torch.float64)
    slices = Slices(rows_of_condition(condition) * scale)
    factor = slices.factor() / scale
    expected = torch.linalg.qr(slices.matrix / scale, mode="r").R
    solutions = [torch.linalg.lstsq(f[:, :-1], f[:, -1:]).solution for f in (factor, expected)]
    torch.testing.assert_close(*solutions, rtol=1e-15 * condition + 1e-13, atol=0)
    assert slices.readings == readings  # none by QR, as in the last case
    assert torch.equal(factor, factor.triu())


@pytest.mark.parametrize("change", ["zero", "collinear"])
def test_columns_that_are_no_basis_are_factorised_by_qr(change, monkeypatch):
    monkeypatch.setattr(factors, "DIRECT", 100)
    matrix = rows_of_condition(3)
    matrix[:, 2] = 0 if change == "zero" else 3 * matrix[:, 1]
    slices = Slices(matrix)
    factor = slices.factor()
    torch.testing.assert_close(factor.T @ factor, matrix.T @ matrix, rtol=0, atol=1e-14)
    rank = torch.linalg.matrix_rank(factor, rtol=1e-12)
    assert int(rank) == 5  # inner products alone would know it only to 1e-8
    assert slices.readings == 0


def test_rows_whose_first_slices_are_a_basis_and_later_ones_none(monkeypatch):
    """Their inner products are summed before it shows; they are read again for QR."""
    monkeypatch.setattr(factors, "DIRECT", 100)
    matrix = rows_of_condition(3)
    matrix[200:, 1] *= 1e7
    matrix[200:, 2] = 3 * matrix[200:, 1]
    slices = Slices(matrix)
    factor = slices.factor()
    expected = torch.linalg.qr(matrix, mode="r").R
    solutions = [torch.linalg.lstsq(f[:, :-1], f[:, -1:]).solution for f in (factor, expected)]
    torch.testing.assert_close(*solutions, rtol=1e-6, atol=0)
    assert slices.readings == 1
