"""Derivatives of every example's own loss along a few directions, in one pass over the data.

u ↦ Jᵀu is linear, so its derivative along a direction v is Jv, whatever u is. One backward pass
that can be differentiated serves all directions: no gradient of a single example is ever formed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit import derivatives
from tacit.data import cut
from tacit.errors import InputError
from tacit.losses import Spread, examples
from tacit.noise import Noise
from tacit.params import Params, wide
from tacit.streaming import Stream


class Along(NamedTuple):
    """Derivatives by unit, in the order of the data, and what each unit weighs in the mean."""

    values: Tensor
    """(units, directions), in float64 on the CPU."""
    weights: Tensor | None
    """None where all weigh the same."""


Contract = Callable[[Spread], Tensor]
"""From a batch's outputs to its values, (units, directions)."""


@dataclass
class _Route:
    """How derivatives are taken: by reverse mode, until it is seen to fail."""

    forward: bool = False
    tried: bool = False
    reason: str = field(default="", repr=False)


@torch.inference_mode(mode=False)
def along(
    stream: Stream,
    params: Params,
    first: tuple[Any, Tensor | None],
    directions: Sequence[Params],
    *,
    draws: Sequence[int] | None = None,
    base: Params | None = None,
) -> Along:
    """D ℓ_i[v_j] of every unit, or D²ℓ_i[v_j, base]; `first` are the examples that probes see.

    Directions are asked for by index once a batch and draw, so that they may be made on demand.
    """
    if not len(directions):
        raise InputError("directions is empty: pass at least one, a dictionary of named tensors.")
    for given in (directions[0], base or {}):
        _check(given, params)
    draws, route = stream.drawn(draws), _Route()
    values: list[Tensor] = []
    weighed: list[Tensor | None] = []
    with stream.ready(training=stream.training), _differentiable_attention():
        _check_rows(stream, params, first)
        for index, (batch, weights) in enumerate(stream.read()):
            total, unit_weights = torch.zeros(()), None
            for draw in draws:

                def take(
                    leaves: Params, contract: Contract, b=batch, w=weights, d=draw, i=index
                ) -> tuple[Tensor, Tensor | None]:
                    def use(model: nn.Module, noise: Noise | None) -> tuple[Tensor, Tensor | None]:
                        found = stream.spread(model, b, w, noise)
                        return wide(contract(found)).cpu(), found.weights

                    return stream.lend(leaves, use, draw=d, index=i)

                part, unit_weights = _batch(take, params, directions, base, route)
                total = total + part / len(draws)
            values.append(total)
            weighed.append(unit_weights)
    found = torch.cat(values)
    if not torch.isfinite(found).all():
        raise InputError(
            "derivatives of single examples are not finite, with a finite mean loss: they overflow "
            "the model's dtype. Evaluate in a wider one."
        )
    held = [wide(w.detach()).cpu() for w in weighed if w is not None]
    return Along(found, torch.cat(held) if len(held) == len(weighed) else None)


def _batch(
    take: Callable[[Params, Contract], tuple[Tensor, Tensor | None]],
    params: Params,
    directions: Sequence[Params],
    base: Params | None,
    route: _Route,
) -> tuple[Tensor, Tensor | None]:
    """One batch and draw; where reverse mode fails the first time, all go by forward mode."""
    if base is not None:
        with torch.enable_grad():
            leaves = derivatives.leaves(params)
            return take(leaves, lambda found: _second(found, leaves, directions, base))
    if not route.forward:
        try:
            with torch.enable_grad():
                leaves, check = derivatives.leaves(params), not route.tried
                result = take(leaves, lambda found: _reverse(found, leaves, directions, check))
            route.tried = True
            return result
        except RuntimeError as error:
            if route.tried or isinstance(error, torch.OutOfMemoryError):
                raise
            route.forward, route.reason = True, str(error)
    try:
        columns, weights = [], None
        for j in range(len(directions)):
            with forward_ad.dual_level(), torch.no_grad():
                column, weights = take(_duals(params, directions[j]), _forward)
            columns.append(column)
        return torch.cat(columns, dim=1), weights
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            "derivatives of single examples need double backward or forward mode, and an operator "
            f"here has neither ({route.reason}; {error}). Custom functions need a differentiable "
            "backward or a jvp."
        ) from error


def _reverse(found: Spread, leaves: Params, directions: Sequence[Params], check: bool) -> Tensor:
    """D ℓ_i[v_j] as the derivative of ⟨∇ Σ u_i ℓ_i, v_j⟩ by u."""
    u = torch.ones(found.units, dtype=_summing(found), device=found.outputs[0].device)
    u.requires_grad_()
    pulls = [_by_unit(u, pull).to(pull) * pull for pull in found.pulls]
    pulled = _pull_back(found, leaves, pulls)
    columns = []
    for j in range(len(directions)):
        pairs = _pairs(pulled, directions[j])
        column = torch.zeros_like(u)
        if pairs:
            slopes, along = zip(*pairs, strict=True)
            (column,) = torch.autograd.grad(
                slopes, u, along, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        if check:
            _check_sum(column, pulled, directions[j])
        columns.append(column)
    return torch.stack(columns, dim=1)


def by_example(terms: Tensor, leaves: Params, directions: Sequence[Params]) -> Tensor:
    """D term_i[v_j] of a batch's terms, one an example, in float64 on the CPU."""
    if not terms.requires_grad:
        return torch.zeros(len(terms), len(directions), dtype=torch.float64)
    found = Spread((terms,), (torch.ones_like(terms),), lambda along: [None], None, len(terms))
    return wide(_reverse(found, leaves, directions, check=True)).cpu()


def _second(found: Spread, leaves: Params, directions: Sequence[Params], base: Params) -> Tensor:
    """D²ℓ_i[v_j, base] = ⟨pull_i, D²f_i[v_j, base]⟩ + (D f_i[v_j])ᵀ (∂²ℓ_i) (D f_i[base])."""
    us = [pull.clone().requires_grad_() for pull in found.pulls]
    pulled = _pull_back(found, leaves, us)
    total = torch.zeros(found.units, len(directions), dtype=torch.float64)
    first = _pairs(pulled, base)
    if not first:
        return total
    try:
        inner = torch.stack([(slope * b).sum() for slope, b in first]).sum()
        moved = _by_cotangent([inner], us, [torch.ones_like(inner)])
        bends = found.bend(moved)
        curved = dict(zip(leaves, derivatives.gradient(inner, leaves, graph=True), strict=True))
        for j in range(len(directions)):
            flat = _by_cotangent(*_split(_pairs(pulled, directions[j]), us))
            deep = _by_cotangent(*_split(_pairs(curved, directions[j]), us))
            for pull, d, t, bend in zip(found.pulls, deep, flat, bends, strict=True):
                total[:, j] += _rows(pull, d)
                if bend is not None:
                    total[:, j] += _rows(bend, t)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            f"second derivatives of single examples need double backward, which an operator here "
            f"lacks: {error}. Custom functions need a differentiable backward."
        ) from error
    return total


