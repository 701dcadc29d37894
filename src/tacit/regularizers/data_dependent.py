"""Penalties that depend on data: the squared gradient norm of an objective."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select
from tacit.regularizers.family import Regularizer, check_name, whole_column


def gradient_norm(
    objective: Objective, *, scope: Scope = None, name: str = "gradient_norm"
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
    """
    check_name(name)
    if not isinstance(objective, Objective):
        raise InputError(
            f"gradient_norm was given a {type(objective).__name__}: pass the tacit.Objective whose "
            "gradient is penalised."
        )

    def in_scope(params: Params) -> tuple[str, ...]:
        return select(params, scope, what=f"scope of {name}")

    def penalty_gradient(params: Params) -> Params:
        product = objective.hvp(objective.gradient(params), params)
        return {n: 2 * product[n] for n in in_scope(params)}

    def value(params: Params) -> Tensor:
        tensors = tuple(params.values())
        return _GradientNorm.apply(objective, penalty_gradient, tuple(params), *tensors).reshape(1)

    def influence(params: Params, directions: Sequence[Params]) -> Tensor:
        # With g = ∇L, example i changes ⟨2Hg, v⟩ by 2⟨(H_i − H)g, v⟩ + 2⟨H(g_i − g), v⟩. The terms
        # without i are shared by all examples; the others are 2 D²ℓ_i[v, g] and 2 Dℓ_i[Hv].
        scoped_names = set(in_scope(params))
        scoped = [{n: t for n, t in v.items() if n in scoped_names} for v in directions]
        products = [
            objective.hvp({n: v.get(n, torch.zeros_like(p)) for n, p in params.items()}, params)
            for v in scoped
        ]
        second = objective.directional_derivatives(
            scoped, params, base=objective.gradient(params)
        ).values
        first = objective.directional_derivatives(products, params).values
        return 2 * (second + first).unsqueeze(2)

    return Regularizer(
        name,
        lambda params: whole_column(name, penalty_gradient(params)),
        value,
        influence=influence,
        objective=objective,
    )


class _GradientNorm(torch.autograd.Function):
    """‖∇L‖² with the streamed 2 H ∇L as its backward, instead of one graph over all the data."""

    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        penalty_gradient: Callable[[Params], Params],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.penalty_gradient, ctx.names = penalty_gradient, names
        ctx.save_for_backward(*tensors)
        gradient = objective.gradient(dict(zip(names, tensors, strict=True)))
        total = sum(g.square().sum() for g in gradient.values())
        return torch.as_tensor(total).to(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # as torch documents it
        ctx: Any, *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        params = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        gradient = ctx.penalty_gradient(params)
        products = (
            cotangents[0] * gradient[n].to(p) if n in gradient else None for n, p in params.items()
        )
        return (None, None, None, *products)
