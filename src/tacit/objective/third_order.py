"""vᵀHv along directions v, and its gradient, which takes third derivatives of the loss.

Torch's third derivatives are wrong, without an error, through fused layers such as group norm, and
batch norm in training mode. There the gradient is a central difference of Hessian products. Layer
norm has derivatives of ours (`closed_forms`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.params import Params, norm, same_buffers, shorten
from tacit.objective.passes import Derivative, PassResult

AT_ONCE = 4
"""Directions whose third derivatives share one backward pass."""
STEP = 1e-3
"""Step of the differences, as a part of the weights' size."""
TOLERANCE = 0.01
"""Relative change with the step above which a difference is refused."""
ROUNDING = 1e-13
"""Relative rounding of a Hessian product in float64."""

Run = Callable[[Params, Derivative], PassResult]
"""run(params, derivative): one pass over the data, as that of `Passes`."""


def sum_of_gradients(
    run: Run, point: Params, directions: Sequence[Params], wrong: Sequence[str]
) -> Params:
    """Σ_v ∇(vᵀHv) over directions, in float64; by differences if layers are wrong."""
    if wrong:
        return curvature_differences(run, point, directions, wrong)
    return run(point, partial(curvature_gradient, directions=directions)).derivative


def curvatures(mean: Tensor, leaves: Params, directions: Sequence[Params]) -> Sequence[Tensor]:
    """Σ_v v ⊙ Hv over directions, one tensor per leaf; the sum of all entries is Σ_v vᵀHv."""
    inputs = list(leaves.values())
    gradients = derivatives.gradient(mean, leaves, graph=True)
    totals = [torch.zeros_like(p) for p in inputs]
    for direction in directions:
        vectors = [direction[n] for n in leaves]
        product = derivatives.pull_back(
            zip(gradients, vectors, strict=True), inputs, retain_graph=True
        )
        for total, vector, entries in zip(totals, vectors, product, strict=True):
            if entries is not None:
                total.add_(vector.to(entries) * entries)
    return totals


def curvature_gradient(
    mean: Tensor, leaves: Params, directions: Sequence[Params]
) -> Sequence[Tensor | None]:
    """∇ Σ_v vᵀHv over directions, one tensor per leaf, by a third backward pass."""
    pairs = [(direction, direction) for direction in directions]
    return third_derivative(mean, leaves, pairs)


def third_derivative(
    mean: Tensor, leaves: Params, pairs: Sequence[tuple[Params, Params]]
) -> Sequence[Tensor | None]:
    """Σ ∇(uᵀHv) over pairs of directions (u, v); None for leaves on which it does not depend."""
    inputs = list(leaves.values())
    gradients = derivatives.gradient(mean, leaves, graph=True)
    totals: list[Tensor | None] = [None] * len(inputs)
    for start in range(0, len(pairs), AT_ONCE):
        products: list[tuple[Tensor | None, Tensor]] = []
        for u, v in pairs[start : start + AT_ONCE]:
            along = zip(gradients, (v[n] for n in leaves), strict=True)
            product = derivatives.pull_back(along, inputs, create_graph=True)
            products += zip(product, (u[n] for n in leaves), strict=True)
        third = derivatives.pull_back(products, inputs, retain_graph=True)
        for i, entries in enumerate(third):
            if entries is not None:
                total = totals[i]
                totals[i] = entries if total is None else total + entries
    return totals


