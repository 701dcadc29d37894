"""What retraining on L + R can recover: uniqueness and stability of the minimiser at θ̂."""

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
from tacit.validation.curvature import ZERO, Spectrum, is_quadratic, spectrum, unit_scale
from tacit.validation.penalised import NoHessianError, Penalised, penalty

Verdict = Literal[
    "strongly convex",
    "convex, positive definite",
    "locally unique",
    "not unique",
    "not a minimum",
    "unbounded",
]

STATIONARY = 0.1
"""‖∇(L+R)‖ beyond this part of ‖∇L‖: the penalty does not balance the loss at θ̂."""
RANGE = 1e-8
"""A force along flat directions beyond this part of the whole is one."""

MEANING: dict[Verdict, str] = {
    "strongly convex": "f is quadratic with positive curvature, as far as probed: it has one "
    "minimiser, and retraining finds it from any start",
    "convex, positive definite": "f is convex, as stated, with positive curvature here: its "
    "minimiser is the only one, and retraining finds it from any start",
    "locally unique": "no other stationary point lies close by: retraining that ends near these "
    "weights recovers them, but it may end in another minimum",
    "not unique": "f is flat, to second order at least, along some direction: retraining can "
    "recover the loss but not these weights, unless something selects among the minimisers",
    "not a minimum": "these weights are no minimum of f: retraining moves away from them",
    "unbounded": "f falls without end: it has no minimiser, and retraining recovers nothing "
    "without a bound on the weights",
}


@dataclass(frozen=True)
class Certificate:
    """What is known of the minimisers of f = L + R near θ̂, in plain values."""

    verdict: Verdict
    smallest: float
    """μ, the smallest eigenvalue of ∇²f(θ̂)."""
    residual: float
    """ε = ‖∇f(θ̂)‖."""
    distance_bound: float | None
    """ε/μ, no less than ‖θ̂ − θ*‖ under strong convexity; else as far as μ holds on the way."""
    gap_bound: float | None
    """ε²/(2μ), no less than f(θ̂) − f(θ*) under the same condition."""
    method: Literal["dense", "Lanczos"]
    """How μ was computed."""
    message: str

    @property
    def everywhere(self) -> bool:
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
    """Judge whether retraining on f = L + R(·, Λ̂) must come back to θ̂.

    With μ the smallest eigenvalue of ∇²f(θ̂) and ε = ‖∇f(θ̂)‖: μ > 0 everywhere gives a unique
    minimiser within ε/μ of θ̂, and f(θ̂) within ε²/(2μ) of its value. That f is quadratic, so that
    μ holds everywhere, is found by probing whether ∇f is affine. Trap: for a network the statement
    is local, and μ > 0 says nothing of other minima.

    Args:
        objective: the loss, without any penalty.
        regularizers: those of the fit, its known penalties included.
        strengths: a Fit, or strengths by name.
        params: θ̂; by default the model's parameters as they are.
        convex: your statement that L + R is convex everywhere (logistic regression, say).
        seed: of the probes and of Lanczos' first vector.
    """
    if not isinstance(objective, Objective):
        raise InputError(
            f"certify was given a {type(objective).__name__}: pass tacit.Objective(model, loss, "
            "data)."
        )
    point = objective.point(params)
    function = Penalised(objective, penalty(regularizers, strengths))
    theta = function.flat(point)
    residual = function.value_and_gradient(theta)[1]
    _check_smooth(regularizers, point)
    generator = torch.Generator().manual_seed(seed)
    found = spectrum(function, theta, generator)
    quadratic = is_quadratic(function, theta, generator)
    verdict = _judge(
        found,
        quadratic=quadratic,
        convex=convex,
        residual=residual,
        force=norm(objective.gradient(point)),
        floor=10 * norm(objective.rounding(point)),
    )
    return _written(verdict, found, float(residual.norm()))


def _check_smooth(regularizers: Regularizer | Sequence[Regularizer], params: Params) -> None:
    columns = check_candidates(regularizers, None).bind(params).columns
    for name in columns.active:
        mask = columns.kinks(name, slice(0, params[name].numel()))
        if mask is not None and mask.any():
            raise NoHessianError(
                f"{int(mask.sum())} entries of {name!r} lie at a kink of a regularizer (exactly "
                "zero under l1, say), where it has no Hessian. Use smooth_l1, or weights off the "
                "kink."
            )


def _judge(
    found: Spectrum,
    *,
    quadratic: bool,
    convex: bool,
    residual: Tensor,
    force: float,
    floor: float,
) -> Verdict:
    """The propositions on uniqueness, the strongest that holds."""
    stationary = float(residual.norm()) <= max(STATIONARY * force, floor)
    if found.smallest < -found.zero:
        if convex:
            raise InputError(
                f"convex=True, but L + R has curvature {found.smallest:.3g} here, which is "
                "negative: it is not convex. Leave convex= out."
            )
        return "unbounded" if quadratic else "not a minimum"
    if not quadratic and not stationary:
        return "not a minimum"
    if found.smallest <= found.zero:
        pushed = float((found.vectors.T @ residual).norm()) > max(RANGE * force, floor)
        return "unbounded" if quadratic and pushed else "not unique"
    if quadratic:
        return "strongly convex"
    return "convex, positive definite" if convex else "locally unique"


