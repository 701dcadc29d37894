"""Models that are hard to differentiate: recurrent, attention, checkpointed, custom functions."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.models import tanh_mlp


class NativeLayerNorm(nn.Module):
    """Layer norm by a call whose third derivatives torch gets wrong: not that of nn.LayerNorm."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return torch.native_layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    """Embeddings tied to the output, multi-head attention, layer norm, GELU, a frozen tensor."""

    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.mid = nn.LayerNorm(8), nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
        self.out = nn.Linear(8, 7, bias=False)
        self.out.weight = self.embed.weight
        self.mid.bias.requires_grad_(False)

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + self.attend(h, h, h)[0]
        h = self.layer(F.gelu(self.mid(self.norm(h))))
        h = h + F.scaled_dot_product_attention(h, h, h)
        return self.out(h.mean(1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = tanh_mlp(3, (5, 6, 6)), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(checkpoint(self.inside, x, use_reentrant=False))


class OnceSquare(torch.autograd.Function):
    """x², with a forward mode, differentiable once: its backward pass raises under autograd."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent


class DetachedSquare(torch.autograd.Function):
    """x², with a forward mode. Its backward pass is detached, which raises no error."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return (2 * ctx.saved_tensors[0] * gradient).detach()

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(self.function.apply(self.a(x)))
