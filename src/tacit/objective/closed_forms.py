"""Cross-entropy and layer norm whose second derivatives are written in closed form.

Torch differentiates the gradient of cross-entropy step by step, which takes seven times the memory
of the logits in place of three, and that of layer norm in dozens of small steps. Here, both
gradients are functions of their own, with the formulas of their derivatives. In these, the saved
inputs have their graph, so that third derivatives are right too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tacit.objective import forward_rules
from tacit.objective.forward_rules import EXACT

MIN_CLASSES = 1024
"""Cross-entropy of fewer classes is left to torch."""
CHUNK = 2**24
"""Entries of logits whose probabilities are in memory at once, where no graph is needed."""


class ClosedForms(TorchFunctionMode):
    """Replaces cross-entropy of many classes, and layer norm, while a graph is recorded.

    In forward mode it replaces what has a rule in `forward_rules`. Where saved tensors have hooks
    nothing is replaced: activation checkpointing runs such a part again in the backward pass, where
    torch has switched this mode off, and both runs must save the same tensors.
    """

    def __init__(self, *, forward: bool = False):
        super().__init__()
        self.forward = forward

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the closed form where there is one for these arguments."""
        replacement = None
        if torch.is_grad_enabled():
            replacement = None if _saved_tensors_have_hooks() else REPLACEMENTS.get(func)
        elif self.forward:
            replacement = FORWARD.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(*args, **(kwargs or {}))


def _saved_tensors_have_hooks() -> bool:
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(True) is not None


def cross_entropy(  # the arguments of torch's
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, in closed form for many classes without options."""
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    classes = input.shape[min(1, input.ndim - 1)] if input.ndim else 0
    plain = (weight, size_average, reduce, label_smoothing) == (None, None, None, 0.0)
    if not plain or classes < MIN_CLASSES or input.dtype not in EXACT or target.is_floating_point():
        return F.cross_entropy(input, target, *options)
    logits = input.movedim(min(1, input.ndim - 1), -1).reshape(-1, classes)
    labels = target.reshape(-1)
    counted = labels != ignore_index
    closed_form = _Losses.apply if torch.is_grad_enabled() else forward_rules.cross_entropy
    losses = closed_form(logits, labels.where(counted, 0))
    losses = losses.masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm`, with the second derivative in closed form."""
    if weight is None or bias is None or input.ndim == weight.ndim:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    if input.dtype not in EXACT or not input.dtype == weight.dtype == bias.dtype:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _LayerNorm.apply(input, weight, bias, eps)[0]


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.cross_entropy: cross_entropy,
    F.layer_norm: layer_norm,
}
"""While a graph is recorded."""
FORWARD = {**forward_rules.RULES, F.cross_entropy: cross_entropy}
"""In forward mode."""


class _Losses(Function):
    """ℓ_i = log Σ_c exp z_ic − z_i,y(i), of logits z and labels y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> Tensor:
        parts = zip(_chunks(logits), _chunks(labels, logits), strict=True)
        return torch.cat([z.logsumexp(1) - z.gather(1, y[:, None])[:, 0] for z, y in parts])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels = ctx.saved_tensors
        return _product_of_rows(logits, labels, tangents[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        logits, labels = ctx.saved_tensors
        return _GradientOfLosses.apply(logits, labels, cotangents[0]), None


class _GradientOfLosses(Function):
    """u_i (p_i − e_y(i)) with p = softmax(z): the gradient of Σ u_i ℓ_i by z.

    Its product with a direction c has the gradient u (p∘c − p ⟨p, c⟩) by z, and ⟨p − e_y, c⟩ by u.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, u: Tensor) -> Tensor:
        p = torch.softmax(logits, 1)
        return p.scatter_add_(1, labels[:, None], -torch.ones_like(p[:, :1])).mul_(u[:, None])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        logits, labels, u = ctx.saved_tensors
        (c,) = cotangents
        by_logits = by_u = None
        if ctx.needs_input_grad[2]:
            by_u = _product_of_rows(logits, labels, c)
        if ctx.needs_input_grad[0]:
            parts = zip(_chunks(logits), _chunks(c, logits), _chunks(u, logits), strict=True)
            by_logits = torch.cat([_curvature(*part) for part in parts])
        return by_logits, None, by_u


