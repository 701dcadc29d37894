"""Train a small GPT on the source of Python's standard library, and estimate what regularized it.

    python examples/language_model.py                            # half a minute on two CPU cores
    python examples/language_model.py --size full --device cuda  # 25 million weights

AdamW's decoupled weight decay acts on the matrices, and not on biases and norms: the true answer
is known. It is compared with ridge, ridge by layer, and the distance to the initial weights.
"""

import argparse
import math
import sysconfig
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit


class Size(NamedTuple):
    """A model, how much text it reads, and how it is trained."""

    width: int
    heads: int
    blocks: int
    context: int
    sequences: int
    batch: int
    epochs: int
    recorded: int
    """From how many of the last epochs the strengths are estimated."""
    rate: float
    """The largest learning rate."""
    floor: float
    """The last learning rate, as a part of the largest: see `learning_rate`."""


SIZES = {
    "toy": Size(32, 4, 2, 32, 512, 32, 60, 7, 3e-3, 5e-3),  # 35 thousand weights
    "full": Size(512, 8, 8, 256, 8192, 128, 12, 3, 1e-3, 2.5e-4),  # 25 million weights
}
VOCABULARY = 256  # a token is a byte
DECAY = 0.3
WARMUP, FALL = 0.02, 0.7
"""The learning rate rises for 2 % of all steps and falls until 70 %, to `Size.floor`.

The epochs that the estimate is from are the last ones, at the small rate. The larger the rate, the
more the gradients of an epoch's batches differ from the gradient at its mean weights; in a large
model these differences are soon larger than the decay.
"""


