"""Penalties that are read from data: the squared gradient norm of an objective."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select
from tacit.regularizers.family import Regularizer, check_name
from tacit.regularizers.family import whole_column as _held


def gradient_norm(
    objective: Objective, *, scope: Scope = None, name: str = "gradient_norm"
) -> Regularizer:
    """Squared norm of the loss gradient, ‖∇L‖², whose own gradient is 2 H ∇L.

    That takes one streamed gradient and one streamed Hessian-vector product. A step of gradient
    descent of size η carries it with strength η/4 (Barrett & Dherin 2021).
    """
    check_name(name)
    if not isinstance(objective, Objective):
        raise InputError(
            f"gradient_norm was given a {type(objective).__name__}: pass the tacit.Objective whose "
            "gradient is penalised."
        )

    def slope(params: Params) -> Params:
        product = objective.hvp(objective.gradient(params), params)
        chosen = select(params, scope, what=f"scope of {name}")
        return {n: 2 * product[n] for n in chosen}

    def value(params: Params) -> Tensor:
        tensors = tuple(params.values())
        return _GradientNorm.apply(objective, slope, tuple(params), *tensors).reshape(1)

    def influence(params: Params, directions: Sequence[Params]) -> Tensor:
        # ∇R = 2Hg moves by 2(H_i − H)g + 2H(g_i − g) with example i.
        chosen = set(select(params, scope, what=f"scope of {name}"))
        kept = [{n: t for n, t in v.items() if n in chosen} for v in directions]
        turned = [
            objective.hvp({n: v.get(n, torch.zeros_like(p)) for n, p in params.items()}, params)
            for v in kept
        ]
        bends = objective.directional_derivatives(
            kept, params, base=objective.gradient(params)
        ).values
        return 2 * (bends + objective.directional_derivatives(turned, params).values).unsqueeze(2)

    return Regularizer(
        name,
        lambda params: _held(name, slope(params)),
        value,
        influence=influence,
        objective=objective,
    )


class _GradientNorm(torch.autograd.Function):
    """‖∇L‖² whose backward is the streamed Hessian product: no graph over the whole data set."""

    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        slope: Callable[[Params], Params],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.slope, ctx.names = slope, names
        ctx.save_for_backward(*tensors)
        gradient = objective.gradient(dict(zip(names, tensors, strict=True)))
        total = sum(g.square().sum() for g in gradient.values())
        return torch.as_tensor(total).to(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # as torch documents it
        ctx: Any, *outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        params = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        slope = ctx.slope(params)
        parts = ((outputs[0] * slope[n].to(p)) if n in slope else None for n, p in params.items())
        return (None, None, None, *parts)