def _curvature(z: Tensor, c: Tensor, u: Tensor) -> Tensor:
    p = torch.softmax(z, 1)
    pc = p * c
    return u[:, None] * (pc - p * pc.sum(1, keepdim=True))


def _product_of_rows(logits: Tensor, labels: Tensor, c: Tensor) -> Tensor:
    """⟨p_i − e_y(i), c_i⟩ of every row."""
    parts = zip(_chunks(logits), _chunks(c, logits), strict=True)
    means = torch.cat([(torch.softmax(z, 1) * part).sum(1) for z, part in parts])
    return means - c.gather(1, labels[:, None])[:, 0]


def _chunks(tensor: Tensor, logits: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows whose logits have at most CHUNK entries; all rows where a graph is recorded."""
    logits = tensor if logits is None else logits
    if torch.is_grad_enabled():
        return (tensor,)
    return tensor.split(max(1, CHUNK // max(1, logits.shape[1])))


class _LayerNorm(Function):
    """y = x̂ w + b with x̂ = (x − mean x) r and r = (var x + ε)^(−1/2); also mean and r."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, w.shape, w, b, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, ctx.eps = inputs
        _, mean, r = output
        ctx.mark_non_differentiable(mean, r)
        ctx.save_for_backward(x, w, b, mean, r)
        ctx.save_for_forward(x, w, b, mean, r)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w, _, mean, r = ctx.saved_tensors
        dx, dw, db, _ = tangents
        normal, out = (x - mean) * r, torch.zeros_like(x)
        if dx is not None:
            out = out + w * _project(dx, normal, r, w.ndim)
        if dw is not None:
            out = out + normal * dw
        return (out if db is None else out + db), None, None

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return (*_GradientOfLayerNorm.apply(cotangents[0], *ctx.saved_tensors, ctx.eps), None)


class _GradientOfLayerNorm(Function):
    """A(g w), Σ g x̂ and Σ g: the gradient of ⟨g, y⟩ by x, w and b.

    A(v) = r (v − mean v − x̂ mean(v x̂)) is symmetric. With h = g w and directions c_x, c_w, c_b, the
    product with them has the gradients

        by g:  w A(c_x) + x̂ c_w + c_b
        by w:  Σ g A(c_x)
        by x:  A(g c_w) − r (A(h) mean(c_x x̂) + A(c_x) mean(h x̂)) − r x̂ mean(h A(c_x))
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # what is differentiated by, and what was computed before
        g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, r: Tensor, eps: float
    ) -> Any:
        return torch.ops.aten.native_layer_norm_backward(
            g.contiguous(), x, w.shape, mean, r, w, b, [True, True, True]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        g, x, w, _, mean, r = ctx.saved_tensors
        cx, cw, cb = cotangents
        dims = tuple(range(-w.ndim, 0))
        if torch.is_grad_enabled():  # mean and r have no graph
            mean = x.mean(dims, keepdim=True)
            r = ((x - mean).square().mean(dims, keepdim=True) + ctx.eps).rsqrt()
        normal = (x - mean) * r
        along = _project(cx, normal, r, w.ndim)
        by_g = by_x = by_w = None
        if ctx.needs_input_grad[0]:
            by_g = torch.addcmul(torch.addcmul(cb, normal, cw), w, along)
        if ctx.needs_input_grad[2]:
            by_w = (g * along).reshape(-1, *w.shape).sum(0)
        if ctx.needs_input_grad[1]:
            h = g * w
            both = _project(h, normal, r, w.ndim) * (cx * normal).mean(dims, keepdim=True)
            both = both + along * (h * normal).mean(dims, keepdim=True)
            both = both + normal * (h * along).mean(dims, keepdim=True)
            by_x = _project(g * cw, normal, r, w.ndim) - r * both
        return by_g, by_x, by_w, None, None, None, None


def _project(v: Tensor, normal: Tensor, r: Tensor, ndim: int) -> Tensor:
    """A(v) = r (v − mean v − x̂ mean(v x̂)): the derivative of x̂ along v."""
    dims = tuple(range(-ndim, 0))
    along = (v * normal).mean(dims, keepdim=True)
    return r * torch.addcmul(v - v.mean(dims, keepdim=True), normal, along, value=-1)
