"""Dense systems as equations, and how many of them a property is tried on."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tacit.equations.equations import Block, Equations, Family, Source, triangular_factor

SEEDS = st.integers(0, 10_000)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def source(**changes):
    plain = {
        "mode": "endpoint", "loss": "loss", "examples": 1, "parameters": 1, "tensors": 1,
        "frozen": 0, "tied": 0, "dtype": "float64", "gradient_norm": 1.0, "parameter_norm": 1.0,
    }  # fmt: skip
    return Source(**(plain | changes))


def equations(design, target, *, blocks=1, kinds=None, **changes):
    """Equations of a dense system, its rows spread over blocks."""
    targets = target if target.ndim == 2 else target[:, None]
    rows = torch.cat([design, targets], dim=1)
    parts = [
        Block(str(i), tuple(range(design.shape[1])), triangular_factor(part), len(part), 0, 0.0)
        for i, part in enumerate(rows.chunk(blocks))
    ]
    names = tuple(f"r{j}" for j in range(design.shape[1]))
    kinds = kinds or [""] * len(names)
    families = tuple(Family(n, kind, 1) for n, kind in zip(names, kinds, strict=True))
    return Equations(families, names, targets.shape[1], tuple(parts), (source(**changes),))


def random_system(seed, rank_loss=0, scales=True):
    generator = torch.Generator().manual_seed(seed)
    k = int(torch.randint(2, 7, (), generator=generator))
    p = int(torch.randint(k, 60, (), generator=generator))
    design = torch.randn(p, k, generator=generator, dtype=torch.float64)
    for j in range(max(1, k - rank_loss), k):
        mix = torch.randn(j, generator=generator, dtype=torch.float64)
        design[:, j] = design[:, :j] @ mix
    if scales:
        design = design * 10 ** torch.empty(k, dtype=torch.float64).uniform_(
            -3, 3, generator=generator
        )
    return design, torch.randn(p, generator=generator, dtype=torch.float64)


def values(fit):
    return torch.tensor(list(fit.strengths.values()), dtype=torch.float64)


def draw(seed, *size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)
