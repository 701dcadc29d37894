"""The paper's PAC bounds, as functions of measurable quantities and as its proofs establish them.

Each holds with probability at least 1 − δ over sub-Gaussian or bounded noise that may be
correlated. They are guarantees, not error bars: `docs/guarantees.md` says how loose they are.
"""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.errors import InputError


def conditioning(equations: Equations) -> float:
    """κ, the smallest eigenvalue of ΦᵀΦ/p: how well the equations tell the strengths apart."""
    design = equations.factor()[:, : len(equations.names)]
    return float(torch.linalg.svdvals(design).min() ** 2) / equations.rows


def correlation(design: Tensor, covariance: Tensor) -> float:
    """ρ, the largest eigenvalue of the noise's covariance Σ within the columns of the design.

    One where Σ = I; p/ρ is the effective number of equations. For dense designs of modest size.
    """
    q = torch.linalg.qr(design).Q
    return float(torch.linalg.eigvalsh(q.T @ covariance @ q).max())


def linear_bound(
    *,
    equations: int,
    strengths: int,
    conditioning: float,
    noise: float,
    correlation: float = 1.0,
    bias: float = 0.0,
    delta: float = 0.05,
) -> float:
    """‖Λ̂ − Λ*‖ ≤ 2σ √(2ρ (r log 5 + log 2/δ) / (κ p)) + α/√κ for least squares.

    Trap: the theorem as printed divides its first term by κ; its proof gives √κ, used here.

    Args:
        equations: p, the rows.
        strengths: r, the columns.
        conditioning: κ ≤ the smallest eigenvalue of ΦᵀΦ/p; see `conditioning`.
        noise: σ of noise ξ with E exp(t vᵀξ) ≤ exp(σ² t² vᵀΣv / 2).
        correlation: ρ, by which Σ inflates noise along the columns; see `correlation`.
        bias: α = ‖(ΦᵀΦ)^(−1/2) Φᵀa‖/√p of the misspecification a.
        delta: the probability of failure.
    """
    _check(equations=equations, strengths=strengths, conditioning=conditioning, delta=delta)
    _check_zero(noise=noise, correlation=correlation, bias=bias)
    tail = strengths * math.log(5) + math.log(2 / delta)
    chance = 2 * noise * math.sqrt(2 * correlation * tail / (conditioning * equations))
    return chance + bias / math.sqrt(conditioning)


def nonparametric_bound(
    *,
    equations: int,
    candidates: int,
    diameter: float,
    noise: float,
    correlation: float = 1.0,
    resolution: float = 0.0,
    best: float = 0.0,
    delta: float = 0.05,
) -> float:
    """Excess (‖ĝ − b*‖² − inf ‖g − b*‖²)/p of the best-matching gradient among candidates.

    It is at most (2ε·inf‖g − b*‖ + ε²)/p + (2σD/p) √(2ρ (log N + log 2/δ)). Trap: the theorem is
    printed with norms where its proof has squared norms, and without the first 1/p.

    Args:
        equations: p.
        candidates: N, the regularizers that were compared: a finite class, or an ε-net of one.
        diameter: D, the largest distance ‖g − g'‖ among their gradients.
        noise: σ, as for `linear_bound`.
        correlation: ρ, the largest (g−g')ᵀΣ(g−g')/‖g−g'‖².
        resolution: ε of the net; 0 for a finite class.
        best: inf ‖g − b*‖ over the class; matters only with a net.
        delta: the probability of failure.
    """
    _check(equations=equations, candidates=candidates, delta=delta)
    _check_zero(
        diameter=diameter, noise=noise, correlation=correlation, resolution=resolution, best=best
    )
    tail = math.log(candidates) + math.log(2 / delta)
    chance = 2 * noise * diameter * math.sqrt(2 * correlation * tail)
    return (2 * resolution * best + resolution**2 + chance) / equations


def trajectory_bound(
    *, variation: float, increment: float, candidates: int, delta: float = 0.05
) -> float:
    """Excess Σ_t ‖b*_t − ∇R̂(θ_t)‖² − min_R Σ_t ‖b*_t − ∇R(θ_t)‖² within one trajectory.

    It is at most 2(√(2Vε) + cε/3) with ε = log 2N/δ, by Freedman's inequality. Trap: the theorem
    is printed for the observed excess; its proof bounds that of the predictable bias b*, given
    here with its constants.

    Args:
        variation: V, which bounds Σ_t E[X_t² | past] for X_t = ⟨∇R(θ_t) − ∇R'(θ_t), noise_t⟩.
        increment: c, which bounds |X_t|.
        candidates: N, the regularizers that were compared.
        delta: the probability of failure.
    """
    _check(candidates=candidates, delta=delta)
    _check_zero(variation=variation, increment=increment)
    tail = math.log(2 * candidates / delta)
    return 2 * (math.sqrt(2 * variation * tail) + increment * tail / 3)


def quadratic_variation(gaps: Sequence[Tensor], covariances: Sequence[Tensor]) -> float:
    """V of two regularizers: Σ_t dᵀΣ_t d for their gradients' gap d at every step."""
    return float(sum(d @ cov @ d for d, cov in zip(gaps, covariances, strict=True)))


def _check(**values: float) -> None:
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf or (name == "delta" and value >= 1):
            limit = "between 0 and 1" if name == "delta" else "above zero"
            raise InputError(f"{name} is {value!r}: pass a finite number {limit}.")


def _check_zero(**values: float) -> None:
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise InputError(f"{name} is {value!r}: pass a finite number, 0 or above.")
