"""Any differentiable penalty, and the squared gradient norm of an objective."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tacit import derivatives
from tacit.errors import InputError
from tacit.objective import Objective
from tacit.params import Params, Scope, check_finite, select, wide
from tacit.regularizers.family import Columns, Regularizer, check_name


def regularizer(
    name: str, function: Callable[[Params], Tensor], *, scope: Scope = None
) -> Regularizer:
    """A penalty from any differentiable scalar function of the parameters.

    Autograd takes its gradient, at the cost of one parameter-sized vector. Parameters out of scope
    are held constant. Whether the function reads data cannot be known: `score_examples` holds its
    column fixed.

    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> regularizer("norm", lambda params: params["w"].norm()).gradient(params)
    {'norm': {'w': tensor([0.6000, 0.8000], dtype=torch.float64)}}
    """
    check_name(name)
    if not callable(function):
        raise InputError(
            f"regularizer {name!r} was given a {type(function).__name__}: pass a function of the "
            "parameters' dictionary that returns a scalar."
        )

    def value(params: Params) -> Tensor:
        chosen = select(params, scope, what=f"scope of {name}")
        penalty = function({n: p if n in chosen else p.detach() for n, p in params.items()})
        if not isinstance(penalty, Tensor) or penalty.numel() != 1:
            shape = tuple(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
            raise InputError(
                f"regularizer {name!r} returned {shape}: a scalar tensor is needed. Sum over its "
                "entries, or make one regularizer of each."
            )
        return penalty.reshape(1)

    def bind(params: Params) -> Columns:
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaves = derivatives.leaves(params)
            penalty = value(leaves)
            if not penalty.requires_grad:
                raise InputError(
                    f"regularizer {name!r} does not depend on the parameters it covers: compute it "
                    "from the tensors it is handed, without .item(), .detach() or .data."
                )
            parts = torch.autograd.grad(penalty, list(leaves.values()), allow_unused=True)
        found = {n: g for n, g in zip(leaves, parts, strict=True) if g is not None}
        check_finite(found, what=f"the gradient of regularizer {name!r}")
        return _held(name, found)

    return Regularizer(name, bind, value)


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
        bends = objective.along(kept, params, base=objective.gradient(params)).values
        return 2 * (bends + objective.along(turned, params).values).unsqueeze(2)

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


def _held(name: str, gradient: Params) -> Columns:
    """One column from a gradient that is held whole."""
    return Columns(
        names=(name,),
        active=dict.fromkeys(gradient, (0,)),
        rows=lambda tensor, part: wide(gradient[tensor].flatten()[part]).unsqueeze(1),
    )
