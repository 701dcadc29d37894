"""Derivatives of one batch's units along directions, without the gradient of any single one.

u ↦ Jᵀu is linear, so its derivative along a direction v is Jv, whatever u is. One backward pass
that can be differentiated serves all directions.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tacit import derivatives
from tacit.errors import InputError
from tacit.losses import Spread
from tacit.params import Params, wide, zeros


class Mix:
    """Gradients of units summed with signs, as they go by; without signs, nothing."""

    def __init__(self, signs: Tensor | None, params: Params, draws: int):
        self._signs, self._draws, self._seen = signs, draws, 0
        self.sums = None if signs is None else zeros(params)

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


def by_example(terms: Tensor, leaves: Params, directions: Sequence[Params]) -> Tensor:
    """D term_i[v_j] of a batch's terms, one an example, in float64 on the CPU."""
    if not terms.requires_grad:
        return torch.zeros(len(terms), len(directions), dtype=torch.float64)
    found = Spread((terms,), (torch.ones_like(terms),), lambda along: [None], None, len(terms))
    return wide(reverse(found, leaves, directions, Mix(None, leaves, 1), check=True)).cpu()


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
    return (wide(a) * wide(b)).flatten(1).sum(1).cpu() if a.ndim > 1 else (wide(a) * wide(b)).cpu()


def _by_unit(u: Tensor, like: Tensor) -> Tensor:
    return u.view(-1, *[1] * (like.ndim - 1))


def _summing(found: Spread) -> torch.dtype:
    """What sums over an example's outputs are kept in."""
    return torch.promote_types(found.outputs[0].dtype, torch.float32)


def _check_sum(column: Tensor, slopes: dict[str, Tensor | None], direction: Params) -> None:
    """Refuse a backward that cannot be differentiated but does not say so.

    Σ u_i D ℓ_i[v], here by unit, is ⟨∇ Σ u_i ℓ_i, v⟩, which needed no second backward.
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