def _forward(found: Spread) -> Tensor:
    """D ℓ_i[v] from the tangents that the outputs carry."""
    column = torch.zeros(found.units, dtype=torch.float64)
    for output, pull in zip(found.outputs, found.pulls, strict=True):
        tangent = forward_ad.unpack_dual(output).tangent
        if tangent is not None:
            column += _rows(pull, tangent)
    return column.unsqueeze(1)


def _duals(params: Params, direction: Params) -> Params:
    with warnings.catch_warnings():
        # Its first use loads decompositions through a compiler that torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            n: forward_ad.make_dual(p, direction[n].to(p)) if n in direction else p
            for n, p in params.items()
        }


def _pull_back(
    found: Spread, leaves: Params, cotangents: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """Jᵀ·cotangents by tensor, with a graph; None where an output does not reach it."""
    pairs = [(o, c) for o, c in zip(found.outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        raise InputError(
            "the loss does not depend on the parameters: the model is detached somewhere, or the "
            "loss was computed under no_grad."
        )
    outputs, pulls = zip(*pairs, strict=True)
    slopes = torch.autograd.grad(
        outputs, list(leaves.values()), pulls, create_graph=True, allow_unused=True
    )
    return dict(zip(leaves, slopes, strict=True))


def _pairs(slopes: dict[str, Tensor | None], direction: Params) -> list[tuple[Tensor, Tensor]]:
    """Slopes that can be differentiated further, each with the direction's part there."""
    return [
        (slope, direction[n].to(slope))
        for n, slope in slopes.items()
        if n in direction and slope is not None and slope.requires_grad
    ]


def _split(
    pairs: list[tuple[Tensor, Tensor]], us: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
    return [slope for slope, _ in pairs], us, [along for _, along in pairs]


def _by_cotangent(
    slopes: list[Tensor], us: Sequence[Tensor], along: list[Tensor]
) -> Sequence[Tensor]:
    """Derivatives of ⟨slopes, along⟩ by the cotangents u; zeros where there is none."""
    if not slopes:
        return [torch.zeros_like(u) for u in us]
    return torch.autograd.grad(
        slopes, list(us), along, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """Inner products row by row, in float64 on the CPU."""
    return (wide(a) * wide(b)).flatten(1).sum(1).cpu() if a.ndim > 1 else (wide(a) * wide(b)).cpu()


def _by_unit(u: Tensor, like: Tensor) -> Tensor:
    return u.view(-1, *[1] * (like.ndim - 1))


def _summing(found: Spread) -> torch.dtype:
    """What sums over an example's outputs are kept in."""
    return torch.promote_types(found.outputs[0].dtype, torch.float32)


def _check_sum(column: Tensor, slopes: dict[str, Tensor | None], direction: Params) -> None:
    """Refuse a backward that cannot be differentiated but does not say so.

    Σ u_i D ℓ_i[v] at u = 1 is ⟨∇ Σ ℓ_i, v⟩, which needed no second backward.
    """
    whole, size = 0.0, float(wide(column).abs().sum())
    digits = [torch.finfo(column.dtype).eps]
    for name, slope in slopes.items():
        if slope is not None and name in direction:
            terms = wide(slope.detach()) * wide(direction[name]).to(slope.device)
            whole, size = whole + float(terms.sum()), size + float(terms.abs().sum())
            digits.append(torch.finfo(slope.dtype).eps)
    if abs(float(wide(column).sum()) - whole) > max(digits) ** 0.5 * size:
        raise RuntimeError("a backward here is not differentiable and does not say so")


def _check(given: Params, params: Params) -> None:
    """Refuse a direction that does not fit the parameters."""
    for name, tensor in given.items():
        if name not in params or tensor.shape != params[name].shape:
            raise InputError(
                f"a direction has {name!r} of shape {tuple(tensor.shape)}: the model's parameters "
                "are others. Pass tensors by the names of Objective.params, in their shapes."
            )


def _check_rows(stream: Stream, params: Params, first: tuple[Any, Tensor | None]) -> None:
    """Refuse outputs whose first dimension is as long as the batch by accident."""

    def half(model: nn.Module, noise: Noise | None) -> None:
        batch, weights = cut(first, slice(count // 2), count)
        stream.spread(model, batch, weights, noise)

    # Losses of units are rows by their definition.
    count = 0 if stream.masks else examples(first[0])
    if count > 1:
        with torch.no_grad():
            stream.lend(params, half, draw=0)


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Attention on the math path, whose derivatives have derivatives."""
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
