"""Families that treat every parameter alone: sums over entries, sliced and never held whole."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.errors import InputError
from tacit.objective.params import Params, Scope, check_finite, to_float64
from tacit.regularizers.family import Columns, Entry, FamilyKind, Regularizer, Slope, separable


def _entrywise(
    name: str,
    entry: Entry,
    *,
    scope: Scope,
    kinks: Callable[[Tensor], Tensor] | None = None,
    kind: FamilyKind = "",
) -> Regularizer:
    """A family that is a sum of one function over entries: slices where they are asked for."""

    def slope(tensor: Tensor, _: str) -> Slope:
        flat = tensor.flatten()
        find = None if kinks is None else (lambda part, kinks=kinks: kinks(flat[part]))
        return Slope(at=lambda part: entry.slope(to_float64(flat[part])), kinks=find)

    return separable(
        name,
        scope=scope,
        value=lambda theta, _: entry.value(theta).sum(),
        slope=slope,
        kind=kind,
        entry=entry,
    )


def l2(*, scope: Scope = None, name: str = "l2") -> Regularizer:
    """Ridge, ‖θ‖² = Σ θ_i², without a half, biases included unless the scope says otherwise.

    Trap: torch's `weight_decay` w is the penalty (w/2)‖θ‖², so it equals strength w/2 here.
    """
    entry = Entry(torch.square, lambda theta: 2 * theta)
    return _entrywise(name, entry, scope=scope, kind="l2")


def l1(*, scope: Scope = None, name: str = "l1") -> Regularizer:
    """Lasso, ‖θ‖₁ = Σ |θ_i|.

    Trap: where θ_i = 0 the condition is an inequality, not an equation: such rows leave all
    columns and the target, and the fit counts them.
    """
    entry = Entry(torch.abs, torch.sign)
    return _entrywise(name, entry, scope=scope, kinks=lambda theta: theta == 0)


def smooth_l1(beta: float, *, scope: Scope = None, name: str = "smooth_l1") -> Regularizer:
    """Smoothed lasso, Σ h(θ_i) with h = θ²/(2β) inside |θ| < β and |θ| − β/2 outside.

    Trap: a network whose weights are all below β has the same columns for this and for ridge.
    """
    if isinstance(beta, bool) or not isinstance(beta, Real):
        raise InputError(f"beta is {beta!r}: pass a number above zero, such as 1e-3.")
    if not (math.isfinite(beta) and beta > 0):
        raise InputError(f"beta is {beta!r}: pass a finite number above zero; for β = 0 use l1().")

    def value(theta: Tensor) -> Tensor:
        return F.smooth_l1_loss(theta, torch.zeros_like(theta), beta=beta, reduction="none")

    entry = Entry(value, lambda theta: (theta / beta).clamp(-1, 1))
    return _entrywise(name, entry, scope=scope, kind="smooth_l1")


def distance_to(
    params: Mapping[str, Tensor], *, scope: Scope = None, name: str = "distance_to"
) -> Regularizer:
    """Squared distance to a reference point, ‖θ − θ₀‖²: the initialisation, or a pretrained model.

    A copy of θ₀ is kept, so that training on does not move it.
    """
    if not isinstance(params, Mapping) or not all(isinstance(t, Tensor) for t in params.values()):
        raise InputError(
            f"distance_to was given a {type(params).__name__}: pass a dictionary of named "
            "tensors, such as dict(model.named_parameters())."
        )
    reference: Params = {n: t.detach().clone() for n, t in params.items()}
    check_finite(reference, what="the reference value")

    def origin(theta: Tensor, tensor: str) -> Tensor:
        if tensor not in reference or reference[tensor].shape != theta.shape:
            held = tuple(reference[tensor].shape) if tensor in reference else "no such tensor"
            raise InputError(
                f"distance_to: the reference has {held} for {tensor!r}, the model "
                f"{tuple(theta.shape)}. Pass parameters of the same model, or limit the scope."
            )
        return reference[tensor].to(theta.device)

    def slope(theta: Tensor, tensor: str) -> Slope:
        flat, start = theta.flatten(), origin(theta, tensor).flatten()
        return Slope(lambda part: 2 * (to_float64(flat[part]) - to_float64(start[part])))

    family = separable(
        name,
        scope=scope,
        value=lambda theta, tensor: (theta - origin(theta, tensor).to(theta)).square().sum(),
        slope=slope,
    )

    def bind(params: Params) -> Columns:
        columns = family.bind(params)
        for tensor in columns.active:
            origin(params[tensor], tensor)  # refused here, before any pass over the data
        return columns

    return replace(family, bind=bind)
