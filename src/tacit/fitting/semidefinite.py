"""Least squares over positive semidefinite matrices, by an interior point method.

    min ½‖A svec(Λ) + B μ − b‖²   over Λ ⪰ 0 and free μ.

With G the matrix of the gradient Aᵀ(A svec(Λ) + B μ − b), Λ is optimal exactly if Λ ⪰ 0, G ⪰ 0 and
⟨Λ, G⟩ = 0, and the gradient in μ is zero. Strengths of `symmetric()` are svec(Λ): entries on the
diagonal, √2 times those off it, so that ⟨svec(Λ), svec(G)⟩ = ⟨Λ, G⟩.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.errors import InputError
from tacit.fitting.solving import RANK, System
from tacit.regularizers.quadratic import quadratic_matrix

CONVERGED = 1e-15
"""Violation of the optimality conditions at which iterations stop, for a target of unit size."""
CERTIFIED = 1e-8
"""How far the optimality conditions of an answer may be violated, in the same units."""
RIDGES = (1e-9, 1e-11, 1e-13, 1e-14, 1e-15, 1e-16)
"""Where columns are dependent: strengths of the squared distance to the solution of the round
before. The first solution is of nearly least norm, the others remove its bias."""
UNBIASED = 1e-11
"""Violation of the conditions, without that distance, at which there is no further round."""
ROUNDED = 1e-12
"""An eigenvalue below zero by at most this part of the largest is zero, but for rounding."""
ITERATIONS, STALLED, PATIENCE = 100, 6, 30
"""Most iterations, and most without progress: few where only rounding is left, more before, because
the violation can rise on the way to a long Λ."""


def cones_of(equations: Equations) -> list[slice]:
    """The columns of every symmetric family."""
    cones, start = [], 0
    for family in equations.families:
        if family.kind == "symmetric":
            cones.append(slice(start, start + family.size))
        start += family.size
    return cones


def is_semidefinite(strengths: Tensor, cones: Sequence[slice]) -> bool:
    """Whether every matrix has no eigenvalue below zero."""
    return all(
        float(torch.linalg.eigvalsh(quadratic_matrix(strengths[cone], "symmetric"))[0]) >= 0
        for cone in cones
    )


def solver(
    system: System, equations: Equations, *, nonnegative: bool, psd: bool
) -> Callable[[Tensor], Tensor]:
    """The function from targets to strengths under the constraints of a fit of these equations."""
    if not psd:
        bounded = equations.bounded(nonnegative=nonnegative)
        return lambda targets: system.solve_bounded(targets, bounded)
    cones = cones_of(equations)
    return lambda targets: solve_semidefinite(system, targets, cones)


def solve_semidefinite(system: System, targets: Tensor, cones: Sequence[slice]) -> Tensor:
    """Least-squares strengths for every target, with Λ ⪰ 0 in the given columns.

    Where the unconstrained solution is semidefinite, but for rounding, it is the answer. If columns
    are dependent, the answer is one of those that explain the target equally well, of small norm.
    """
    solutions = system.solve(targets)
    for column in range(targets.shape[1]):
        rounded = _without_rounding(solutions[:, column], cones)
        if rounded is None:
            rounded = _solve_one(system, targets[:, column], cones)
        solutions[:, column] = rounded
    return solutions


def _without_rounding(strengths: Tensor, cones: Sequence[slice]) -> Tensor | None:
    """The strengths with eigenvalues that are below zero by rounding set to zero; None if more."""
    if is_semidefinite(strengths, cones):
        return strengths
    strengths = strengths.clone()
    for cone in cones:
        values, vectors = torch.linalg.eigh(quadratic_matrix(strengths[cone], "symmetric"))
        if float(values[0]) < -ROUNDED * float(values.abs().max()):
            return None
        strengths[cone] = _svec(vectors * values.clamp_min(0.0) @ vectors.T)
    return strengths


def _solve_one(system: System, target: Tensor, cones: Sequence[slice]) -> Tensor:
    """The strengths where the constraint binds: the free ones are eliminated by projection."""
    design = system.design
    in_cones = torch.zeros(design.shape[1], dtype=torch.bool)
    for cone in cones:
        in_cones[cone] = True
    free = System(design[:, ~in_cones])
    basis = free.design @ free.coordinates
    constrained = design[:, in_cones]
    projected = constrained - basis @ (basis.T @ constrained)
    projected[:, projected.norm(dim=0) <= RANK * constrained.norm(dim=0)] = 0  # only rounding
    sizes = [cone.stop - cone.start for cone in cones]
    strengths = torch.zeros(design.shape[1], dtype=torch.float64)
    strengths[in_cones] = _minimise(projected, target - basis @ (basis.T @ target), sizes)
    rest = target - constrained @ strengths[in_cones]
    strengths[~in_cones] = free.solve(rest[:, None])[:, 0]
    return strengths


def _minimise(design: Tensor, target: Tensor, sizes: Sequence[int]) -> Tensor:
    """The x in the cones with the least ‖design · x − target‖, for any scale of both."""
    length, size = float(target.norm()), float(design.norm(dim=0).max())
    x = torch.zeros(design.shape[1], dtype=torch.float64)
    if not length or not size:
        return x
    design, target = design / size, target / length
    if is_semidefinite(-(design.T @ target), _slices(sizes)):  # G ⪰ 0 at Λ = 0
        return x
    by_cone = [_as_matrices(part) for part in design.split(list(sizes), dim=1)]
    units = [_units(part.norm(dim=0)) for part in by_cone]
    scaled = [part * d * d[:, None] for part, d in zip(by_cone, units, strict=True)]
    solution = _minimise_scaled(scaled, target)
    x = torch.cat([_svec(X * d * d[:, None]) for X, d in zip(solution, units, strict=True)])
    return x * (length / size)


def _minimise_scaled(by_cone: list[Tensor], target: Tensor) -> list[Tensor]:
    """The same in coordinates of similar size, from the rows of A as matrices, for every cone."""
    design = torch.cat([_svec(rows) for rows in by_cone], dim=1)
    count = design.shape[1]
    if System(design).rank == count:
        return _interior_point(by_cone, target)
    # Where columns are dependent: near the solution before, which the first time is zero.
    solution = [torch.zeros(rows.shape[1:], dtype=torch.float64) for rows in by_cone]
    sizes = [rows.shape[1] * (rows.shape[1] + 1) // 2 for rows in by_cone]
    identity = torch.eye(count, dtype=torch.float64).split(sizes, dim=1)
    for ridge in map(math.sqrt, RIDGES):
        rows = [
            torch.cat([part, ridge * _as_matrices(basis)])
            for part, basis in zip(by_cone, identity, strict=True)
        ]
        before = torch.cat([_svec(X) for X in solution])
        try:
            solution = _interior_point(rows, torch.cat([target, ridge * before]))
        except InputError:
            if not before.any():
                raise
            break  # rounding allows no smaller distance: the round before met the conditions
        x = torch.cat([_svec(X) for X in solution])
        if _violation(design.T @ (design @ x - target), x, sizes) <= UNBIASED:
            break
    return solution


def _units(norms: Tensor) -> Tensor:
    """Units d for which d_i d_j ‖column (i, j)‖ is near 1, by least squares of logarithms.

    Λ = D Λ′ D is semidefinite exactly if Λ′ is.
    """
    largest = float(norms.max()) or 1.0
    logs = torch.where(norms > 1e-8 * largest, norms, largest).log()
    return (logs.mean() / 2 - logs.mean(1)).exp()


class _Scaling(NamedTuple):
    """A pair of positive definite matrices by their scaling: RᵀSR = R⁻¹XR⁻ᵀ = diag(values).

    X and S become singular at the boundary; R and the values can be computed to full precision.
    """

    R: Tensor
    values: Tensor

    @staticmethod
    def of(X: Tensor, S: Tensor) -> "_Scaling":
        """The scaling of any pair."""
        left, right = torch.linalg.cholesky(X), torch.linalg.cholesky(S)
        _, values, vh = torch.linalg.svd(right.T @ left)
        return _Scaling(left @ vh.T / values.sqrt(), values)

    @property
    def primal(self) -> Tensor:
        """X."""
        return self.R * self.values @ self.R.T

    def largest_step(self, change: Tensor) -> float:
        """The largest step along a scaled change for which diag(values) stays semidefinite."""
        root = self.values.sqrt()
        lowest = float(torch.linalg.eigvalsh(change / root / root[:, None])[0])
        return -1 / lowest if lowest < 0 else math.inf

    def moved(self, primal: Tensor, dual: Tensor) -> "_Scaling":
        """The scaling after these scaled changes of X and S."""
        diagonal = torch.diag(self.values)
        inner = _Scaling.of(diagonal + primal, diagonal + dual)
        return _Scaling(self.R @ inner.R, inner.values)


class _Change(NamedTuple):
    """Scaled changes of all X and S, and the largest step that they allow."""

    primal: list[Tensor]
    dual: list[Tensor]
    longest: float


def _interior_point(by_cone: Sequence[Tensor], target: Tensor) -> list[Tensor]:
    """The minimum over the cones; refused where it misses the optimality conditions.

    It takes primal-dual steps with Nesterov and Todd's scaling.
    X changes by R U Rᵀ, with U in scaled coordinates. Linearised, G = S and XS = σμI become

        min ‖A svec(R U Rᵀ) − (b − A svec(X))‖² + ‖U − σμ diag(values)⁻¹ + correction‖²,

    which is solved by QR, so that no condition number is squared. σ and the correction for the
    product of both changes are Mehrotra's.

    Args:
        by_cone: for every cone, the rows of A as matrices.
        target: b.
    """
    design = torch.cat([_svec(rows) for rows in by_cone], dim=1)
    scalings = _start(design, target, [rows.shape[1] for rows in by_cone])
    order, sizes = sum(len(z.values) for z in scalings), [_size(z) for z in scalings]
    best, smallest, since = scalings, math.inf, 0
    for _ in range(ITERATIONS):
        x = torch.cat([_svec(z.primal) for z in scalings])
        residual, gap = target - design @ x, sum(float(z.values @ z.values) for z in scalings)
        scaled = [_svec(z.R.T @ rows @ z.R) for z, rows in zip(scalings, by_cone, strict=True)]
        rows = torch.cat(scaled, dim=1)
        violation = _violation(-(design.T @ residual), x, sizes)
        if violation < smallest:
            best, smallest, since = scalings, violation, 0
        since += 1
        if violation <= CONVERGED or since > (STALLED if smallest <= UNBIASED else PATIENCE):
            break
        factors = torch.linalg.qr(torch.cat([rows, torch.eye(len(x), dtype=torch.float64)]))
        uncentred = [-torch.diag(z.values) for z in scalings]
        first = _change(factors, residual, scalings, uncentred)
        centre = (1 - min(1.0, first.longest)) ** 3 * gap / order
        change = _change(factors, residual, scalings, _corrected(scalings, first, centre))
        length = min(1.0, 0.98 * change.longest)
        pairs = zip(scalings, change.primal, change.dual, strict=True)
        try:
            scalings = [z.moved(length * primal, length * dual) for z, primal, dual in pairs]
        except RuntimeError:
            break  # rounding allows no further step; the caller checks the answer
    if smallest > CERTIFIED:
        raise InputError(
            f"psd=True: the best Λ misses its optimality conditions by {smallest:.1g}. Stack more "
            "endpoints, or give symmetric() a smaller scope, so that the equations determine Λ "
            "better."
        )
    return [z.primal for z in best]


def _start(design: Tensor, target: Tensor, orders: Sequence[int]) -> list[_Scaling]:
    """X and S from min ‖Ax − b‖² + ‖x‖², where G = −x, both moved into the cone."""
    sizes = [n * (n + 1) // 2 for n in orders]
    rows = torch.cat([design, torch.eye(design.shape[1], dtype=torch.float64)])
    rhs = torch.cat([target, torch.zeros(design.shape[1], dtype=torch.float64)])
    q, r = torch.linalg.qr(rows)
    x = torch.linalg.solve_triangular(r, (q.T @ rhs)[:, None], upper=True)[:, 0]
    return [_Scaling.of(_inside(X), _inside(-X)) for X in _matrices(x, sizes)]


def _inside(matrix: Tensor) -> Tensor:
    """The matrix, with a multiple of the identity added so that it is well inside the cone."""
    identity, values = torch.eye(len(matrix), dtype=torch.float64), torch.linalg.eigvalsh(matrix)
    return matrix + (float(values.abs().max()) + 1 - min(0.0, float(values[0]))) * identity


def _corrected(scalings: Sequence[_Scaling], first: _Change, centre: float) -> list[Tensor]:
    """What U + V has to be for XS = centre · I, with the product of the first changes."""
    sums = []
    for z, U, V in zip(scalings, first.primal, first.dual, strict=True):
        product = (U @ V + V @ U) / (z.values + z.values[:, None])
        sums.append(torch.diag(centre / z.values - z.values) - product)
    return sums


def _change(
    factors: tuple[Tensor, Tensor],
    residual: Tensor,
    scalings: Sequence[_Scaling],
    sums: Sequence[Tensor],
) -> _Change:
    """The scaled changes U of X and V of S for which G = S to first order, and U + V = sums."""
    q, r = factors
    wanted = [total + torch.diag(z.values) for z, total in zip(scalings, sums, strict=True)]
    rhs = q.T @ torch.cat([residual, *map(_svec, wanted)])
    solution = torch.linalg.solve_triangular(r, rhs[:, None], upper=True)[:, 0]
    primal = _matrices(solution, [_size(z) for z in scalings])
    dual = [total - change for total, change in zip(sums, primal, strict=True)]
    steps = [
        z.largest_step(change)
        for z, *both in zip(scalings, primal, dual, strict=True)
        for change in both
    ]
    return _Change(primal, dual, min(steps))


def _violation(gradient: Tensor, x: Tensor, sizes: Sequence[int]) -> float:
    """How far the conditions G ⪰ 0 and ⟨X, G⟩ = 0 are missed."""
    matrices = _matrices(gradient, sizes)
    lowest = min(float(torch.linalg.eigvalsh(matrix)[0]) for matrix in matrices)
    return max(-lowest, abs(float(x @ gradient)))


def _size(scaling: _Scaling) -> int:
    """How many coefficients a matrix of this order has."""
    return len(scaling.values) * (len(scaling.values) + 1) // 2


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _matrices(vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [quadratic_matrix(part, "symmetric") for part in vector.split(list(sizes))]


def _as_matrices(rows: Tensor) -> Tensor:
    """Every row as a symmetric matrix."""
    return torch.stack([quadratic_matrix(row, "symmetric") for row in rows])


def _svec(matrix: Tensor) -> Tensor:
    """The coefficients of symmetric matrices in the basis of `symmetric()`."""
    n = matrix.shape[-1]
    i, j = torch.triu_indices(n, n)
    return matrix[..., i, j] * torch.where(i == j, 1.0, 2.0).to(matrix).sqrt()
