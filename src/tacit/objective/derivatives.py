"""Derivatives of one batch's mean loss, and the attention backend that double backward needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.errors import InputError
from tacit.objective.params import Params

NO_DEPENDENCE = (
    "the loss does not depend on the parameters: the model is detached somewhere, or the loss was "
    "computed under no_grad."
)


def leaves(params: Params) -> Params:
    """The same values as new leaves of the autograd graph; memory is shared."""
    return {n: p.detach().requires_grad_() for n, p in params.items()}


def gradient(mean: Tensor, leaves: Params, *, graph: bool = False) -> tuple[Tensor | None, ...]:
    """Gradient of a batch's mean loss, one tensor per leaf; None where a leaf is not used."""
    if not mean.requires_grad:
        raise InputError(NO_DEPENDENCE)
    return torch.autograd.grad(mean, list(leaves.values()), allow_unused=True, create_graph=graph)


def hessian_product(mean: Tensor, leaves: Params, direction: Params) -> tuple[Tensor | None, ...]:
    """Hessian of a batch's mean loss times a direction, by double backward."""
    try:
        gradients = gradient(mean, leaves, graph=True)
        pairs = [
            (g, d)
            for g, d in zip(gradients, direction.values(), strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:  # the loss is linear in the parameters
            return tuple(None for _ in leaves)
        outputs, cotangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    except RuntimeError as error:
        if not lacks_double_backward(error):
            raise
        raise InputError(
            f"a Hessian product needs double backward, which an operator here lacks: {error}. "
            "Attention must be able to run on torch's math backend (attn_implementation='sdpa' or "
            "'eager' in Hugging Face models); custom functions need a differentiable backward."
        ) from error


def lacks_double_backward(error: RuntimeError) -> bool:
    """Whether torch complains that an operator cannot be differentiated twice."""
    return "derivative" in str(error) or "differentiate twice" in str(error)


@contextmanager
def math_attention() -> Iterator[None]:
    """Run attention on torch's math backend, and restore the previous setting.

    Fused attention kernels have no second derivative, and the fast path of
    nn.TransformerEncoderLayer bypasses the layer's submodules and their hooks.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
