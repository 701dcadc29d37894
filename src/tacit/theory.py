"""Closed forms for early stopping in least squares, to compare estimates with.

The loss is L(θ) = (1/n)‖y − Xθ‖² and the penalty θᵀΛθ. The matrix XᵀX/n = V S Vᵀ has the
eigenvalues S, and training starts at zero.

Derivation: with b = Xᵀy/n, t steps θ += η(b − V S Vᵀθ) from zero give
θ_t = V (I − (I − ηS)^t) S⁻¹ Vᵀb, and the minimiser of the penalised loss with Λ = V D Vᵀ is
V (S + D)⁻¹ Vᵀb. Both are equal where S + D = S (I − (I − ηS)^t)⁻¹, that is
D = S ((I − ηS)^−t − I)⁻¹.
"""

import torch
from torch import Tensor

from tacit.errors import InputError, check_number, check_type


def early_stopping(X: Tensor, step: float, t: float) -> Tensor:
    """Λ(t) = V S((I − ηS)^−t − I)⁻¹ Vᵀ: the penalty equivalent to t steps of gradient descent.

    The t-th iterate is the exact minimiser of (1/n)‖y − Xθ‖² + θᵀΛ(t)θ. Needs η‖XᵀX/n‖ < 1.

    Trap: a step here is θ += (η/n) Xᵀ(y − Xθ), descent on *half* the mean squared error. With
    torch's mse_loss and learning rate η pass step=2η.
    """
    check_number("step", step, above=0)
    check_number("t", t, above=0)
    eigenvalues, eigenvectors = _spectrum(X)
    largest = float(eigenvalues.max())
    if step * largest >= 1:
        raise InputError(
            f"step {step:g} is too large for the largest eigenvalue {largest:g} of XᵀX/n: pass one "
            f"below {1 / largest:.3g}."
        )
    # (1 − ηs)^−t − 1, in a form that is accurate for small ηst.
    growth = torch.expm1(-t * torch.log1p(-step * eigenvalues))
    return _penalty_matrix(eigenvalues, growth, eigenvectors, limit=1 / (step * t))


def early_stopping_flow(X: Tensor, time: float) -> Tensor:
    """Λ(τ) = V S(e^{τS} − I)⁻¹ Vᵀ: the penalty equivalent to gradient flow for time τ = ηt.

    The flow is dθ/dτ = (1/n) Xᵀ(y − Xθ) from zero (Ali, Kolter & Tibshirani 2019).
    """
    check_number("time", time, above=0)
    eigenvalues, eigenvectors = _spectrum(X)
    growth = torch.expm1(time * eigenvalues)
    return _penalty_matrix(eigenvalues, growth, eigenvectors, limit=1 / time)


def _spectrum(X: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of XᵀX/n, from the singular values of X."""
    check_type("X", X, Tensor, "a torch tensor")
    if X.ndim != 2 or not len(X) or not torch.isfinite(X).all():
        raise InputError(
            f"X has shape {tuple(X.shape)}: pass a finite matrix, one row per example."
        )
    X = X.double()
    _, singular_values, vh = torch.linalg.svd(X, full_matrices=len(X) < X.shape[1])
    eigenvalues = X.new_zeros(X.shape[1])
    eigenvalues[: len(singular_values)] = singular_values.square() / len(X)
    return eigenvalues, vh.T


def _penalty_matrix(
    eigenvalues: Tensor, growth: Tensor, eigenvectors: Tensor, *, limit: float
) -> Tensor:
    """V diag(s/growth) Vᵀ, with `limit` in place of s/growth where s is zero."""
    ratio = torch.where(growth > 0, eigenvalues / torch.where(growth > 0, growth, 1), limit)
    return (eigenvectors * ratio) @ eigenvectors.T
