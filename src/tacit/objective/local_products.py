"""Derivatives of single examples at one operation that reads a parameter.

Let y = f(e, …) be the output of an operation, e a tensor that all examples share, and g_i the
gradient of example i's loss by y. A change ė of e changes that loss, by way of y, by

    ⟨g_i, (∂y/∂e) ė⟩ = ⟨G_i, ė⟩,    G_i = (∂y/∂e)ᵀ g_i.

For a linear layer with inputs x this is ⟨g_iᵀ x_i, ė⟩: a product of what the forward and the
backward pass have computed. Operations without a rule here are differentiated by themselves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from tacit.objective.derivatives import lacks_double_backward

BLOCK_ENTRIES, BLOCK_ENTRIES_ELSEWHERE = 2**19, 2**26
"""Entries of the gradients G_i that are formed at once: on the CPU they stay in the cache."""
GRADIENT_COST = 8
"""Time to write a matrix x_iᵀ g_i and multiply it by one direction, in rows of its product."""


class NoLocalProductError(Exception):
    """The derivative of single examples cannot be read off at this operation."""


class Rows(NamedTuple):
    """Where a tensor has its examples: a dimension of (examples · rows of each) entries."""

    dim: int
    per_example: int = 1
    example_first: bool = True
    """Whether the rows of one example are neighbours."""

    def split(self, tensor: Tensor) -> Tensor:
        """The tensor with a dimension of examples in front; the rows of each stay in place."""
        count, sizes = tensor.shape[self.dim] // self.per_example, [self.per_example]
        sizes = [count, *sizes] if self.example_first else [*sizes, count]
        split = tensor.unflatten(self.dim, sizes)
        return split.movedim(self.dim if self.example_first else self.dim + 1, 0)

    def scale(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """Every example's part of the tensor times its factor."""
        repeated = factors.to(tensor)
        if self.example_first:
            repeated = repeated.repeat_interleave(self.per_example)
        else:
            repeated = repeated.repeat(self.per_example)
        return tensor * repeated.view(-1, *[1] * (tensor.ndim - self.dim - 1))


class Use(NamedTuple):
    """One operation that reads a shared tensor, after the backward pass of a batch."""

    node: Any
    """The operation in autograd's graph."""
    output_nr: int
    slot: int
    """The position of the shared tensor among the node's inputs."""
    gradient: Tensor
    """The gradients g_i of the examples' losses by the output."""
    rows: Rows
    """Where the output has its examples."""
    shape: tuple[int, ...]
    """That of the shared tensor."""

    def zeros(self, directions: int) -> Tensor:
        """Zero changes of the shared tensor."""
        return self.gradient.new_zeros(directions, *self.shape)

    def saved(self, name: str) -> Any:
        """What the forward pass saved for the backward pass, such as a layer's inputs."""
        return _detach(getattr(self.node, f"_saved_{name}"))


class Product(NamedTuple):
    """What one use of a shared tensor adds to the derivatives of a batch."""

    columns: Tensor
    """⟨G_i, ė_j⟩, of shape (examples, directions)."""
    cotangent: Tensor | None
    """Σ c_i G_i for coefficients c of the examples."""