class Block(nn.Module):
    """Attention to earlier bytes, then two layers for each byte; both after a layer norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention finds, and then what the two layers make of it."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Logits of the next byte at every position. Input and output share the embedding."""

    def __init__(self, size: Size):
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.blocks)))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_sum = name.endswith(("mix.weight", "down.weight"))
                scale = 0.02 / (2 * size.blocks) ** 0.5 if into_sum else 0.02
                nn.init.normal_(parameter, std=scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """From (sequences, bytes) to (sequences, bytes, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.bytes(tokens) + self.positions(places))
        return F.linear(self.norm(hidden), self.bytes.weight)


def read_sequences(count: int, length: int) -> Tensor:
    """The first bytes of the standard library's source, in order of path, one sequence per row."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text += path.read_bytes()
        except OSError:
            continue
        if len(text) >= count * length:
            break
    count = min(count, len(text) // length)
    return torch.frombuffer(text[: count * length], dtype=torch.uint8).view(count, length).long()


def token_losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The cross-entropy of every byte but the first, given those before it."""
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def learning_rate(progress: float, floor: float) -> float:
    """The rate at this part of all steps, from 0 to 1, over the largest rate."""
    fallen = min(max(progress - WARMUP, 0) / (FALL - WARMUP), 1)
    cosine = floor + (1 - floor) * (1 + math.cos(math.pi * fallen)) / 2
    return min(progress / WARMUP, 1) * cosine


def train(
    model: nn.Module, sequences: Tensor, size: Size
) -> tuple[torch.optim.AdamW, tacit.equations.EpochAverages]:
    """Train with AdamW in epochs; `average_epochs` watches the optimizer."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=size.rate)
    batches = math.ceil(len(sequences) / size.batch)
    steps = size.epochs * batches
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate((step + 1) / steps, size.floor)
    )
    averages = tacit.average_epochs(model, optimizer, epochs=size.recorded)
    start = time.perf_counter()
    for epoch in range(1, size.epochs + 1):
        total = torch.zeros((), device=sequences.device)
        for rows in torch.randperm(len(sequences)).to(sequences.device).split(size.batch):
            optimizer.zero_grad()
            loss = token_losses(model, (sequences[rows],)).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        averages.end_epoch()
        if epoch % (size.epochs // 6) == 0:
            mean, seconds = total.item() / batches, time.perf_counter() - start
            speed = epoch * len(sequences) * size.context / seconds
            print(
                f"epoch {epoch:2} of {size.epochs}, step {epoch * batches:,} of {steps:,}: "
                f"loss {mean:.3f}, {seconds:.0f} s, {speed:,.0f} bytes/s",
                flush=True,
            )
    return optimizer, averages


def describe(fit: tacit.Fit) -> str:
    """The strength with its interval, or the range of several; in parentheses if it says little."""
    strengths = sorted(fit.strengths.values())
    if len(strengths) > 1:
        text = f"{strengths[0]:.3g} to {strengths[-1]:.3g}, {len(strengths)} layers"
    else:
        ((low, high),) = fit.intervals()["training"].values()
        text = f"{strengths[0]:.4g} [{low:.4g}, {high:.4g}]"
    return text if fit.explained > 0.5 else f"({text})"


def print_table(fits: dict[str, tacit.Fit], applied: dict[str, float]) -> None:
    """One row per explanation, and below it the problems in full."""
    print(f"\n{'explanation':<22}{'explains':>9}  {'strength [95 %]':<37}{'applied':<9}problems")
    for name, fit in fits.items():
        kinds = ", ".join(dict.fromkeys(problem.kind for problem in fit.problems))
        truth = f"{applied[name]:g}" if name in applied else "–"
        print(f"{name:<22}{fit.explained:>9.1%}  {describe(fit):<37}{truth:<9}{kinds or 'none'}")
    for name, fit in fits.items():
        for problem in fit.problems:
            print("\n" + textwrap.fill(f"{name}: {problem}", 96))


def print_conclusion(fits: dict[str, tacit.Fit], applied: dict[str, float]) -> None:
    """What a reader may conclude from these fits, and whether it is true."""
    best = max(fits, key=lambda name: fits[name].explained)
    others = max(fit.explained for name, fit in fits.items() if name != best)
    text = f"{best} explains most: {fits[best].explained:.1%}. The others explain {others:.0%} or "
    text += "less. Their strengths may have narrow intervals all the same: an interval says how "
    text += "precisely a strength is known, and not that its penalty was applied. "
    for name, strength in applied.items():
        ((low, high),) = fits[name].intervals()["training"].values()
        where = "within" if low <= strength <= high else "outside"
        (estimate,) = fits[name].strengths.values()
        text += f"AdamW applied {strength:g}, which is {where} the interval of {name}; "
        text += f"the estimate is {estimate / strength - 1:+.1%} from it."
    if fits[best].explained < 0.5:
        text += (
            " But most of the target is left unexplained: do not interpret any of the strengths."
        )
    print("\n" + textwrap.fill(text, 96))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, estimate, and print the table."""
    parser = argparse.ArgumentParser(description="Estimate what regularized a language model.")
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    sequences = read_sequences(size.sequences, size.context + 1).to(options.device)
    # In float64: steps as small as the last ones are close to rounding in float32.
    model = GPT(size).to(options.device, torch.float64)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = sum(p.numel() for p in model.parameters())
    print(f"{weights:,} weights, {sequences.numel():,} bytes of Python source")
    optimizer, averages = train(model, sequences, size)

    begin = time.perf_counter()
    objective = tacit.Objective.from_batch_loss(
        model, token_losses, (sequences,), batch_size=size.batch
    )
    target = averages.target(objective)  # one pass over the text per recorded epoch
    print(f"target from {size.recorded} epochs: {time.perf_counter() - begin:.0f} s", flush=True)
    # AdamW's penalty with the strength that it applied: half of the decay, on matrices only.
    ((adamw, strength),) = tacit.optimizer_penalties(optimizer, model).items()
    explanations = {
        "AdamW's metric ridge": adamw,
        "ridge": tacit.l2(scope=tacit.matrices),
        "ridge by layer": tacit.layerwise(tacit.l2(scope=tacit.matrices)),
        "distance to initial": tacit.regularizers.distance_to(initial, scope=tacit.matrices),
    }
    fits = {name: tacit.fit(target.equations(r)) for name, r in explanations.items()}
    applied = {"AdamW's metric ridge": strength}
    print_table(fits, applied)
    print_conclusion(fits, applied)
    print(f"\n{time.perf_counter() - start:.0f} s in total")


if __name__ == "__main__":
    main()