def wrong_third_derivatives(
    derive: Callable[..., Sequence[Tensor | None]], point: Params, model: nn.Module
) -> tuple[str, ...]:
    """The layers in which a third derivative is not the finite difference of a Hessian product.

    Models that cannot be compared, or are too large, are judged by their layers: those with norms
    count as wrong. An operator without a third derivative counts as wrong everywhere.

    Args:
        derive: derive(params, derivative=…) returns a derivative on a few examples.
        point: the parameters.
        model: the model.
    """
    norms = tuple(n for n, m in model.named_modules() if "norm" in type(m).__name__.lower())
    if sum(p.numel() for p in point.values()) > derivatives.MOST_ENTRIES:
        return norms
    signs = random_signs(point, tuple(point), seed=0)

    def function(params: Params) -> Sequence[Tensor | None]:
        return derive(params, derivative=partial(derivatives.hessian_product, direction=signs))

    def product(params: Params, direction: Params) -> Sequence[Tensor | None]:
        return derive(params, derivative=partial(third_derivative, pairs=[(signs, direction)]))

    try:
        product(point, signs)
    except RuntimeError as error:
        if not derivatives.lacks_double_backward(error):
            raise
        return ("all layers",)
    wrong = derivatives.wrong_product(function, product, point)
    return norms if wrong is None else wrong


def curvature_differences(
    run: Run, point: Params, directions: Sequence[Params], layers: Sequence[str]
) -> Params:
    """∇ Σ_v vᵀHv from Hessian products at θ ± hv and θ ± 2hv, in float64.

    Each is (8[H(θ+hv)v − H(θ−hv)v] − [H(θ+2hv)v − H(θ−2hv)v]) / 12h, with an error of order h⁴.
    Refused where it changes with the step, as at kinks.

    Args:
        run: runs passes over the data.
        point: the parameters.
        directions: the directions.
        layers: where torch's third derivatives are wrong, for messages.
    """
    double = {n: p.detach().double() for n, p in point.items()}
    step = STEP * _smallest_size(double)
    total = {n: torch.zeros_like(p) for n, p in double.items()}
    change = size = rounding = 0.0

    def at(multiple: int, direction: Params) -> Params:
        moved = {n: p + multiple * step * direction[n] for n, p in double.items()}
        along = partial(derivatives.hessian_product, direction=direction)
        return run(same_buffers(moved, point), along).derivative

    with derivatives.InFloat64() as mode:
        for direction in directions:
            direction = {n: direction[n].double() for n in double}
            ahead, behind, far_ahead, far_behind = (at(m, direction) for m in (1, -1, 2, -2))
            near = {n: (ahead[n] - behind[n]) / (2 * step) for n in double}
            far = {n: (far_ahead[n] - far_behind[n]) / (4 * step) for n in double}
            change = math.hypot(change, norm({n: near[n] - far[n] for n in double}))
            size, rounding = math.hypot(size, norm(near)), math.hypot(rounding, norm(ahead))
            for n, entries in total.items():
                entries.add_((4 * near[n] - far[n]) / 3)
    if mode.lowered or change > TOLERANCE * size + rounding * ROUNDING / step:
        reason = "runs in less than float64" if mode.lowered else "has kinks"
        raise InputError(
            f"torch's third derivatives of the loss are wrong in {shorten(layers)}, and "
            f"differences of second derivatives cannot replace them, because the loss {reason}: "
            "write that layer in elementary torch operations (a layer norm as mean, variance and "
            "division), or use smooth activations and float64."
        )
    return total


def _smallest_size(params: Params) -> float:
    """The size of a weight in the tensor of the smallest, at least a tenth of that in all."""
    entries = sum(p.numel() for p in params.values())
    sizes = [norm({n: p}) / max(p.numel(), 1) ** 0.5 for n, p in params.items()]
    overall = norm(params) / max(entries, 1) ** 0.5
    return max(min((s for s in sizes if s > 0), default=1.0), overall / 10)


def random_signs(params: Params, names: Sequence[str], *, seed: int) -> Params:
    """A direction of independent random signs in the named tensors, zero in all others."""
    generator = torch.Generator().manual_seed(seed)
    direction = {n: torch.zeros_like(p) for n, p in params.items()}
    for name in names:
        entries = torch.randint(0, 2, params[name].shape, generator=generator) * 2 - 1
        direction[name] = entries.to(direction[name])
    return direction
