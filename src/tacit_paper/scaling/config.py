"""Sizes of the models and of the data whose cost is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The size of a decoder."""

    name: str
    layers: int
    width: int
    vocabulary: int = 256
    checkpointed: bool = False
    """Whether activations are computed again in the backward pass, which saves memory."""
    repeats: int = 2
    """How often each computation is timed; its time is the least."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults need a GPU with 100 GiB."""

    sizes: tuple[Size, ...] = (
        Size("0.1 million", 1, 64),
        Size("1 million", 5, 128),
        Size("10 million", 12, 256),
        Size("124 million", 12, 768, 50_257),
        Size("354 million", 24, 1024, 50_257, repeats=1),
        Size("1.3 billion", 24, 2048, 50_257, repeats=1),
    )
    largest: Size | None = Size("7 billion", 34, 4096, 50_257, checkpointed=True, repeats=1)
    """A model that is measured on few batches, in the last of the dtypes."""
    fixed: str = "124 million"
    """The size of the model where the data, the candidates or the computation vary."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Products of float32 matrices are in TF32 on a GPU, as is usual in training."""
    sums: tuple[str, ...] = ("float64", "float32")
    """Precisions in which gradients are added up over batches; `largest` has the last of them."""
    positions: int = 512
    """Tokens of a sequence."""
    sequences: int = 8
    """Sequences of a batch."""
    batches: int = 64
    few: int = 8
    """A second number of batches, from which the part of the time that is fixed is computed."""
    largest_batches: int = 4
    batch_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    candidate_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    draws: int = 8
    """Dropout masks of a difference."""
    dropout: float = 0.1
    repeats: int = 2
    """How often each computation is timed where the data or the candidates vary."""
    gpu: bool = True
    """Whether the models are too large for a CPU."""


PAPER = Config()
QUICK = Config(
    sizes=(Size("0.1 million", 2, 64), Size("0.3 million", 2, 112), Size("1 million", 5, 128)),
    largest=None, fixed="0.1 million", dtypes=("float32",), sums=("float64",), positions=32,
    sequences=8, batches=5, few=1, batch_counts=(1, 2, 5), candidate_counts=(1, 4, 16),
    gpu=False,
)  # fmt: skip
