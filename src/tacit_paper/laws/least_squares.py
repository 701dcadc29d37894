"""Linear regressions: stopped early, with decay of factors, by proximal steps.

From zero, a linear method takes θ to (1 − P)θ*, where θ* solves Sθ* = Xᵀy/n with S = XᵀX/n, and P
is a polynomial of S. This is the minimum of the loss plus ½θᵀQθ with Q = S P (1 − P)⁻¹, because
(S + Q)(1 − P) = S.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tacit import Fit, Objective, Regularizer, endpoint_equations, fit, stack
from tacit.regularizers import symmetric
from tacit_paper.laws.law import Recovered
from tacit_paper.laws.small_models import (
    Examples,
    draw,
    half_squares,
    linear_model,
    train,
)
from tacit_paper.minimising import minimise

INPUTS, TARGETS = 3, 12
ENTRIES = {
    (i, j): f"symmetric[weight[0,{i}],weight[0,{j}]]"
    for i in range(INPUTS)
    for j in range(i, INPUTS)
}
"""The names of the strengths of `symmetric()`, by entry of Λ."""


def linear_data(seed: int, inputs: int = INPUTS, outputs: int = TARGETS) -> Examples:
    """Inputs, and outputs that are linear in them, with noise."""
    X, truth, noise = draw(seed, (40, inputs), (inputs, outputs), (40, outputs))
    return X, X @ truth + 0.5 * noise


def descend_from_zero(
    data: Examples, steps: int, lr: float, momentum: float = 0.0
) -> Iterator[nn.Linear]:
    """Train a linear model of every target by SGD on the whole data; the model after each step."""
    model = linear_model(torch.zeros(TARGETS, INPUTS, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in train(model, data, optimizer, steps):
        yield model


def error_matrices(X: Tensor, steps: int, lr: float, momentum: float = 0.0) -> Iterator[Tensor]:
    """P after t = 1, 2, … steps of gradient descent with momentum."""
    S, one = X.T @ X / len(X), torch.eye(INPUTS, dtype=torch.float64)
    before, now = one, one - lr * S
    for _ in range(steps):
        yield now
        before, now = now, (1 + momentum) * now - lr * S @ now - momentum * before


def penalty_matrix(X: Tensor, P: Tensor) -> Tensor:
    """Q = S P (1 − P)⁻¹."""
    return X.T @ X / len(X) @ P @ torch.linalg.inv(torch.eye(INPUTS).to(P) - P)


def fit_targets(data: Examples, weights: Tensor, penalty: Regularizer) -> Fit:
    """The fit of one penalty to the endpoints of all targets, each a row of the weights."""
    X, y = data
    objectives = [
        Objective(linear_model(row[None]), half_squares, (X, target[:, None]))
        for row, target in zip(weights, y.T, strict=True)
    ]
    return fit(stack([endpoint_equations(objective, penalty) for objective in objectives]))


def recover_matrix(data: Examples, weights: Tensor, Q: Tensor) -> Recovered:
    """Every entry of θᵀΛθ, fitted without knowing anything of it, against Λ = Q/2.

    The strengths are in an orthonormal basis of symmetric matrices: √2 Λ_ij where i ≠ j.
    """
    scale = {True: 0.5, False: 0.5**0.5}
    coefficients = {name: scale[i == j] * float(Q[i, j]) for (i, j), name in ENTRIES.items()}
    return Recovered(fit_targets(data, weights, symmetric()), coefficients)


def sparse_data(seed: int) -> Examples:
    """Inputs, and outputs that depend on some of them."""
    X, truth, noise = draw(seed, (80, 24), (24, 1), (80, 1))
    return X, X @ (truth * (truth.abs() > 0.7)) + 0.3 * noise


def low_rank_data(seed: int) -> Examples:
    """Inputs, and outputs of two linear combinations of them."""
    X, left, right, noise = draw(seed, (60, 7), (7, 2), (2, 5), (60, 5))
    return X, X @ left @ right + 0.3 * noise


def decayed_product(
    data: Examples, factors: Sequence[Tensor], product: Callable[..., Tensor], decay: float
) -> Objective:
    """The loss of the product of factors that were trained with weight decay."""

    def decayed() -> Tensor:
        squares = torch.stack([factor.square().sum() for factor in factors]).sum()
        return half_squares(data[0] @ product(*factors).T, data[1]) + decay / 2 * squares

    minimise(decayed, factors)
    return Objective(linear_model(product(*factors)), half_squares, data)


def entrywise(*factors: Tensor) -> Tensor:
    """The product u ⊙ v ⊙ …."""
    return torch.stack(factors).prod(0)


def matrix_product(*factors: Tensor) -> Tensor:
    """The product U V …."""
    return torch.linalg.multi_dot(factors)


def proximal_descent(
    data: Examples, proximal: Callable[[Tensor], Tensor], step: float = 0.3
) -> Objective:
    """Gradient steps on the loss of a linear model, each followed by a proximal one."""
    (X, y), weight = data, torch.zeros(data[1].shape[1], data[0].shape[1], dtype=torch.float64)
    for _ in range(2000):
        weight = proximal(weight - step * (X @ weight.T - y).T @ X / len(X))
    return Objective(linear_model(weight), half_squares, data)
