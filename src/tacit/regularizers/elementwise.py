"""Sums over single entries: ridge, lasso, powers, smoothed lasso, hypentropy, distances."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.errors import InputError, check_number, check_type
from tacit.objective.models import without_wrappers
from tacit.objective.params import (
    Params,
    Scope,
    check_finite,
    entries_of,
    largest_entry,
    to_float64,
)
from tacit.objective.ranks import own_rows
from tacit.regularizers.family import (
    ZERO_WIDTH,
    EntrywiseFunction,
    Regularizer,
    TensorGradient,
    separable,
    with_kink_at_zero,
)


def l2(*, scope: Scope = None, name: str = "l2") -> Regularizer:
    """Ridge, R(θ) = ‖θ‖² = Σ_i θ_i², with gradient 2θ.

    The sum runs over all parameters, biases included, unless a scope limits it.

    Trap: there is no factor ½. Torch's `weight_decay=w` is the penalty (w/2)‖θ‖², which is
    strength w/2 here, for SGD and Adam. For AdamW it is not: see `optimizer_penalties`.

    >>> params = {"w": torch.tensor([1.0, -2.0])}
    >>> l2().gradient(params)
    {'l2': {'w': tensor([ 2., -4.], dtype=torch.float64)}}
    """
    square = EntrywiseFunction(torch.square, lambda theta: 2 * theta)
    return replace(_sum_over_entries(name, scope, square), kind="l2")


def l1(*, scope: Scope = None, name: str = "l1", zero_width: float = ZERO_WIDTH) -> Regularizer:
    """Lasso, R(θ) = ‖θ‖₁ = Σ_i |θ_i|, with gradient sign(θ_i).

    At θ_i = 0 there is no gradient, and the optimality condition is an inequality instead of an
    equation. Such rows are removed from all columns and from the target, and the fit reports their
    number.

    Trap: many ways of training keep weights near zero without setting them to zero: subgradient
    steps oscillate across it. The sign of such a weight means nothing, and the strength comes out
    too small. Pass a `zero_width` above their size; a fit reports where it seems too small.

    Args:
        scope: which parameters the sum runs over.
        name: the name that the strength is listed under.
        zero_width: weights up to this part of the largest in scope count as zero.
    """

    def make(zero: Callable[[], float]) -> Regularizer:
        def kinks(theta: Tensor) -> Tensor:
            return theta.abs() <= zero()

        return _sum_over_entries(name, scope, EntrywiseFunction(torch.abs, torch.sign, kinks))

    lasso = with_kink_at_zero(make, zero_width, largest=largest_entry)
    return replace(lasso, definition="l1")


def smooth_l1(beta: float, *, scope: Scope = None, name: str = "smooth_l1") -> Regularizer:
    """Smoothed lasso, R(θ) = Σ_i h(θ_i), with h(x) = x²/(2β) if |x| < β and |x| − β/2 otherwise.

    Its gradient θ_i/β, limited to [−1, 1], exists everywhere, so no row is removed.

    Trap: where all weights are smaller than β in magnitude, its column is proportional to that of
    `l2`, and the two strengths cannot be separated. Choose β well below typical weights.
    """
    most = torch.finfo(torch.float64).max
    if isinstance(beta, bool) or not isinstance(beta, Real) or not 0 < beta <= most:
        raise InputError(f"beta is {beta!r}: pass a finite number above zero; for β = 0 use l1().")

    def value(theta: Tensor) -> Tensor:
        return F.smooth_l1_loss(theta, torch.zeros_like(theta), beta=beta, reduction="none")

    huber = EntrywiseFunction(value, lambda theta: (theta / beta).clamp(-1, 1))
    definition = f"smooth_l1(beta={float(beta)!r})"
    return replace(_sum_over_entries(name, scope, huber), kind="smooth_l1", definition=definition)


def power(
    p: float, *, scope: Scope = None, name: str = "power", zero_width: float | None = None
) -> Regularizer:
    """Bridge penalty, R(θ) = Σ_i |θ_i|^p for any p > 0, with gradient p |θ_i|^(p−1) sign(θ_i).

    p = 2 is `l2` and p = 1 is `l1`. Weight decay μ of n factors, θ = u ⊙ v ⊙ …, is strength nμ/2
    at p = 2/n, as a penalty of their product.

    At zero there is no gradient for p ≤ 1, and such rows are removed, as in `l1`. For p > 1 there
    is one, namely 0, and all rows stay.

    Trap: for p < 2 the gradient changes without bound near zero. Steps of finite size oscillate
    there, and the column of such weights means little; for p < 1 it dominates all others. Pass a
    `zero_width` above their size; a fit reports where it seems too small.

    Args:
        p: the exponent.
        scope: which parameters the sum runs over.
        name: the name that the strength is listed under.
        zero_width: weights up to this part of the largest in scope count as zero, and their rows
            are removed. By default 1e-9 for p ≤ 1, and no row is removed for p > 1.
    """
    check_number("p", p, above=0)
    p = float(p)
    width = zero_width if zero_width is not None else ZERO_WIDTH if p <= 1 else 0.0

    def value(theta: Tensor) -> Tensor:
        zero = theta == 0  # the derivative of |θ|^p by autograd is not finite at zero
        return torch.where(zero, 0.0, torch.where(zero, 1.0, theta).abs() ** p)

    def derivative(theta: Tensor) -> Tensor:
        size = torch.where(theta == 0, 1.0, theta).abs()
        return p * size ** (p - 1) * theta.sign()

    def make(zero: Callable[[], float]) -> Regularizer:
        def kinks(theta: Tensor) -> Tensor | None:
            return theta.abs() <= zero() if p <= 1 or zero() > 0 else None

        return _sum_over_entries(name, scope, EntrywiseFunction(value, derivative, kinks))

    family = with_kink_at_zero(make, width, largest=largest_entry)
    if p >= 2:
        family = replace(family, with_zero_width=None)
    return replace(family, definition=f"power(p={p!r})")


def hypentropy(scale: float, *, scope: Scope = None, name: str = "hypentropy") -> Regularizer:
    """Hyperbolic entropy, R(θ) = Σ_i s q(θ_i/s), with gradient arcsinh(θ_i/(2s)), s the scale.

    Here q(z) = 2 − √(4 + z²) + z arcsinh(z/2). It is what gradient flow of a diagonal linear
    network θ = u² − v², started at u = v = α, minimises among all solutions, with s = α²
    (Woodworth et al. 2020). It has a gradient everywhere, so no row is removed.

    Trap: for weights well below the scale it is ‖θ‖²/(4s), and its column is that of `l2`. Far
    above it is Σ|θ_i| (ln(|θ_i|/s) − 1), whose column differs from that of `l1` by logarithms only.
    """
    check_number("scale", scale, above=0)
    scale = float(scale)

    def value(theta: Tensor) -> Tensor:
        z = theta / scale  # 2 − √(4 + z²) = −z²/(2 + √(4 + z²)), without cancellation at small z
        root = torch.hypot(z, torch.full_like(z, 2.0))
        return scale * z * (torch.asinh(z / 2) - z / (2 + root))

    entropy = EntrywiseFunction(value, lambda theta: torch.asinh(theta / (2 * scale)))
    definition = f"hypentropy(scale={scale!r})"
    return replace(_sum_over_entries(name, scope, entropy), definition=definition)


def distance_to(
    params: Mapping[str, Tensor], *, scope: Scope = None, name: str = "distance_to"
) -> Regularizer:
    """Squared distance to a reference point, R(θ) = ‖θ − θ₀‖², with gradient 2(θ − θ₀).

    The reference is typically the initialisation, or a pretrained model. It is copied, so that
    further training of the model does not move it.

    Trap: the parameters of a model that was already trained are not its initialisation. Pass a copy
    made before training, or load the checkpoint.

    Args:
        params: θ₀ as a dictionary of named tensors, such as `dict(model.named_parameters())`; it
            must contain every parameter in scope.
        scope: which parameters the sum runs over.
        name: the name that the strength is listed under.
    """
    needed = "a dictionary of named tensors, such as dict(model.named_parameters())"
    check_type("the reference of distance_to", params, Mapping, needed)
    for tensor_name, tensor in params.items():
        what = f"the reference of distance_to for {tensor_name!r}"
        check_type(what, tensor, Tensor, "a tensor, as in torch.as_tensor(…)")
    reference: Params = {n: own_rows(t.detach()).clone() for n, t in params.items()}
    reference = without_wrappers(reference) | reference
    check_finite(reference, what="the reference value")

    def covers(theta: Tensor, tensor_name: str) -> bool:
        """Any tensor, as long as the reference has it: refused before any pass over the data."""
        there = reference.get(tensor_name)
        if there is None or there.shape != theta.shape:
            shape = "no such tensor" if there is None else tuple(there.shape)
            raise InputError(
                f"distance_to: the reference has {shape} for {tensor_name!r}, the model "
                f"{tuple(theta.shape)}. Pass parameters of the same model, or limit the scope."
            )
        return True

    def gradient(theta: Tensor, tensor_name: str) -> TensorGradient:
        origin = reference[tensor_name].to(theta.device)

        def at(part: slice) -> Tensor:
            here, there = (to_float64(entries_of(t, part)) for t in (theta, origin))
            return 2 * (here - there)

        return TensorGradient(at)

    def value(theta: Tensor, tensor_name: str) -> Tensor:
        return (theta - reference[tensor_name].to(theta)).square().sum()

    distance = separable(name, scope, value=value, gradient=gradient, covers=covers, by_row=True)
    return replace(distance, definition="distance_to")


def _sum_over_entries(name: str, scope: Scope, function: EntrywiseFunction) -> Regularizer:
    """The family R(θ) = Σ_i r(θ_i) of one function r."""
    value, gradient = function.tensor_value, function.tensor_gradient
    return separable(name, scope, value=value, gradient=gradient, entrywise=function)