def local_product(use: Use, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """⟨G_i, ė_j⟩ for the tangents ė_j of a shared tensor, and Σ c_i G_i for coefficients c."""
    if isinstance(use.node, BackwardCFunction):
        raise NoLocalProductError("a custom function reads a parameter")
    _check_saved(use.node)
    rule = RULES.get((use.node.name(), use.slot), _by_itself)
    return rule(use, tangents, coefficients)


def _check_saved(node: Any) -> None:
    """Refuse hooks on saved tensors: activation checkpointing would run anew at each access."""
    for name in ("_saved_mat1", "_saved_self", "_saved_input", "_saved_other"):
        value = getattr(node, name, None)
        if isinstance(value, Tensor) and value.data_ptr() != getattr(node, name).data_ptr():
            raise NoLocalProductError("saved tensors have hooks")


def _linear(use: Use, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """A linear layer, y = x e: G_i = x_iᵀ g_i, summed over the rows of an example."""
    name = use.node.name()
    if use.rows.dim or (name == "AddmmBackward0" and use.saved("alpha") != 1):
        return _by_itself(use, tangents, coefficients)
    inputs = use.saved("mat1" if name == "AddmmBackward0" else "self")
    dtype = _at_least_float32(use.gradient)
    x, g = (use.rows.split(t).to(dtype) for t in (inputs, use.gradient))
    if tangents.is_contiguous():
        return _matrix(x, g, tangents, coefficients)
    columns, cotangent = _matrix(g, x, tangents.mT, coefficients)
    return Product(columns, None if cotangent is None else cotangent.mT)


def _matrix(x: Tensor, g: Tensor, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """⟨x_iᵀ g_i, ė_j⟩ for x and g of shapes (examples, rows, inputs) and (…, outputs).

    With many rows per example the matrices x_iᵀ g_i are formed, a block at a time; with few it is
    cheaper to multiply the rows by every direction.
    """
    if x.shape[1] * (len(tangents) - 1) > GRADIENT_COST * len(tangents):
        return _by_gradients(x, g, tangents, coefficients)
    flat_x, flat_g = x.flatten(0, 1), g.flatten(0, 1)
    wide = flat_g.shape[1] > flat_x.shape[1]
    columns = [
        (flat_g @ t.mT).mul_(flat_x) if wide else (flat_x @ t).mul_(flat_g) for t in tangents
    ]
    by_example = torch.stack([c.sum(1).view(x.shape[:2]).sum(1) for c in columns], dim=1)
    if coefficients is None:
        return Product(by_example, None)
    scaled = g * coefficients.to(g)[:, None, None]
    return Product(by_example, flat_x.mT @ scaled.flatten(0, 1))


def _by_gradients(x: Tensor, g: Tensor, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """⟨x_iᵀ g_i, ė_j⟩ from the matrices x_iᵀ g_i: a few examples, or columns of one, at a time."""
    most = BLOCK_ENTRIES if x.device.type == "cpu" else BLOCK_ENTRIES_ELSEWHERE
    width = max(1, most // x.shape[2])
    products = [
        _by_blocks(x, g_part, tangents_part.flatten(1), coefficients, most)
        for g_part, tangents_part in zip(g.split(width, 2), tangents.split(width, 2), strict=True)
    ]
    columns = sum((product.columns for product in products), torch.zeros((), device=x.device))
    parts = [p.cotangent for p in products if p.cotangent is not None]
    return Product(
        columns, torch.cat([p.view(x.shape[2], -1) for p in parts], 1) if parts else None
    )


def _by_blocks(
    x: Tensor, g: Tensor, tangents: Tensor, coefficients: Tensor | None, most: int
) -> Product:
    """The same with flat tangents, in blocks of examples whose matrices have `most` entries."""
    size = max(1, most // tangents.shape[1])
    columns, total = [], tangents.new_zeros(tangents.shape[1])
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        gradients = torch.bmm(x[part].mT, g[part]).flatten(1)
        columns.append(gradients @ tangents.T)
        if coefficients is not None:
            total.addmv_(gradients.mT, coefficients[part].to(gradients))
    return Product(torch.cat(columns), None if coefficients is None else total)


def _scaled(factor: Callable[[Use], Any], *, by_channel: bool = False) -> Callable[..., Product]:
    """The rule of y = a·e + …, where e is broadcast: G_i is a·g_i, summed to the shape of e.

    With `by_channel`, e has the second dimension of y; otherwise its last ones.
    """

    def rule(use: Use, tangents: Tensor, coefficients: Tensor | None) -> Product:
        dtype = _at_least_float32(use.gradient)
        product = use.gradient.to(dtype) * factor(use)
        if product.shape != use.gradient.shape:
            return _by_itself(use, tangents, coefficients)
        shape, parts = use.shape, use.rows.split(product)
        trailing = product.ndim - 2 if by_channel else 0
        leading = product.ndim - len(shape) - trailing
        aligned = [*[1] * leading, *shape, *[1] * trailing]
        summed = [i + 1 for i, size in enumerate(aligned) if size == 1]
        gradients = parts.sum(summed) if summed else parts
        gradients = gradients.reshape(len(parts), -1)
        columns = gradients @ tangents.reshape(len(tangents), -1).to(gradients).T
        if coefficients is None:
            return Product(columns, None)
        return Product(columns, (coefficients.to(gradients) @ gradients).view(shape))

    return rule


def _embedding(use: Use, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """An embedding, y = rows of e by index; the padding row has no gradient."""
    if use.saved("scale_grad_by_freq"):
        raise NoLocalProductError("the gradient of an embedding depends on the whole batch")
    indices, g = use.saved("indices"), use.gradient.to(_at_least_float32(use.gradient))
    if use.saved("padding_idx") < tangents.shape[1]:
        g = g.masked_fill((indices == use.saved("padding_idx"))[..., None], 0)
    columns = [use.rows.split(t[indices] * g).flatten(1).sum(1) for t in tangents]
    return Product(torch.stack(columns, dim=1), _cotangent(use, coefficients))


def _convolution(use: Use, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """A convolution, y = x ∗ e: all directions are output channels of one convolution."""
    if use.saved("transposed") or use.saved("groups") != 1 or use.rows.dim:
        return _by_itself(use, tangents, coefficients)
    x, geometry = use.saved("input"), ("stride", "padding", "dilation")
    options = [list(use.saved(name)) for name in geometry]
    rest = [False, list(use.saved("output_padding")), 1]
    stacked = tangents.flatten(0, 1).to(x.dtype)
    y = torch.ops.aten.convolution(x, stacked, None, *options, *rest)
    products = y.unflatten(1, (len(tangents), -1)) * use.gradient[:, None]
    columns = use.rows.split(products.flatten(2).sum(2)).sum(1)
    if coefficients is None:
        return Product(columns, None)
    scaled, mask = use.rows.scale(use.gradient, coefficients), [False, True, False]
    gradients = torch.ops.aten.convolution_backward(
        scaled, x, tangents[0].to(x.dtype), None, *options, *rest, mask
    )
    return Product(columns, gradients[1])


def _by_itself(use: Use, tangents: Tensor, coefficients: Tensor | None) -> Product:
    """(∂y/∂e) ė_j as the derivative of ⟨(∂y/∂e)ᵀ h, ė_j⟩ by h, at any h.

    An operation that has no such derivative gives G_i, one example after the other.
    """
    try:
        columns = _by_double_backward(use, tangents)
    except RuntimeError as error:
        if not lacks_double_backward(error):
            raise
        columns = _one_by_one(use, tangents)
    return Product(columns, _cotangent(use, coefficients))


def _by_double_backward(use: Use, tangents: Tensor) -> Tensor:
    with torch.enable_grad():
        h = use.gradient.detach().clone().requires_grad_()
        pulled_back = _pull_back(use, h)
        columns = []
        for tangent in tangents:
            cotangent = tangent.to(pulled_back).expand(pulled_back.shape)
            (change,) = torch.autograd.grad(pulled_back, h, cotangent, retain_graph=True)
            columns.append(use.rows.split(change * use.gradient).flatten(1).sum(1))
    return torch.stack(columns, dim=1)


def _one_by_one(use: Use, tangents: Tensor) -> Tensor:
    flat, columns = tangents.flatten(1), []
    for example in torch.eye(len(use.rows.split(use.gradient))):
        gradient = _weighted_sum(use, example)
        columns.append(flat.to(gradient) @ gradient.flatten())
    return torch.stack(columns)


def _cotangent(use: Use, coefficients: Tensor | None) -> Tensor | None:
    """Σ c_i G_i for coefficients c; None without any."""
    return None if coefficients is None else _weighted_sum(use, coefficients)


def _weighted_sum(use: Use, coefficients: Tensor) -> Tensor:
    """Σ c_i G_i by the operation's own backward pass."""
    with torch.no_grad():
        pulled_back = _pull_back(use, use.rows.scale(use.gradient, coefficients))
        return pulled_back.sum_to_size(use.shape)


def _pull_back(use: Use, gradient: Tensor) -> Tensor:
    """(∂y/∂e)ᵀ times a gradient by the output; not yet summed where e was broadcast."""
    gradients: list[Tensor | None] = [None] * len(use.node._input_metadata)
    gradients[use.output_nr] = gradient
    result = use.node(*gradients)
    result = result[use.slot] if isinstance(result, tuple) else result
    if result is None:
        raise NoLocalProductError(f"{use.node.name()} gave no gradient")
    return result


def _normalised(use: Use) -> Tensor:
    """The inputs of a layer norm with mean zero and variance one."""
    mean, reciprocal = use.saved("result1"), use.saved("result2")
    return (use.saved("input") - mean) * reciprocal


def _standardised(use: Use) -> Tensor:
    """The inputs of a batch norm, standardised with its running statistics."""
    if use.saved("training"):
        raise NoLocalProductError("examples interact")
    x = use.saved("input")
    shape = (-1, *[1] * (x.ndim - 2))
    reciprocal = (use.saved("running_var") + use.saved("eps")).rsqrt()
    return (x - use.saved("running_mean").view(shape)) * reciprocal.view(shape)


def _other(name: str) -> Callable[[Use], Any]:
    return lambda use: use.saved(name)


def _one(use: Use) -> float:
    return 1.0


def _beta(use: Use) -> float:
    return use.saved("beta")


def _alpha(use: Use) -> float:
    return use.saved("alpha")


def _minus_alpha(use: Use) -> float:
    return -use.saved("alpha")


RULES: dict[tuple[str, int], Callable[..., Product]] = {
    ("AddmmBackward0", 0): _scaled(_beta),
    ("AddmmBackward0", 2): _linear,
    ("MmBackward0", 1): _linear,
    ("EmbeddingBackward0", 0): _embedding,
    ("ConvolutionBackward0", 1): _convolution,
    ("ConvolutionBackward0", 2): _scaled(_one, by_channel=True),
    ("NativeBatchNormBackward0", 1): _scaled(_standardised, by_channel=True),
    ("NativeBatchNormBackward0", 2): _scaled(_one, by_channel=True),
    ("NativeLayerNormBackward0", 1): _scaled(_normalised),
    ("NativeLayerNormBackward0", 2): _scaled(_one),
    ("AddBackward0", 0): _scaled(_one),
    ("AddBackward0", 1): _scaled(_alpha),
    ("SubBackward0", 0): _scaled(_one),
    ("SubBackward0", 1): _scaled(_minus_alpha),
    ("MulBackward0", 0): _scaled(_other("other")),
    ("MulBackward0", 1): _scaled(_other("self")),
    ("ExpandBackward0", 0): _scaled(_one),
}
"""By the name of the operation and the position of the shared tensor among its inputs."""


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    """The dtype of sums over a tensor's entries."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _detach(value: Any) -> Any:
    """A tensor without its graph; anything else unchanged."""
    return value.detach() if isinstance(value, Tensor) else value
