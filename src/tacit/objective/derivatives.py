"""Derivatives of one batch's mean loss."""

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.params import Params


def leaves(params: Params) -> Params:
    """The same values as fresh leaves of the graph; memory is shared."""
    return {n: p.detach().requires_grad_() for n, p in params.items()}


def gradient(mean: Tensor, leaves: Params, *, graph: bool = False) -> tuple[Tensor | None, ...]:
    """∇ of a batch's mean loss; None where a parameter takes no part."""
    if not mean.requires_grad:
        raise InputError(
            "the loss does not depend on the parameters: the model is detached somewhere, or the "
            "loss was computed under no_grad."
        )
    return torch.autograd.grad(mean, list(leaves.values()), allow_unused=True, create_graph=graph)


def hessian_product(mean: Tensor, leaves: Params, along: Params) -> tuple[Tensor | None, ...]:
    """Hessian of a batch's mean loss times a direction, by double backward."""
    try:
        first = gradient(mean, leaves, graph=True)
        pairs = [
            (g, a)
            for g, a in zip(first, along.values(), strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:  # the loss is linear in the parameters
            return tuple(None for _ in leaves)
        outputs, cotangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    except RuntimeError as error:
        if "derivative" not in str(error) and "differentiate twice" not in str(error):
            raise
        raise InputError(
            f"a Hessian product needs double backward, which an operator here lacks: {error}. "
            "Attention must be able to run on torch's math backend (attn_implementation='sdpa' or "
            "'eager' in Hugging Face models); custom functions need a differentiable backward."
        ) from error
