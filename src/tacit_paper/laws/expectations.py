"""Expectations over noise and masks without draws: a few cases with weights, and exact sums."""

from collections.abc import Callable
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tacit import Objective
from tacit.objective.params import Params


class Cases(NamedTuple):
    """Values of a random vector, one per row, and their weights, which sum to 1."""

    values: Tensor
    weights: Tensor


def masks(size: int, q: float) -> Cases:
    """All masks of dropout: entries are 0 with probability q, and 1/(1 − q) otherwise."""
    kept = torch.tensor(list(product((0.0, 1.0), repeat=size)), dtype=torch.float64)
    chances = (q * (1 - kept) + (1 - q) * kept).prod(1)
    return Cases(kept / (1 - q), chances)


def gaussian(size: int, sigma: float) -> Cases:
    """Independent normal numbers of standard deviation σ, exact for polynomials of degree 5."""
    return _symmetric_rule(size, sigma**2, 3 * sigma**4)


def uniform(size: int, width: float) -> Cases:
    """Independent numbers, uniform in ±width/2, exact for polynomials of degree 5."""
    return _symmetric_rule(size, width**2 / 12, width**4 / 80)


def _symmetric_rule(size: int, variance: float, fourth: float) -> Cases:
    """Points 0, ±r e_i and ±r e_i ± r e_j with the moments of independent symmetric numbers.

    All moments up to degree 5 agree: E z_i² = variance, E z_i⁴ = fourth, E z_i²z_j² = variance².
    Some weights are negative.
    """
    r = (fourth / variance) ** 0.5
    unit = r * torch.eye(size, dtype=torch.float64)
    axes = torch.cat([unit, -unit])
    signs = list(product((1, -1), repeat=2))
    pairs = [a * unit[i] + b * unit[j] for i, j in combinations(range(size), 2) for a, b in signs]
    pair_weight = variance**2 / (4 * r**4)
    axis_weight = variance / (2 * r**2) - 2 * (size - 1) * pair_weight
    values = torch.cat([torch.zeros_like(unit[:1]), axes, *[pair[None] for pair in pairs]])
    weights = [axis_weight] * len(axes) + [pair_weight] * len(pairs)
    return Cases(values, torch.tensor([1 - sum(weights), *weights], dtype=torch.float64))


Forward = Callable[..., Tensor]
"""forward(model, inputs, value): the outputs, with a value of the random vector."""


def expected(objective: Objective, forward: Forward, cases: Cases) -> Objective:
    """The expected loss, the sum of weight · loss(forward(model, inputs, value), target)."""
    loss = objective.loss
    assert loss is not None

    def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch

        def loss_of(value: Tensor) -> Tensor:
            return loss(forward(model, inputs, value), target)

        return torch.vmap(loss_of)(cases.values) @ cases.weights

    return Objective.from_mean_loss(objective.model, mean, objective.data, count=_count)


def _count(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[0])


def size_of(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def moved_weights(model: nn.Module, inputs: Tensor, shift: Tensor) -> Tensor:
    """The outputs at θ + shift."""
    return functional_call(model, add_vector(dict(model.named_parameters()), shift), (inputs,))


def add_vector(point: Params, shift: Tensor) -> Params:
    """The point θ + shift, where the shift is one vector for all parameters."""
    parts = shift.split([p.numel() for p in point.values()])
    return {n: p + s.view_as(p) for (n, p), s in zip(point.items(), parts, strict=True)}


def minimum(objective: Objective) -> Params:
    """The parameters at which L-BFGS ends, started from those of the model."""
    point = {n: p.detach().clone().requires_grad_() for n, p in objective.params.items()}
    optimizer = torch.optim.LBFGS(
        point.values(), max_iter=500, tolerance_grad=1e-13, tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        value, gradient = objective.value_and_gradient(point)
        for name, p in point.items():
            p.grad = gradient[name]
        return value

    optimizer.step(closure)
    return {n: p.detach() for n, p in point.items()}
