"""Derivatives of one batch's mean loss, and the attention backend that double backward needs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.errors import InputError
from tacit.objective.params import Params, same_buffers

NO_DEPENDENCE = "the loss does not depend on the parameters: they are detached, or under no_grad."


def leaves(params: Params) -> Params:
    """The same values as new leaves of the autograd graph; memory is shared.

    They are parameters: a forward pass may ask for that, or assign one to another module.
    """
    return same_buffers({n: nn.Parameter(p.detach()) for n, p in params.items()}, params)


def gradient(mean: Tensor, leaves: Params, *, graph: bool = False) -> tuple[Tensor | None, ...]:
    """Gradient of a batch's mean loss, one tensor per leaf; None where a leaf is not used."""
    if not mean.requires_grad:
        raise InputError(NO_DEPENDENCE)
    return torch.autograd.grad(mean, list(leaves.values()), allow_unused=True, create_graph=graph)


def gradient_with_graph(function: Tensor, leaves: Params) -> Sequence[Tensor | None] | None:
    """The gradient of a penalty, which can be differentiated; None if it can not.

    A function that can be differentiated only once puts an error node into the graph of its
    gradient if the incoming gradient requires a graph too; otherwise it would look linear. The
    factor `one` makes the incoming gradient require one.
    """
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    gradients = gradient(function * one.to(function.device), leaves, graph=True)
    nodes, visited = [g.grad_fn for g in gradients if g is not None], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() == "torch::autograd::Error":
            return None
        nodes += [following for following, _ in node.next_functions]
    return gradients


def pull_back(
    pairs: Iterable[tuple[Tensor | None, Tensor]], inputs: Sequence[Tensor], **options: bool
) -> Sequence[Tensor | None]:
    """Gradient of Σ ⟨tensor, cotangent⟩ by the inputs; tensors without a graph are constants."""
    pairs = [(t, c.to(t)) for t, c in pairs if t is not None and t.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    tensors, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(tensors, inputs, cotangents, allow_unused=True, **options)


def hessian_product(mean: Tensor, leaves: Params, direction: Params) -> Sequence[Tensor | None]:
    """Hessian of a batch's mean loss times a direction, by double backward."""
    try:
        gradients = gradient(mean, leaves, graph=True)
        pairs = zip(gradients, direction.values(), strict=True)
        return pull_back(pairs, list(leaves.values()))
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
