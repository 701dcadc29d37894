"""Layers in forward mode, in few steps: a value, and its derivative along a direction.

Torch's own rules for these layers take many steps, whose start takes a GPU longer than their work.
Inside of `torch.func.jvp` every tensor that moves with the direction carries its derivative. A rule
reads the derivatives of its inputs and attaches that of its output. What it does not cover is left
to torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

EXACT = (torch.float32, torch.float64)
"""Lower precisions are left to torch, which rounds their results at other places."""
CHUNK = 2**25
"""Entries of logits whose probabilities are in memory at once."""
ALIGNED, MANY_OUTPUTS = 16, 4096
"""Bytes at which the rows of a product should begin, and the number of columns from which that
matters: with 50,257 classes, a GPU takes several times as long for it as with 50,264."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, of many outputs with rows of zeros up to an aligned number."""
    outputs = len(weight) if weight.ndim == 2 and bias is None else 0
    more = -outputs % (ALIGNED // weight.element_size())
    if outputs < MANY_OUTPUTS or not more:
        return F.linear(input, weight, bias)
    return F.linear(input, F.pad(weight, (0, 0, 0, more)))[..., :outputs]


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm` with weights: y = x̂ w + b with x̂ = (x − mean x) r.

    The derivative of x̂ is r (dx − mean dx − x̂ mean(x̂ dx)). Lower precisions are widened for it.
    """
    others = [t for t in (weight, bias) if t is not None]
    same = all(t.dtype == input.dtype for t in others)
    if weight is None or not same or torch.is_autocast_enabled(input.device.type):
        return in_float32(F.layer_norm)(input, normalized_shape, weight, bias, eps)
    (x, dx), (w, dw) = _read(input), _read(weight)
    b, db = (None, None) if bias is None else _read(bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    x, w, b = x.to(wide), w.to(wide), None if b is None else b.to(wide)
    dims = tuple(range(-w.ndim, 0))
    value, mean, r = torch.native_layer_norm(x, w.shape, w, b, eps)
    normal = (x - mean) * r
    parts = [] if db is None else [db.expand(x.shape)]
    if dx is not None:
        dx = dx.to(wide)
        along = (normal * dx).mean(dims, keepdim=True)
        moved = torch.addcmul(dx - dx.mean(dims, keepdim=True), normal, along, value=-1)
        parts.append(moved * (r * w))
    if dw is not None:
        parts.append(normal * dw)
    return _attach(value.to(input.dtype), parts)


def in_float32(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm layer that is computed in float32 for inputs of lower precision.

    On a GPU torch's derivative of such a layer in forward mode is in float32 where its output is
    not, and the next product refuses it. Under autocast the output is in float32, too.
    """

    def normalise(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dtype in EXACT or torch.is_autocast_enabled(input.device.type):
            return norm(input, *args, **kwargs)
        wide, options = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return norm(input.float(), *wide, **options).to(input.dtype)

    return normalise


def attention(  # the arguments of torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of weights p = softmax(s): y = p v.

    Its derivative is (p∘ds) v − y Σ p∘ds + p dv. With dropout, shared heads or a mask that moves it
    is left to torch.
    """
    moves = attn_mask is not None and _read(attn_mask)[1] is not None
    if moves or dropout_p or enable_gqa:
        options = {"scale": scale, **({"enable_gqa": True} if enable_gqa else {})}
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    (q, dq), (k, dk), (v, dv) = map(_read, (query, key, value))
    k, dk = k * factor, None if dk is None else dk * factor
    weights = _attention_weights(q @ k.mT, attn_mask, causal=is_causal)
    output = weights @ v
    products = [] if dq is None else [dq @ k.mT]
    products += [] if dk is None else [q @ dk.mT]
    parts = [] if dv is None else [weights @ dv]
    if products:
        moved = weights * sum(products[1:], products[0])
        parts += [moved @ v, -moved.sum(-1, keepdim=True) * output]
    return _attach(output, parts)


def _attention_weights(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """The softmax of masked scores; zeros in rows that are masked as a whole, as torch has them."""
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is None:
        return scores.softmax(-1)
    boolean = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -torch.inf) if boolean else scores + mask
    nothing = scores.amax(-1, keepdim=True) == -torch.inf
    return scores.softmax(-1).masked_fill(nothing, 0)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """ℓ_i = log Σ_c exp z_ic − z_i,y(i) of logits z and labels y, for many classes."""
    z, dz = _read(logits)
    sums, rows = z.logsumexp(1), labels[:, None]
    losses = sums - z.gather(1, rows)[:, 0]
    if dz is None:
        return losses
    size = max(1, CHUNK // max(1, z.shape[1]))
    chunks = zip(z.split(size), dz.split(size), sums[:, None].split(size), strict=True)
    means = torch.cat([((part - total).exp() * along).sum(1) for part, along, total in chunks])
    return _attach(losses, [means, -dz.gather(1, rows)[:, 0]])


def _read(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """A value and its derivative, None where it does not move."""
    value, derivative = forward_ad.unpack_dual(tensor)
    return value, derivative


def _attach(value: Tensor, parts: list[Tensor]) -> Tensor:
    """A value that carries the sum of the parts as its derivative."""
    if not parts:
        return value
    return forward_ad.make_dual(value, sum(parts[1:], parts[0]).to(value.dtype))


RULES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear,
    F.layer_norm: layer_norm,
    F.group_norm: in_float32(F.group_norm),
    F.scaled_dot_product_attention: attention,
}
if hasattr(F, "rms_norm"):
    RULES[F.rms_norm] = in_float32(F.rms_norm)
