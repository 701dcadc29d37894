"""Triangular factors of rows [design | targets]: the same inner products in a few numbers."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tacit.objective.params import read_on_cpu

DIRECT = 2**16
"""Rows of a layer up to which they are factorised directly, by QR."""
PARTS = 256
"""Parts of the rows whose inner products a GPU computes at once."""
ON_CPU = 2**13
"""Rows on a GPU up to which they are factorised on the CPU: QR of so few takes many kernels."""
ONCE, TWICE = 1e4, 1e12
"""Largest condition numbers of inner products of unit columns for which these suffice, and for
which a second reading in their basis does. Beyond, rows are factorised by QR."""


def triangular_factor(rows: Tensor) -> Tensor:
    """R of a QR factorisation: the same inner products in at most as many rows as columns."""
    return torch.linalg.qr(rows, mode="r").R if rows.shape[0] > 1 else rows


def running_factors(parts: Sequence[Tensor]) -> list[Tensor]:
    """For each part [design | targets], the factor of all parts before it."""
    factors = [parts[0][:0]]
    for part in parts[:-1]:
        factors.append(triangular_factor(torch.cat([factors[-1], part])))
    return factors


class FactorSum:
    """The triangular factor of rows that come in slices, in time for reading them once or twice.

    Few rows are factorised by QR. Of many, inner products G are summed, and the factor is that of
    Cholesky. It has the square of the rows' condition number, so that rows of larger condition are
    read again in the basis of the first factor R, where they are nearly orthonormal: the factor of
    their inner products times R is as accurate as QR (CholeskyQR2, Yamamoto et al. 2015). Rows that
    are too ill-conditioned for the first factor are factorised by QR, slice by slice; where the
    first slices show it already, no row is read again.
    """

    def __init__(self, width: int, *, once: bool = False) -> None:
        self.rows = torch.zeros(0, width, dtype=torch.float64)
        """Few rows; of many, the factor by QR, where it is used."""
        self.products: Tensor | None = None
        self.by_qr = once
        """Whether they are factorised by QR: so are those that must be read only once."""

    def add(self, matrix: Tensor) -> None:
        """Add a slice of rows."""
        if self.products is None and (self.by_qr or len(self.rows) + len(matrix) <= DIRECT):
            self.rows = _append(self.rows.to(matrix), matrix)
            if self.by_qr:
                self.rows = triangular_factor(self.rows)
            return
        products = inner_products(matrix)
        if self.products is None:
            # A GPU is not waited for: there, ill-conditioned rows are read again at the end.
            earlier = inner_products(self.rows)
            self.products = earlier.to(products, non_blocking=earlier.is_cpu)
            both = self.products + products
            if not products.is_cuda and _cholesky(both)[1] > TWICE:
                self.by_qr, self.products = True, None
                self.add(matrix)
                return
        self.products += products


def factors_of(
    sums: Sequence[FactorSum], reads: Sequence[Callable[[], Iterable[Tensor]]]
) -> list[Tensor]:
    """The factor of all rows of each sum, on the CPU.

    Args:
        sums: the rows that were added; inner products of all sums are read from a GPU at once.
        reads: for each sum, a function that returns the same slices again, if they are needed.
    """
    products = {str(i): s.products for i, s in enumerate(sums) if s.products is not None}
    on_cpu = read_on_cpu(products)
    return [
        _factor_few(total.rows) if (here := on_cpu.get(str(i))) is None else _factor(here, read)
        for i, (total, read) in enumerate(zip(sums, reads, strict=True))
    ]


def _factor_few(rows: Tensor) -> Tensor:
    return triangular_factor(rows.cpu() if len(rows) <= ON_CPU else rows).cpu()


def _factor(products: Tensor, read: Callable[[], Iterable[Tensor]]) -> Tensor:
    """The factor of rows with these inner products, read again where they are ill-conditioned."""
    first, condition = _cholesky(products)
    if condition <= ONCE:
        return first
    if condition <= TWICE:
        products = torch.zeros_like(products)
        for matrix in read():
            basis = first.to(matrix.device)
            rows = torch.linalg.solve_triangular(basis, matrix, upper=True, left=False)
            products = products.to(matrix.device) + inner_products(rows)
        second, condition = _cholesky(products.cpu())
        if condition <= ONCE:
            return second @ first
    factor = products[:0]
    for matrix in read():
        factor = triangular_factor(_append(factor.to(matrix.device), matrix))
    return factor.cpu()


def inner_products(rows: Tensor) -> Tensor:
    """rowsᵀ·rows; on a GPU by parts, since its product of a few long columns uses a part of it."""
    count = len(rows) // PARTS
    if not rows.is_cuda or count < PARTS:
        return rows.T @ rows
    parts = rows[: count * PARTS].mT.unflatten(1, (PARTS, count)).movedim(1, 0)
    rest = rows[count * PARTS :]
    return torch.bmm(parts, parts.mT).sum(0) + rest.T @ rest


def factor_of(matrices: Sequence[Tensor], width: int) -> Tensor:
    """The triangular factor of all rows of these matrices, which may be on several devices."""
    total = FactorSum(width)
    for matrix in matrices:
        total.add(matrix)
    return factors_of([total], [lambda: matrices])[0]


def _append(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows below rows, with columns one after the other in memory, as QR needs them."""
    return torch.cat([rows.mT, matrix.mT], dim=1).mT


def _cholesky(products: Tensor) -> tuple[Tensor, float]:
    """The upper factor of inner products, and their condition number for columns of unit norm.

    The condition number is infinite where there is no factor.
    """
    norms = products.diagonal().sqrt()
    scaled = products / norms / norms[:, None]
    if not torch.isfinite(scaled).all():  # columns of zeros, or overflow
        return products, math.inf
    factor, failed = torch.linalg.cholesky_ex(scaled, upper=True)
    eigenvalues = torch.linalg.eigvalsh(scaled)
    condition = float(eigenvalues[-1] / eigenvalues[0])
    return factor * norms, condition if condition > 0 and not failed else math.inf