def _written(verdict: Verdict, found: Spectrum, residual: float) -> Certificate:
    curved = found.smallest > found.zero
    distance = residual / found.smallest if curved else None
    gap = residual**2 / (2 * found.smallest) if curved else None
    numbers = f"smallest curvature {found.smallest:.3g} ({found.method}), ‖∇f‖ {residual:.3g}"
    bound = ""
    if distance is not None:
        reach = "lies" if verdict == "strongly convex" else "lies, if curvature holds on the way,"
        bound = f"; the minimiser {reach} within {distance:.3g} of these weights"
    return Certificate(
        verdict=verdict,
        smallest=found.smallest,
        residual=residual,
        distance_bound=distance,
        gap_bound=gap,
        method=found.method,
        message=f"{MEANING[verdict]} ({numbers}){bound}.",
    )


@dataclass(frozen=True, eq=False)
class LeastSquaresCertificate:
    """The exact statement for (1/n)‖y − Xθ‖² + θᵀΛθ, whose Hessian is 2A, A = XᵀX/n + Λ."""

    verdict: Literal["strongly convex", "not unique", "unbounded"]
    eigenvalues: tuple[float, ...]
    """Of A, ascending."""
    minimiser: Tensor | None
    """A⁻¹Xᵀy/n; the one of least norm where A is singular; None where there is none."""
    kernel: Tensor
    """An orthonormal basis of ker A, p×d: minimisers are `minimiser` plus any of its span."""
    distance: float | None
    """From the given weights to the nearest minimiser."""
    message: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.message}"


def certify_least_squares(
    X: Tensor, y: Tensor, matrix: Tensor, *, params: Tensor | None = None
) -> LeastSquaresCertificate:
    """Minimisers of (1/n)‖y − Xθ‖² + θᵀΛθ: one, an affine set, or none.

    With A = XᵀX/n + Λ and b = Xᵀy/n: A ≻ 0 has the one minimiser A⁻¹b; A ⪰ 0 singular has the set
    A†b + ker A if b lies in range(A); else, and where A has a negative eigenvalue, f is unbounded
    below. Only the symmetric part of Λ matters. Trap: for ½‖y − Xθ‖² + ½θᵀMθ pass Λ = M/n.
    """
    X, y, matrix, theta = _check_least_squares(X, y, matrix, params)
    A, b = X.T @ X / len(X) + (matrix + matrix.T) / 2, X.T @ y / len(X)
    # Columns of unequal scale spread the eigenvalues of A without making it singular: signs are
    # those of D A D, with D such that the diagonal is about one.
    scale = unit_scale(X.square().mean(0) + matrix.diagonal().abs())
    values, vectors = torch.linalg.eigh(scale[:, None] * A * scale)
    zero = ZERO * torch.finfo(torch.float64).eps * float(values.abs().max())
    flat, inside = vectors[:, values.abs() <= zero], vectors[:, values.abs() > zero]
    kernel = torch.linalg.qr(scale[:, None] * flat).Q
    along = (X.norm(dim=0) @ kernel.abs()) * y.norm() / len(X)  # what rounding is relative to
    minimiser = None
    if float(values[0]) < -zero or ((kernel.T @ b).abs() > RANGE * along).any():
        verdict = "unbounded"
    else:
        verdict = "not unique" if kernel.shape[1] else "strongly convex"
        own = values[values.abs() > zero]
        minimiser = scale * (inside @ ((inside.T @ (scale * b)) / own))
        minimiser = minimiser - kernel @ (kernel.T @ minimiser)
    distance = None
    if minimiser is not None and theta is not None:
        away = theta - minimiser
        distance = float((away - kernel @ (kernel.T @ away)).norm())
    values = torch.linalg.eigvalsh(A)
    numbers = f"smallest eigenvalue of XᵀX/n + Λ {float(values[0]):.3g}, kernel {kernel.shape[1]}"
    found = "" if distance is None else f"; the weights lie {distance:.3g} from the minimisers"
    return LeastSquaresCertificate(
        verdict=verdict,
        eigenvalues=tuple(values.tolist()),
        minimiser=minimiser,
        kernel=kernel,
        distance=distance,
        message=f"{MEANING[verdict]} ({numbers}-dimensional){found}.",
    )


def _check_least_squares(
    X: Tensor, y: Tensor, matrix: Tensor, params: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if X.ndim != 2 or not X.numel() or y.numel() != len(X):
        raise InputError(
            f"X has shape {tuple(X.shape)} and y {tuple(y.shape)}: pass a matrix with one row an "
            "example, and one observation a row."
        )
    p = X.shape[1]
    if matrix.shape != (p, p):
        raise InputError(
            f"matrix has shape {tuple(matrix.shape)} for {p} weights: pass Λ of shape ({p}, {p}), "
            "as Fit.matrix() gives it; torch.diag makes it from a diagonal."
        )
    if params is not None and params.numel() != p:
        raise InputError(
            f"params has {params.numel()} entries for {p} weights: pass one vector of {p}."
        )
    given = {"X": X, "y": y, "matrix": matrix} | ({} if params is None else {"params": params})
    for name, tensor in given.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} holds NaN or infinite values: pass finite numbers.")
    theta = None if params is None else params.detach().double().flatten()
    X, y, matrix = (part.detach().double() for part in (X, y, matrix))
    return X, y.flatten(), matrix, theta
