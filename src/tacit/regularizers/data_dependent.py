"""Penalties that depend on data: values streamed over it, and the squared gradient norm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select, shorten
from tacit.regularizers.family import Columns, Regularizer, weighted_gradient, whole_column


def gradient_norm(
    objective: Objective,
    *,
    scope: Scope = None,
    name: str = "gradient_norm",
    known: Mapping[Regularizer, float] | None = None,
) -> Regularizer:
    """Squared norm of the loss gradient, R(θ) = ‖∇L(θ)‖², with gradient 2 H ∇L.

    H is the Hessian of L. The column takes two passes over the data, one for ∇L and one for the
    Hessian-vector product. A step of gradient descent of size η follows the gradient flow of
    L + (η/4)‖∇L‖² up to an error of order η³, so that the strength to expect is η/4 (Barrett &
    Dherin 2021).

    Trap: L is the mean over all the data of the objective. The penalty of mini-batch SGD is the
    mean of ‖∇L_batch‖² over batches instead, which is larger by the trace of the covariance of
    ∇L_batch.

    Args:
        objective: the objective whose gradient is penalised.
        scope: which rows the column covers; the norm is always over all parameters.
        name: the name that the strength is listed under.
        known: penalties that training applied, with their strengths, to penalise the gradient of
            L + Σ known instead: that is what steps on L + Σ known add. By default none, or those
            of trajectory equations whose reference follows the flow of L + Σ known.
    """
    needed = "the tacit.Objective whose gradient is penalised"
    check_type("the objective of gradient_norm", objective, Objective, needed)
    example = "a dictionary from penalty to strength, as in {tacit.l2(): 5e-5}"
    check_type("known", known, Mapping | None, example)

    def in_scope(params: Params) -> tuple[str, ...]:
        return select(params, scope, what=f"scope of {name}")

    loss = _LossWithKnown(objective, known or {})

    def gradient(params: Params) -> Params:
        product = loss.hvp(loss.gradient(params), params)
        return {n: 2 * product[n] for n in in_scope(params)}

    def bind(params: Params) -> Columns:
        return whole_column(name, gradient(params))

    def squared_norm(params: Params) -> Tensor:
        total = sum(g.square().sum() for g in loss.gradient(params).values())
        return torch.as_tensor(total).reshape(1)

    def pull_back(params: Params, cotangent: Tensor) -> Params:
        return {n: cotangent[0] * g.to(params[n]) for n, g in gradient(params).items()}

    def value(params: Params) -> Tensor:
        return StreamedValue.apply(squared_norm, pull_back, tuple(params), *params.values())

    def influence(params: Params, directions: Sequence[Params]) -> Tensor:
        # With g = ∇L, example i changes ⟨2Hg, v⟩ by 2⟨(H_i − H)g, v⟩ + 2⟨H(g_i − g), v⟩. The terms
        # without i are shared by all examples; the others are 2 D²ℓ_i[v, g] and 2 Dℓ_i[Hv]. Known
        # penalties are in g and H, and the same for all examples.
        scoped = [{n: v[n] for n in in_scope(params) if n in v} for v in directions]
        zeros = {n: torch.zeros_like(p) for n, p in params.items()}
        products = [loss.hvp(zeros | v, params) for v in scoped]
        second = objective.directional_derivatives(scoped, params, base=loss.gradient(params))
        first = objective.directional_derivatives(products, params)
        return 2 * (second.values + first.values).unsqueeze(2)

    with_known = partial(_gradient_norm_with, objective, scope, name) if known is None else None
    return Regularizer(
        name,
        bind,
        value,
        influence=influence,
        objective=objective,
        with_known=with_known,
        cost="second-order",
    )


def _gradient_norm_with(
    objective: Objective, scope: Scope, name: str, known: Mapping[Regularizer, float]
) -> Regularizer:
    return gradient_norm(objective, scope=scope, name=name, known=known)


class _LossWithKnown(NamedTuple):
    """L + Σ s_k R_k, with two derivatives."""

    objective: Objective
    known: Mapping[Regularizer, float]

    def gradient(self, params: Params) -> Params:
        """∇L + Σ s_k ∇R_k."""
        gradient = self.objective.gradient(params)
        if not self.known:
            return gradient
        penalties = weighted_gradient(self.known, params)
        return {n: g + penalties[n].to(g) for n, g in gradient.items()}

    def hvp(self, direction: Params, params: Params) -> Params:
        """The Hessian of L + Σ s_k R_k times a direction."""
        product = self.objective.hvp(direction, params)
        if not self.known:
            return product
        penalties = _penalty_product(self.known, params, direction)
        return {n: p + penalties[n].to(p) for n, p in product.items()}


def _penalty_product(
    penalties: Mapping[Regularizer, float], params: Params, direction: Params
) -> Params:
    """Σ s_k ∇²R_k(θ)·direction, by double backward."""
    leaves = derivatives.leaves(params)
    with torch.enable_grad():
        total = torch.stack([s * r.value(leaves)[0] for r, s in penalties.items()]).sum()
        gradients = derivatives.gradient_with_graph(total, leaves)
    if gradients is None:
        raise InputError(
            f"gradient_norm needs second derivatives of the known penalties "
            f"({shorten(r.name for r in penalties)}), and one can be differentiated only once: "
            "pass gradient_norm(objective, known={}) to leave them out of it."
        )
    pairs = zip(gradients, direction.values(), strict=True)
    product = derivatives.pull_back(pairs, list(leaves.values()))
    zeros = {n: torch.zeros_like(p) for n, p in params.items()}
    return zeros | {n: p for n, p in zip(leaves, product, strict=True) if p is not None}


class StreamedValue(torch.autograd.Function):
    """Values of a penalty, whose backward passes over the data again.

    This avoids one graph over all the data. `value(params)` returns R_j of every column j, and
    `pull_back(params, cotangent)` the gradient of Σ_j cotangent_j R_j, where it is not zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Callable[[Params], Tensor],
        pull_back: Callable[[Params, Tensor], Params],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        """R_j of every column, in the dtype of the parameters."""
        ctx.pull_back, ctx.names = pull_back, names
        ctx.save_for_backward(*tensors)
        return value(dict(zip(names, tensors, strict=True))).to(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # as torch documents it
        ctx: Any, *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradient by each parameter; the other arguments have none."""
        params = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        gradient = ctx.pull_back(params, cotangents[0])
        products = (gradient[n].to(p) if n in gradient else None for n, p in params.items())
        return (None, None, None, *products)
