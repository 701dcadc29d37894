"""Derivatives of every example's own loss along a few directions, in one pass over the data."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import slice_batch
from tacit.objective.losses import Spread, count_examples
from tacit.objective.params import Params, float64_zeros, to_float64
from tacit.objective.passes import Stream
from tacit.objective.randomness import Noise


class DirectionalDerivatives(NamedTuple):
    """Derivatives by unit, in the order of the data, and what each unit weighs in the mean."""

    values: Tensor
    """(units, directions), in float64 on the CPU."""
    weights: Tensor | None
    """None where all weigh the same."""
    signed_sum: Params | None = None
    """Σ s_i w_i ∇ℓ_i for the signs s that were given, in float64: the backward pass has it."""


Contract = Callable[[Spread], Tensor]
"""From a batch's outputs to its values, (units, directions)."""


class Mix:
    """Gradients of units summed with signs, as they go by; without signs, nothing."""

    def __init__(self, signs: Tensor | None, params: Params, draws: int):
        self._signs, self._draws, self._seen = signs, draws, 0
        self.sums = None if signs is None else float64_zeros(params)

    def start(self, found: Spread) -> Tensor:
        """What a batch's units are summed with: signs times weights, or ones."""
        own = torch.ones(found.units)
        if self._signs is not None:
            own = self._signs[self._seen : self._seen + found.units]
            own = own if found.weights is None else own * found.weights.to(own)
        return own.to(found.outputs[0].device, _summing(found))

    def add(self, slopes: Mapping[str, Tensor | None]) -> None:
        """One batch and draw."""
        if self.sums is None:
            return
        for name, total in self.sums.items():
            slope = slopes[name]
            if slope is not None:
                total.add_(slope.detach().to(total.device), alpha=1 / self._draws)

    def backward(self, found: Spread, leaves: Params) -> Tensor:
        """The same by a backward pass of its own."""
        u = self.start(found)
        pulls = [_by_unit(u, pull).to(pull) * pull for pull in found.pulls]
        self.add(_pull_back(found, leaves, pulls, graph=False))
        return torch.zeros(found.units, 0)

    def next(self, units: int) -> None:
        """A batch is over, with all its draws."""
        self._seen += units


@dataclass
class _Route:
    """How derivatives are taken: by reverse mode, until it is seen to fail."""

    forward: bool = False
    tried: bool = False
    reason: str = field(default="", repr=False)


@torch.inference_mode(mode=False)
def directional_derivatives(
    stream: Stream,
    params: Params,
    first: tuple[Any, Tensor | None],
    directions: Sequence[Params],
    *,
    draws: Sequence[int] | None = None,
    base: Params | None = None,
    signs: Tensor | None = None,
) -> DirectionalDerivatives:
    """D ℓ_i[v_j] of every unit, or D²ℓ_i[v_j, base]; `first` are the examples that probes see.

    Directions are asked for by index once a batch and draw, so that they may be made on demand.
    With a sign for every unit, the sum of their gradients with these signs comes along.
    """
    if not len(directions):
        raise InputError("directions is empty: pass at least one, a dictionary of named tensors.")
    for given in (directions[0], base or {}):
        _check(given, params)
    draws, route = stream.drawn(draws), _Route()
    mix = Mix(signs, params, len(draws))
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
                        return to_float64(contract(found)).cpu(), found.weights

                    return stream.lend(leaves, use, draw=d, index=i)

                part, unit_weights = (
                    _batch(take, params, directions, route, mix)
                    if base is None
                    else _second_order(take, params, directions, base)
                )
                total = total + part / len(draws)
            mix.next(len(total))
            values.append(total)
            weighed.append(unit_weights)
    found = torch.cat(values)
    if not torch.isfinite(found).all():
        raise InputError(
            "derivatives of single examples are not finite, with a finite mean loss: they overflow "
            "the model's dtype. Evaluate in a wider one."
        )
    return DirectionalDerivatives(found, _joined(values, weighed), mix.sums)


Take = Callable[[Params, Contract], tuple[Tensor, Tensor | None]]


def _joined(values: list[Tensor], weighed: list[Tensor | None]) -> Tensor | None:
    """Weights of all units, where any batch has some; those of others weigh one."""
    if all(own is None for own in weighed):
        return None
    ones = [torch.ones(len(part), dtype=torch.float64) for part in values]
    pairs = zip(ones, weighed, strict=True)
    return torch.cat([one if own is None else to_float64(own.detach()).cpu() for one, own in pairs])


def _second_order(
    take: Take, params: Params, directions: Sequence[Params], base: Params
) -> tuple[Tensor, Tensor | None]:
    with torch.enable_grad():
        leaves = derivatives.leaves(params)
        return take(leaves, lambda found: second(found, leaves, directions, base))


