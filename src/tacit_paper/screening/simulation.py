"""Equations with correlated candidates of which none acts, and how often each method picks one.

Every layer has a response of its own to the candidates, of mean zero, and noise: what one layer is
explained by says nothing of another. So it is where other causes act that nobody listed.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tacit import screen
from tacit.equations.blocks import Block
from tacit.equations.equations import Equations
from tacit.equations.factors import triangular_factor
from tacit.equations.sources import Family, Source
from tacit.identifiability import Screen, compare

LAYERS, ROWS, CANDIDATES = 12, 60, 8
CORRELATION = 0.5
"""Of any two candidates."""
OWN = 0.3
"""Size of each layer's own responses, beside noise of size 1."""


def simulate(seed: int) -> Equations:
    """Equations of correlated candidates without a common strength."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common, own = normal(LAYERS, ROWS, 1), normal(LAYERS, ROWS, CANDIDATES)
    design = CORRELATION**0.5 * common + (1 - CORRELATION) ** 0.5 * own
    responses = OWN * normal(LAYERS, CANDIDATES, 1)
    rows = torch.cat([design, design @ responses + normal(LAYERS, ROWS, 1)], dim=2)
    names = tuple(f"candidate {i}" for i in range(CANDIDATES))
    blocks = [
        Block(f"layer {i}", tuple(range(CANDIDATES)), triangular_factor(part), ROWS, 0, 0.0)
        for i, part in enumerate(rows)
    ]
    source = Source(
        mode="endpoint", loss="simulated", examples=1, parameters=LAYERS * ROWS, tensors=LAYERS,
        frozen=0, tied=0, dtype="float64", gradient_norm=1.0, parameter_norm=1.0,
    )  # fmt: skip
    families = tuple(Family(name, "", 1) for name in names)
    return Equations(families, names, 1, tuple(blocks), (source,))


def by_criterion(equations: Equations, penalty: float) -> bool:
    """Whether forward selection by n·log(residual) + penalty·k picks a candidate.

    AIC has penalty 2 and BIC log n; both count every parameter as an observation.
    """
    factor, count = equations.factor(), len(equations.names)
    target, rows = factor[:, -1:], equations.rows
    best = math.inf
    for column in range(count):
        part = factor[:, [column]]
        rest = target - part @ torch.linalg.lstsq(part, target).solution
        best = min(best, rows * math.log(float(rest.square().sum())) + penalty)
    return best < rows * math.log(float(target.square().sum()))


def by_held_out(equations: Equations) -> bool:
    """Whether some candidate explains more than nothing of layers that it was not fitted to."""
    scores = compare(equations, {name: [name] for name in equations.names}).explained
    return max(scores.values()) > 0


def by_screen(equations: Equations) -> bool:
    """Whether a screen confirms a group."""
    result: Screen = screen(equations)
    return any(group.p <= 0.05 for group in result.groups)


METHODS: dict[str, Callable[[Equations], bool]] = {
    "AIC over parameters": lambda e: by_criterion(e, 2.0),
    "BIC over parameters": lambda e: by_criterion(e, math.log(e.rows)),
    "best on held-out layers": by_held_out,
    "screen": by_screen,
}
"""Whether a method picks any candidate, by name."""
