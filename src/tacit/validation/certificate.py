"""Whether retraining on L + R must recover θ̂: uniqueness and stability of the minimiser."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.objective.objective import Objective
from tacit.objective.params import Params, norm
from tacit.regularizers import Regularizer
from tacit.validation.curvature import (
    ZERO_TOLERANCE,
    SmallestEigenvalue,
    is_quadratic,
    smallest_eigenvalue,
    unit_scale,
)
from tacit.validation.penalised import NoHessianError, PenalisedObjective, penalty

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
    if not isinstance(objective, Objective):
        raise InputError(
            f"objective is a {type(objective).__name__}: pass tacit.Objective(model, loss, data)."
        )
    point = objective.point(params)
    function = PenalisedObjective(objective, penalty(regularizers, strengths))
    theta = function.flatten(point)
    residual = function.value_and_gradient(theta)[1]
    _check_smooth(regularizers, point)
    generator = torch.Generator().manual_seed(seed)
    smallest = smallest_eigenvalue(function, theta, generator)
    quadratic = is_quadratic(function, theta, generator)
    verdict = _verdict(
        smallest,
        quadratic=quadratic,
        convex=convex,
        residual=residual,
        loss_gradient_norm=norm(objective.gradient(point)),
        rounding_level=10 * math.hypot(*objective.rounding(point).values()),
    )
    return _certificate(verdict, smallest, float(residual.norm()))


def _check_smooth(regularizers: Regularizer | Sequence[Regularizer], params: Params) -> None:
    columns = check_candidates(regularizers, None).bind(params).columns
    for name in columns.active:
        mask = columns.kinks(name, slice(0, params[name].numel()))
        if mask is not None and mask.any():
            raise NoHessianError(
                f"{int(mask.sum())} entries of {name!r} lie at a kink of a regularizer (exactly "
                "zero with l1, for example), where it has no Hessian. Use smooth_l1, or weights "
                "away from the kink."
            )


def _verdict(
    smallest: SmallestEigenvalue,
    *,
    quadratic: bool,
    convex: bool,
    residual: Tensor,
    loss_gradient_norm: float,
    rounding_level: float,
) -> Verdict:
    """The strongest statement on uniqueness that holds.

    Args:
        smallest: the smallest eigenvalue of ∇²f(θ̂).
        quadratic: whether f is quadratic.
        convex: whether the user stated that f is convex.
        residual: ∇f(θ̂).
        loss_gradient_norm: ‖∇L(θ̂)‖.
        rounding_level: norms of gradients up to this are rounding.
    """
    stationary = float(residual.norm()) <= max(STATIONARY * loss_gradient_norm, rounding_level)
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
        along_flat = float((smallest.vectors.T @ residual).norm())
        sloped = along_flat > max(ZERO_GRADIENT * loss_gradient_norm, rounding_level)
        return "unbounded" if quadratic and sloped else "not unique"
    if quadratic:
        return "strongly convex"
    return "convex, positive definite" if convex else "locally unique"


def _certificate(
    verdict: Verdict, smallest: SmallestEigenvalue, residual_norm: float
) -> Certificate:
    positive = smallest.value > smallest.zero_level
    distance = residual_norm / smallest.value if positive else None
    gap = residual_norm**2 / (2 * smallest.value) if positive else None
    numbers = (
        f"smallest curvature {smallest.value:.3g} ({smallest.method}), ‖∇f‖ {residual_norm:.3g}"
    )
    bound = ""
    if distance is not None:
        condition = "" if verdict == "strongly convex" else ", if the curvature persists"
        bound = f"; the minimiser lies within {distance:.3g} of these weights{condition}"
    return Certificate(
        verdict=verdict,
        smallest_eigenvalue=smallest.value,
        residual_norm=residual_norm,
        distance_bound=distance,
        gap_bound=gap,
        method=smallest.method,
        message=f"{MEANINGS[verdict]} ({numbers}){bound}.",
    )


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
    X, y, matrix, theta = _check_least_squares(X, y, matrix, params)
    A, b = X.T @ X / len(X) + (matrix + matrix.T) / 2, X.T @ y / len(X)
    # Columns of unequal scale spread the eigenvalues of A without making it singular: signs are
    # those of D A D, with D such that the diagonal is about one.
    scale = unit_scale(X.square().mean(0) + matrix.diagonal().abs())
    values, vectors = torch.linalg.eigh(scale[:, None] * A * scale)
    zero_level = ZERO_TOLERANCE * torch.finfo(torch.float64).eps * float(values.abs().max())
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
    distance = None
    if minimiser is not None and theta is not None:
        difference = theta - minimiser
        distance = float((difference - kernel @ (kernel.T @ difference)).norm())
    eigenvalues = torch.linalg.eigvalsh(A)
    return LeastSquaresCertificate(
        verdict=verdict,
        eigenvalues=tuple(eigenvalues.tolist()),
        minimiser=minimiser,
        kernel=kernel,
        distance=distance,
        message=_least_squares_message(verdict, float(eigenvalues[0]), kernel.shape[1], distance),
    )


def _least_squares_message(
    verdict: Verdict, smallest: float, kernel_size: int, distance: float | None
) -> str:
    numbers = f"smallest eigenvalue of XᵀX/n + Λ {smallest:.3g}, {kernel_size}-dimensional kernel"
    where = "" if distance is None else f"; the weights lie {distance:.3g} from the minimisers"
    return f"{MEANINGS[verdict]} ({numbers}){where}."


def _check_least_squares(
    X: Tensor, y: Tensor, matrix: Tensor, params: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if X.ndim != 2 or not X.numel() or y.numel() != len(X):
        raise InputError(
            f"X has shape {tuple(X.shape)} and y {tuple(y.shape)}: pass X with one row per example "
            "and y with one observation per row of X."
        )
    p = X.shape[1]
    if matrix.shape != (p, p):
        raise InputError(
            f"matrix has shape {tuple(matrix.shape)} for {p} weights: pass Λ of shape ({p}, {p}), "
            "as Fit.matrix() returns it; torch.diag makes it from a diagonal."
        )
    if params is not None and params.numel() != p:
        raise InputError(
            f"params has {params.numel()} entries for {p} weights: pass one vector of {p}."
        )
    tensors = {"X": X, "y": y, "matrix": matrix} | ({} if params is None else {"params": params})
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} contains NaN or infinite values: pass finite numbers.")
    theta = None if params is None else params.detach().double().flatten()
    X, y, matrix = (tensor.detach().double() for tensor in (X, y, matrix))
    return X, y.flatten(), matrix, theta