def _batch(
    take: Take,
    params: Params,
    directions: Sequence[Params],
    route: _Route,
    mix: Mix,
) -> tuple[Tensor, Tensor | None]:
    """One batch and draw; where reverse mode fails the first time, all go by forward mode."""
    if not route.forward:
        try:
            with torch.enable_grad():
                leaves, check = derivatives.leaves(params), not route.tried
                result = take(
                    leaves, lambda found: reverse(found, leaves, directions, mix, check=check)
                )
            route.tried = True
            return result
        except RuntimeError as error:
            if route.tried or isinstance(error, torch.OutOfMemoryError):
                raise
            route.forward, route.reason = True, str(error)
    try:
        if mix.sums is not None:
            with torch.enable_grad():
                leaves = derivatives.leaves(params)
                take(leaves, lambda found: mix.backward(found, leaves))
        columns, weights = [], None
        for j in range(len(directions)):
            with forward_ad.dual_level(), torch.no_grad():
                column, weights = take(duals(params, directions[j]), forward)
            columns.append(column)
        return torch.cat(columns, dim=1), weights
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            "derivatives of single examples need double backward or forward mode, and an operator "
            f"here has neither ({route.reason}; {error}). Custom functions need a differentiable "
            "backward or a jvp."
        ) from error


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
        batch, weights = slice_batch(first, slice(count // 2), count)
        stream.spread(model, batch, weights, noise)

    # Losses of units are rows by their definition.
    count = 0 if stream.masks else count_examples(first[0])
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


def reverse(
    found: Spread,
    leaves: Params,
    directions: Sequence[Params],
    mix: Mix,
    *,
    check: bool,
) -> Tensor:
    """D ℓ_i[v_j] as the derivative of ⟨∇ Σ u_i ℓ_i, v_j⟩ by u, whatever u is."""
    u = mix.start(found).clone().requires_grad_()
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
            _check_sum(u.detach() * column, pulled, directions[j])
        columns.append(column)
    mix.add(pulled)
    return torch.stack(columns, dim=1)


def derivatives_of_terms(terms: Tensor, leaves: Params, directions: Sequence[Params]) -> Tensor:
    """D term_i[v_j] of a batch's terms, one an example, in float64 on the CPU."""
    if not terms.requires_grad:
        return torch.zeros(len(terms), len(directions), dtype=torch.float64)
    found = Spread((terms,), (torch.ones_like(terms),), lambda along: [None], None, len(terms))
    return to_float64(reverse(found, leaves, directions, Mix(None, leaves, 1), check=True)).cpu()


def second(found: Spread, leaves: Params, directions: Sequence[Params], base: Params) -> Tensor:
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


def forward(found: Spread) -> Tensor:
    """D ℓ_i[v] from the tangents that the outputs carry."""
    column = torch.zeros(found.units, dtype=torch.float64)
    for output, pull in zip(found.outputs, found.pulls, strict=True):
        tangent = forward_ad.unpack_dual(output).tangent
        if tangent is not None:
            column += _rows(pull, tangent)
    return column.unsqueeze(1)


def duals(params: Params, direction: Params) -> Params:
    """Parameters that carry a direction as their tangent."""
    with warnings.catch_warnings():
        # Its first use loads decompositions through a compiler that torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            n: forward_ad.make_dual(p, direction[n].to(p)) if n in direction else p
            for n, p in params.items()
        }


def _pull_back(
    found: Spread, leaves: Params, cotangents: Sequence[Tensor], *, graph: bool = True
) -> dict[str, Tensor | None]:
    """Jᵀ·cotangents by tensor, with its graph; None where an output does not reach it."""
    pairs = [(o, c) for o, c in zip(found.outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        raise InputError(
            "the loss does not depend on the parameters: the model is detached somewhere, or the "
            "loss was computed under no_grad."
        )
    outputs, pulls = zip(*pairs, strict=True)
    slopes = torch.autograd.grad(
        outputs, list(leaves.values()), pulls, create_graph=graph, allow_unused=True
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
    return (
        (to_float64(a) * to_float64(b)).flatten(1).sum(1).cpu()
        if a.ndim > 1
        else (to_float64(a) * to_float64(b)).cpu()
    )


def _by_unit(u: Tensor, like: Tensor) -> Tensor:
    return u.view(-1, *[1] * (like.ndim - 1))


def _summing(found: Spread) -> torch.dtype:
    """What sums over an example's outputs are kept in."""
    return torch.promote_types(found.outputs[0].dtype, torch.float32)


def _check_sum(column: Tensor, slopes: dict[str, Tensor | None], direction: Params) -> None:
    """Refuse a backward that cannot be differentiated but does not say so.

    Σ u_i D ℓ_i[v], here by unit, is ⟨∇ Σ u_i ℓ_i, v⟩, which needed no second backward.
    """
    whole, size = 0.0, float(to_float64(column).abs().sum())
    digits = [torch.finfo(column.dtype).eps]
    for name, slope in slopes.items():
        if slope is not None and name in direction:
            terms = to_float64(slope.detach()) * to_float64(direction[name]).to(slope.device)
            whole, size = whole + float(terms.sum()), size + float(terms.abs().sum())
            digits.append(torch.finfo(slope.dtype).eps)
    if abs(float(to_float64(column).sum()) - whole) > max(digits) ** 0.5 * size:
        raise RuntimeError("a backward here is not differentiable and does not say so")
