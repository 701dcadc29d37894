"""Dense systems as equations, and how many of them a property is checked on."""

import re

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tacit.equations.blocks import Block
from tacit.equations.equations import Equations
from tacit.equations.factors import triangular_factor
from tacit.equations.sources import Family, Source
from tacit.fitting.problems import PROBLEMS

SEEDS = st.integers(0, 10_000)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def source(**changes):
    """A source with plain facts, some of them changed."""
    facts = {
        "mode": "endpoint", "loss": "loss", "examples": 1, "parameters": 1, "tensors": 1,
        "frozen": 0, "tied": 0, "dtype": "float64", "gradient_norm": 1.0, "parameter_norm": 1.0,
    }  # fmt: skip
    return Source(**(facts | changes))


def equations(design, target, *, blocks=1, kinds=None, **changes):
    """Equations of a dense system r0, r1, …, its rows divided among blocks."""
    targets = target if target.ndim == 2 else target[:, None]
    rows = torch.cat([design, targets], dim=1)
    block_list = [
        Block(str(i), tuple(range(design.shape[1])), triangular_factor(part), len(part), 0, 0.0)
        for i, part in enumerate(rows.chunk(blocks))
    ]
    names = tuple(f"r{j}" for j in range(design.shape[1]))
    kinds = kinds or [""] * len(names)
    families = tuple(Family(n, kind, 1) for n, kind in zip(names, kinds, strict=True))
    return Equations(families, names, targets.shape[1], tuple(block_list), (source(**changes),))


def equations_of_parts(parts, count, *, mode="endpoint"):
    """Equations of `count` strengths from parts (layer, source, step, [design | targets]).

    Columns that are zero in a part are left out of its block.
    """
    blocks = []
    for layer, place, step, rows in parts:
        columns = tuple(torch.nonzero(rows[:, :count].norm(dim=0))[:, 0].tolist())
        active = torch.cat([rows[:, list(columns)], rows[:, count:]], dim=1)
        factor = triangular_factor(active)
        blocks.append(Block(layer, columns, factor, len(rows), 0, 0.0, place, step))
    names = tuple(f"r{i}" for i in range(count))
    sources = tuple(source(mode=mode) for _ in range(1 + max(part[1] for part in parts)))
    families = tuple(Family(name, "", 1) for name in names)
    return Equations(families, names, parts[0][3].shape[1] - count, tuple(blocks), sources)


def random_system(seed, rank_loss=0, scales=True):
    """A design of 2 to 6 columns, the last `rank_loss` dependent on the others, and a target."""
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


def draw(seed, *size):
    """Standard normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def problem_rows(fit, name=None):
    """The rows of the table that a fit's problems are of, by the names of their tests, in order."""
    patterns = {
        row.test.__name__.strip("_"): re.sub(r"\\{.*?\\}", ".*", re.escape(row.message))
        for row in PROBLEMS
    }
    return [
        [test for test, pattern in patterns.items() if re.fullmatch(pattern, problem.message)]
        for problem in fit.problems
        if name is None or name in problem.names
    ]


def reports(fit, row, name=None):
    """Whether a fit has a problem of this row of the table, concerning this name."""
    assert any(known.test.__name__.strip("_") == row for known in PROBLEMS), row
    return any(row in rows for rows in problem_rows(fit, name))


def problem_kinds(fit, name=None):
    """The kinds of a fit's problems, in order; with a name only of those that concern it."""
    return [p.kind for p in fit.problems if name is None or name in p.names]


def assert_same_equations(a, b):
    """Compare everything but the origin, numbers exactly."""
    assert (a.families, a.names, a.targets) == (b.families, b.names, b.targets)
    assert a.sources == b.sources
    assert len(a.blocks) == len(b.blocks)
    for one, other in zip(a.blocks, b.blocks, strict=True):
        facts, other_facts = dict(vars(one)), dict(vars(other))
        assert torch.equal(facts.pop("factor"), other_facts.pop("factor"))
        assert facts == other_facts
