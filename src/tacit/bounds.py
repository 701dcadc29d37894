"""The paper's PAC bounds as functions of measurable quantities, as its proofs establish them.

Each bound holds with probability at least 1 − δ over the noise, which is sub-Gaussian or bounded
and may be correlated. Trap: they are worst-case guarantees, not error bars; `docs/guarantees.md`
says how loose they are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.errors import check_number


def conditioning(equations: Equations) -> float:
    """κ, the smallest eigenvalue of ΦᵀΦ/p; it is small where candidates are nearly collinear."""
    design = equations.factor()[:, : len(equations.names)]
    return float(torch.linalg.svdvals(design).min() ** 2) / equations.rows


def correlation(design: Tensor, covariance: Tensor) -> float:
    """ρ, the largest eigenvalue of QᵀΣQ for an orthonormal basis Q of the design's columns.

    Σ is the covariance of the noise, in units of σ². ρ is 1 for Σ = I; p/ρ is the effective number
    of equations. Both matrices are dense, so this is for small p.
    """
    Q = torch.linalg.qr(design).Q
    return float(torch.linalg.eigvalsh(Q.T @ covariance @ Q).max())


def linear_bound(
    *,
    rows: int,
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
        rows: p, the number of equations.
        strengths: r, the number of strengths.
        conditioning: κ, the smallest eigenvalue of ΦᵀΦ/p or less; see `conditioning`.
        noise: σ of noise ξ with E exp(t vᵀξ) ≤ exp(σ² t² vᵀΣv / 2) for every vector v.
        correlation: ρ, by which Σ inflates the noise along the columns; see `correlation`.
        bias: α = ‖(ΦᵀΦ)^(−1/2) Φᵀa‖/√p for the misspecification a.
        delta: δ, the probability that the bound fails.
    """
    check_number("delta", delta, above=0, below=1)
    _check_positive(rows=rows, strengths=strengths, conditioning=conditioning)
    _check_nonnegative(noise=noise, correlation=correlation, bias=bias)
    tail = strengths * math.log(5) + math.log(2 / delta)
    noise_error = 2 * noise * math.sqrt(2 * correlation * tail / (conditioning * rows))
    return noise_error + bias / math.sqrt(conditioning)


def nonparametric_bound(
    *,
    rows: int,
    candidates: int,
    diameter: float,
    noise: float,
    correlation: float = 1.0,
    resolution: float = 0.0,
    approximation_error: float = 0.0,
    delta: float = 0.05,
) -> float:
    """Excess (‖ĝ − b*‖² − inf ‖g − b*‖²)/p of the best-matching gradient ĝ among candidates g.

    It is at most (2ε·inf‖g − b*‖ + ε²)/p + (2σD/p) √(2ρ (log N + log 2/δ)), where b* is the target
    without noise. Trap: the theorem is printed with norms where its proof has squared norms, and
    without the first 1/p.

    Args:
        rows: p, the number of equations.
        candidates: N, the number of regularizers compared: a finite class, or an ε-net of a class.
        diameter: D, the largest distance ‖g − g'‖ among their gradients.
        noise: σ, as for `linear_bound`.
        correlation: ρ, the largest (g−g')ᵀΣ(g−g')/‖g−g'‖².
        resolution: ε of the net; 0 for a finite class.
        approximation_error: inf ‖g − b*‖ over the class; matters only with a net.
        delta: δ, the probability that the bound fails.
    """
    check_number("delta", delta, above=0, below=1)
    _check_positive(rows=rows, candidates=candidates)
    _check_nonnegative(diameter=diameter, noise=noise, correlation=correlation)
    _check_nonnegative(resolution=resolution, approximation_error=approximation_error)
    tail = math.log(candidates) + math.log(2 / delta)
    noise_excess = 2 * noise * diameter * math.sqrt(2 * correlation * tail)
    net_excess = 2 * resolution * approximation_error + resolution**2
    return (net_excess + noise_excess) / rows


def trajectory_bound(
    *, variation: float, increment: float, candidates: int, delta: float = 0.05
) -> float:
    """Excess Σ_t ‖b*_t − ∇R̂(θ_t)‖² − min_R Σ_t ‖b*_t − ∇R(θ_t)‖² within one trajectory.

    It is at most 2(√(2Vε) + cε/3) with ε = log 2N/δ, by Freedman's inequality. b*_t is the mean of
    the target given the past. Trap: the theorem is printed for the excess with observed targets;
    its proof bounds the excess with b*, which is computed here with the constants of the proof.

    Args:
        variation: V, a bound of Σ_t E[X_t² | past] for X_t = ⟨∇R(θ_t) − ∇R'(θ_t), noise_t⟩.
        increment: c, a bound of |X_t|.
        candidates: N, the number of regularizers compared.
        delta: δ, the probability that the bound fails.
    """
    check_number("delta", delta, above=0, below=1)
    _check_positive(candidates=candidates)
    _check_nonnegative(variation=variation, increment=increment)
    tail = math.log(2 * candidates / delta)
    return 2 * (math.sqrt(2 * variation * tail) + increment * tail / 3)


def quadratic_variation(differences: Sequence[Tensor], covariances: Sequence[Tensor]) -> float:
    """V = Σ_t d_tᵀ Σ_t d_t of two regularizers, d_t the difference of their gradients at step t."""
    return float(sum(d @ cov @ d for d, cov in zip(differences, covariances, strict=True)))


def _check_positive(**arguments: float) -> None:
    for name, value in arguments.items():
        check_number(name, value, above=0)


def _check_nonnegative(**arguments: float) -> None:
    for name, value in arguments.items():
        check_number(name, value, least=0)
