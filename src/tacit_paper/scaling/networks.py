"""A decoder in the style of GPT-2, its loss per token, and random sequences."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tacit_paper.scaling.config import Size

HEAD = 64
"""Width of an attention head."""
SPREAD = 0.02
"""Standard deviation of random weights, as in GPT-2."""


class Block(nn.Module):
    """Causal attention and two dense layers, each added to a normalised input."""

    def __init__(self, width: int, dropout: float, place: dict[str, Any]):
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.attention_norm = nn.LayerNorm(width, **place)
        self.attention_in = nn.Linear(width, 3 * width, **place)
        self.attention_out = nn.Linear(width, width, **place)
        self.dense_norm = nn.LayerNorm(width, **place)
        self.dense_in = nn.Linear(width, 4 * width, **place)
        self.dense_out = nn.Linear(4 * width, width, **place)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden states after this block, (sequences, positions, width)."""
        hidden = hidden + self.dropout(self.attention_out(self._attend(hidden)))
        inner = F.gelu(self.dense_in(self.dense_norm(hidden)), approximate="tanh")
        return hidden + self.dropout(self.dense_out(inner))

    def _attend(self, hidden: Tensor) -> Tensor:
        parts = self.attention_in(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Blocks between an embedding of tokens and positions and the same embedding of tokens."""

    def __init__(self, size: Size, positions: int, dropout: float, place: dict[str, Any]):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width, **place)
        self.positions = nn.Embedding(positions, size.width, **place)
        self.blocks = nn.ModuleList(Block(size.width, dropout, place) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, **place)
        self.checkpointed = size.checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token, (sequences, positions, vocabulary)."""
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)


def build_decoder(
    size: Size, *, positions: int, dropout: float, dtype: torch.dtype, device: str
) -> Decoder:
    """A decoder with random weights, made on the device; the global random state stays as it is."""
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
        torch.manual_seed(0)
        model = Decoder(size, positions, dropout, place)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=SPREAD)
    return model.eval()


def random_batches(
    count: int, *, sequences: int, positions: int, vocabulary: int, device: str
) -> list[Tensor]:
    """Batches of sequences with one token more than positions: the last is only predicted."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, sequences, positions + 1)
    return list(torch.randint(vocabulary, shape, generator=generator).to(device))


def token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of every predicted token, in float32 also where the model has less."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
