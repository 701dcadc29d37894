"""Closed-form predictions that estimates are checked against.

Least squares here is L(θ) = (1/n)‖y − Xθ‖² with the penalty θᵀΛθ, and S are the eigenvalues of
XᵀX/n = V S Vᵀ.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from tacit.errors import InputError


def early_stopping(X: Tensor, step: float, t: float) -> Tensor:
    """Λ(t) = V S((I − ηS)^−t − I)⁻¹ Vᵀ: what t steps of gradient descent from zero amount to.

    The t-th iterate is the exact minimiser of (1/n)‖y − Xθ‖² + θᵀΛ(t)θ. Trap: a step here is
    θ += (η/n) Xᵀ(y − Xθ), descent on *half* the mean squared error; with torch's mse_loss and
    learning rate η pass step=2η. Needs η‖XᵀX/n‖ < 1.
    """
    if not (_positive(step) and _positive(t)):
        raise InputError(f"step {step!r} and t {t!r}: both must be finite and above zero.")
    values, vectors = _spectrum(X)
    largest = float(values.max())
    if step * largest >= 1:
        raise InputError(
            f"step {step:g} times the largest eigenvalue {largest:g} of XᵀX/n is not below 1: the "
            f"law needs a step below {1 / largest:.3g}."
        )
    # s/((1 − ηs)^−t − 1) in a form that keeps its digits for small ηst.
    return _matrix(
        values, torch.expm1(-t * torch.log1p(-step * values)), vectors, limit=1 / (step * t)
    )


def early_stopping_flow(X: Tensor, time: float) -> Tensor:
    """Λ(τ) = V S(e^{τS} − I)⁻¹ Vᵀ: what gradient flow for time τ = ηt amounts to.

    The flow is dθ/dτ = (1/n) Xᵀ(y − Xθ) from zero (Ali, Kolter & Tibshirani 2019).
    """
    if not _positive(time):
        raise InputError(f"time {time!r}: pass a finite number above zero.")
    values, vectors = _spectrum(X)
    return _matrix(values, torch.expm1(time * values), vectors, limit=1 / time)


def _positive(number: float) -> bool:
    return isinstance(number, Real) and 0 < number < math.inf


def _spectrum(X: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(X, Tensor):
        raise InputError(f"X is a {type(X).__name__}: pass a torch tensor.")
    if X.ndim != 2 or not len(X) or not torch.isfinite(X).all():
        raise InputError(
            f"X has shape {tuple(X.shape)}: pass a finite matrix with one row an example."
        )
    X = X.double()
    _, singular, vh = torch.linalg.svd(X, full_matrices=len(X) < X.shape[1])
    values = X.new_zeros(X.shape[1])
    values[: len(singular)] = singular.square() / len(X)
    return values, vh.T


def _matrix(values: Tensor, growth: Tensor, vectors: Tensor, *, limit: float) -> Tensor:
    """V diag(s/growth) Vᵀ, with the limit where s is zero."""
    ratio = torch.where(growth > 0, values / torch.where(growth > 0, growth, 1), limit)
    return (vectors * ratio) @ vectors.T
