"""Whether retraining on L + R must recover θ̂: uniqueness and stability of the minimiser."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tacit.equations.candidates import check_candidates
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, norm
from tacit.objective.ranks import check_alone
from tacit.regularizers import Regularizer
from tacit.validation import curvature
from tacit.validation.penalised import NoHessianError, PenalisedObjective, held_params, penalty

Verdict = Literal[
    "strongly convex",
    "convex, positive definite",
    "locally unique",
    "not unique",
    "not a minimum",
    "unbounded",
]

STATIONARY = 0.1
"""θ̂ is stationary if ‖∇(L+R)‖ is at most this fraction of ‖∇L‖."""
ZERO_GRADIENT = 1e-8
"""The gradient along flat directions is zero if it is at most this fraction of ‖∇L‖."""

MEANINGS: dict[Verdict, str] = {
    "strongly convex": "f = L + R is quadratic at every point tried, with positive curvature: it "
    "has one minimiser, and retraining finds it from any start",
    "convex, positive definite": "f = L + R is convex, as you stated, with positive curvature at "
    "these weights: its minimiser is unique, and retraining finds it from any start",
    "locally unique": "f = L + R has no other stationary point close by: retraining that ends near "
    "these weights recovers them, but it may end in another minimum",
    "not unique": "f = L + R is flat along some direction, at least to second order: retraining "
    "can recover the loss but not these weights, unless something selects among the minimisers",
    "not a minimum": "these weights are not a minimum of f = L + R: retraining moves away "
    "from them",
    "unbounded": "f = L + R is unbounded below: it has no minimiser, and retraining recovers "
    "nothing without a bound on the weights",
}


@dataclass(frozen=True)
class Certificate:
    """What is known about the minimisers of f = L + R near θ̂, in plain values."""

    verdict: Verdict
    smallest_eigenvalue: float
    """μ, the smallest eigenvalue of ∇²f(θ̂)."""
    residual_norm: float
    """ε = ‖∇f(θ̂)‖, the part of the loss gradient that the penalty does not balance."""
    distance_bound: float | None
    """ε/μ ≥ ‖θ̂ − θ*‖ if f is strongly convex, or as long as the curvature is at least μ on the way
    to θ*; None unless μ > 0."""
    gap_bound: float | None
    """ε²/(2μ) ≥ f(θ̂) − f(θ*), under the same condition."""
    method: Literal["dense", "Lanczos"]
    """How μ was computed."""
    message: str

    @property
    def is_global(self) -> bool:
        """Whether retraining recovers the weights from any start."""
        return self.verdict in ("strongly convex", "convex, positive definite")

    def __str__(self) -> str:
        return f"{self.verdict}: {self.message}"


@torch.inference_mode(mode=False)
def certify(
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    strengths: Fit | Mapping[str, float],
    *,
    params: Mapping[str, Tensor] | None = None,
    convex: bool = False,
    seed: int = 0,
) -> Certificate:
    """Determine whether retraining on f = L + R(·, Λ̂) must return to θ̂.

    Let μ be the smallest eigenvalue of ∇²f(θ̂), and ε = ‖∇f(θ̂)‖. If ∇²f ⪰ μI everywhere with μ > 0,
    the minimiser θ* is unique, and it is close to θ̂:
    ‖∇f(θ̂) − ∇f(θ*)‖ ≥ μ‖θ̂ − θ*‖ and ∇f(θ*) = 0 give ‖θ̂ − θ*‖ ≤ ε/μ;
    f(θ̂ + δ) ≥ f(θ̂) + ∇f(θ̂)ᵀδ + (μ/2)‖δ‖², minimised over δ, gives f(θ̂) − f(θ*) ≤ ε²/(2μ).
    For a quadratic f the Hessian is the same everywhere; f counts as quadratic if ∇f is affine at
    the few near and far points that are tried.

    Trap: for a network the statement is only local: μ > 0 does not exclude other minima.

    Args:
        objective: the loss, without any penalty.
        regularizers: those of the fit, including its known penalties.
        strengths: a Fit, or strengths by name.
        params: θ̂; by default the model's current parameters.
        convex: True to state that L + R is convex everywhere (as for logistic regression).
        seed: for the points at which f is tested for being quadratic, and for the first vector of
            Lanczos.
    """
    point = check_objective(objective, what="objective").point(params)
    check_alone(objective.ranks, "certify", shards_only=True)
    loss = objective.differentiate(point)
    held = held_params(strengths, loss.unreached, point)
    function = PenalisedObjective(objective, penalty(regularizers, strengths), held)
    theta = function.flatten(point)
    residual = function.value_and_gradient(theta)[1]
    _check_smooth(regularizers, point, held)
    generator = torch.Generator().manual_seed(seed)
    smallest = curvature.smallest_eigenvalue(function, theta, generator)
    quadratic = curvature.is_quadratic(function, theta, generator)
    gradient_norm = norm(loss.derivative)
    rounding = 10 * math.hypot(*objective.rounding(point).values())
    epsilon, mu = float(residual.norm()), smallest.value
    along_flat = float((smallest.vectors.T @ residual).norm())
    verdict = _verdict(
        smallest,
        quadratic=quadratic,
        convex=convex,
        stationary=epsilon <= max(STATIONARY * gradient_norm, rounding),
        sloped=along_flat > max(ZERO_GRADIENT * gradient_norm, rounding),
    )
    numbers = f"smallest curvature {mu:.3g} ({smallest.method}), ‖∇f‖ {epsilon:.3g}"
    message = f"{MEANINGS[verdict]} ({numbers})"
    distance = gap = None
    if mu > smallest.zero_level:
        distance, gap = epsilon / mu, epsilon**2 / (2 * mu)
        condition = "" if verdict == "strongly convex" else ", if the curvature persists"
        message += f"; the minimiser lies within {distance:.3g} of these weights{condition}"
    return Certificate(verdict, mu, epsilon, distance, gap, smallest.method, f"{message}.")


def _check_smooth(
    regularizers: Regularizer | Sequence[Regularizer], params: Params, held: Params
) -> None:
    columns = check_candidates(regularizers, None).bind(params).columns
    for name in [n for n in columns.active if n not in held]:
        if (space := columns.subspace(name)) is not None:
            raise NoHessianError(
                f"{name!r} has {space.reason}, where a penalty of its singular values, such as the "
                "nuclear norm, has no Hessian: leave it out."
            )
        mask = columns.kinks(name, slice(0, params[name].numel()))
        if mask is not None and mask.any():
            raise NoHessianError(
                f"{int(mask.sum())} entries of {name!r} lie at a kink of a regularizer, such as "
                "exactly zero with l1: use smooth_l1, or weights away from the kink."
            )


def _verdict(
    smallest: curvature.SmallestEigenvalue,
    *,
    quadratic: bool,
    convex: bool,
    stationary: bool,
    sloped: bool,
) -> Verdict:
    """The strongest statement on uniqueness that holds.

    Args:
        smallest: the smallest eigenvalue of ∇²f(θ̂).
        quadratic: whether f is quadratic.
        convex: whether the user stated that f is convex.
        stationary: whether ∇f(θ̂) is about zero.
        sloped: whether ∇f(θ̂) has a part along the eigenvectors of the smallest eigenvalue.
    """
    if smallest.value < -smallest.zero_level:
        if convex:
            raise InputError(
                f"convex=True, but L + R has negative curvature {smallest.value:.3g} at these "
                "weights: it is not convex. Leave convex= out."
            )
        return "unbounded" if quadratic else "not a minimum"
    if not quadratic and not stationary:
        return "not a minimum"
    if smallest.value <= smallest.zero_level:
        return "unbounded" if quadratic and sloped else "not unique"
    if quadratic:
        return "strongly convex"
    return "convex, positive definite" if convex else "locally unique"


@dataclass(frozen=True, eq=False)
class LeastSquaresCertificate:
    """The exact statement for (1/n)‖y − Xθ‖² + θᵀΛθ, whose Hessian is 2A, A = XᵀX/n + Λ."""

    verdict: Literal["strongly convex", "not unique", "unbounded"]
    eigenvalues: tuple[float, ...]
    """Eigenvalues of A, ascending."""
    minimiser: Tensor | None
    """A⁻¹Xᵀy/n; the minimiser of least norm where A is singular; None where there is none."""
    kernel: Tensor
    """An orthonormal basis of ker A, p×d: the minimisers are `minimiser` plus its span."""
    distance: float | None
    """From `params` to the nearest minimiser; None without params or without a minimiser."""
    message: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.message}"


def certify_least_squares(
    X: Tensor, y: Tensor, matrix: Tensor, *, params: Tensor | None = None
) -> LeastSquaresCertificate:
    """Minimisers of (1/n)‖y − Xθ‖² + θᵀΛθ: one, an affine set, or none.

    With A = XᵀX/n + Λ and b = Xᵀy/n, the gradient is 2(Aθ − b). Hence:
    A ≻ 0 gives the one minimiser A⁻¹b;
    A ⪰ 0 singular with b in range(A) gives the set A†b + ker A;
    otherwise (b has a part in ker A, or A has a negative eigenvalue) f is unbounded below.

    Only the symmetric part of Λ matters. Trap: for ½‖y − Xθ‖² + ½θᵀMθ pass Λ = M/n.

    Args:
        X: the inputs, one row per example.
        y: the targets.
        matrix: Λ, as from Fit.matrix().
        params: weights whose distance to the nearest minimiser is wanted.
    """
    _check_least_squares(X, y, matrix, params)
    X, y, matrix = X.detach().double(), y.detach().double().flatten(), matrix.detach().double()
    A, b = X.T @ X / len(X) + (matrix + matrix.T) / 2, X.T @ y / len(X)
    # Columns of unequal scale spread the eigenvalues of A without making it singular: signs are
    # those of D A D, with D such that the diagonal is about one.
    scale = curvature.unit_scale(X.square().mean(0) + matrix.diagonal().abs())
    values, vectors = torch.linalg.eigh(scale[:, None] * A * scale)
    zero_level = (
        curvature.ZERO_TOLERANCE * torch.finfo(torch.float64).eps * float(values.abs().max())
    )
    nonzero = values.abs() > zero_level
    kernel = torch.linalg.qr(scale[:, None] * vectors[:, ~nonzero]).Q
    # Kᵀb is a sum of products of entries of X, y and K; its rounding is relative to this bound.
    magnitude = (X.norm(dim=0) @ kernel.abs()) * y.norm() / len(X)
    minimiser = None
    if float(values[0]) < -zero_level or ((kernel.T @ b).abs() > ZERO_GRADIENT * magnitude).any():
        verdict = "unbounded"
    else:
        verdict = "not unique" if kernel.shape[1] else "strongly convex"
        basis = vectors[:, nonzero]
        minimiser = scale * (basis @ ((basis.T @ (scale * b)) / values[nonzero]))
        minimiser = minimiser - kernel @ (kernel.T @ minimiser)
    smallest, *_ = eigenvalues = torch.linalg.eigvalsh(A).tolist()
    numbers = (
        f"smallest eigenvalue of XᵀX/n + Λ {smallest:.3g}, {kernel.shape[1]}-dimensional kernel"
    )
    message, distance = f"{MEANINGS[verdict]} ({numbers})", None
    if minimiser is not None and params is not None:
        difference = params.detach().double().flatten() - minimiser
        distance = float((difference - kernel @ (kernel.T @ difference)).norm())
        message += f"; the weights lie {distance:.3g} from the minimisers"
    return LeastSquaresCertificate(
        verdict, tuple(eigenvalues), minimiser, kernel, distance, f"{message}."
    )


def _check_least_squares(X: Tensor, y: Tensor, matrix: Tensor, params: Tensor | None) -> None:
    if X.ndim != 2 or not X.numel() or y.numel() != len(X):
        raise InputError(
            f"X has shape {tuple(X.shape)} and y {tuple(y.shape)}: pass X with one row per example "
            "and y with one observation per row of X."
        )
    p = X.shape[1]
    if matrix.shape != (p, p):
        raise InputError(
            f"matrix has shape {tuple(matrix.shape)}: pass Λ of shape ({p}, {p}), as from "
            "Fit.matrix(); torch.diag makes it from a diagonal."
        )
    if params is not None and params.numel() != p:
        raise InputError(f"params has {params.numel()} entries: pass one vector of {p}.")
    for name, tensor in {"X": X, "y": y, "matrix": matrix, "params": params}.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise InputError(f"{name} contains NaN or infinite values: pass finite numbers.")
