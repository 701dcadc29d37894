"""Matrices whose length the loss ignores, and the targets of epochs along them."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tacit.equations.points import TargetPoint
from tacit.objective.objective import Objective
from tacit.objective.params import Params, norm, same_buffers, sum_over_parts, to_float64

ORTHOGONAL = 0.01
"""|cosine| of weights and gradient up to which the loss may not depend on the weights' length."""
SAME = 1e-3
"""Relative difference of losses up to which they are the same."""


def find_scale_free(
    objective: Objective, params: Params, gradient: Params, length_matters: set[str]
) -> dict[str, bool]:
    """Matrices whose length the loss ignores, because a norm layer follows: whether row by row.

    Batch norm rescales rows one by one (filters, in convolutions), layer norm all by one factor.
    The gradient of such a matrix is orthogonal to it. So are many gradients early in training:
    then the loss is compared on a few examples. `length_matters` has the matrices that need no
    comparison, and those whose loss differed are added to it.
    """
    row_by_row: dict[str, bool] = {}
    loss = None
    for name, slope in gradient.items():
        weights = to_float64(params[name])
        if weights.ndim < 2 or name in length_matters:
            continue
        size = norm({name: weights}) * norm({name: slope})
        if abs(_sum((weights * slope).sum())) > ORTHOGONAL * size:
            continue
        loss = objective.loss_of_few(params) if loss is None else loss
        if not loss:  # as of examples that are fitted exactly: every length has the same
            break
        factors = torch.linspace(0.5, 2.0, len(weights), dtype=weights.dtype)
        by_row = factors.view(-1, *[1] * (weights.ndim - 1)).to(weights.device)
        # Two lengths, because the loss may be the same at one by chance. Not smaller ones, because
        # of the small constant that norm layers add to variances.
        for rows, lengths in {False: (2.0, 1.5), True: (by_row,)}.items():
            if not all(_is_same_loss(objective, params, name, factor, loss) for factor in lengths):
                break
            row_by_row[name] = rows
        if name not in row_by_row:
            length_matters.add(name)
    return row_by_row


def _is_same_loss(
    objective: Objective, params: Params, name: str, factor: Tensor | float, loss: float
) -> bool:
    """Whether the loss on a few examples stays the same if a matrix is multiplied by a factor."""
    moved = same_buffers({**params, name: params[name] * factor}, params)
    return math.isclose(objective.loss_of_few(moved), loss, rel_tol=SAME)


def without_lengthening(
    scale_free: Mapping[str, bool], point: TargetPoint, products: Params
) -> TargetPoint:
    """The target without what the noise of the steps adds along weights that a norm layer rescales.

    The loss of every batch is the same for θ and cθ, so that its gradient has ⟨θ_t, g_t⟩ = 0 at
    every point. At the mean point this is not so: ⟨θ̄, g_t⟩ cancels the penalty's pull, because
    steps across θ lengthen it as fast as a penalty shortens it. Along θ̄ the target is therefore the
    mean of ⟨θ_t, f_t⟩ of the forces f_t = g_t + λ∇R, and not of ⟨θ̄, f_t⟩.
    """
    (target,) = point.vectors
    corrected = dict(target)
    for name, by_row in scale_free.items():
        weights, added = to_float64(point.params[name]), products[name].to(target[name])
        squares = row_products(weights, weights)
        if not by_row:
            added, squares = (torch.full_like(t, _sum(t.sum())) for t in (added, squares))
        shift = added / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        corrected[name] = target[name] + shift.view(-1, *[1] * (weights.ndim - 1)) * weights
    return replace(point, vectors=[corrected])


def _sum(number: Tensor) -> float:
    """A sum over the rows of all processes."""
    return sum_over_parts({"": float(number)})[""]


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ of every row of a matrix (of a filter, in convolutions); zeros for vectors."""
    return (a * b).flatten(1).sum(1) if a.ndim > 1 else a.new_zeros(1)
