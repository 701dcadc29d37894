"""What is remarkable about a fit without being a reason to doubt it."""

from collections.abc import Iterator

from tacit.fitting.evidence import Evidence
from tacit.fitting.problems import negative_strengths, signs_are_findings

BEYOND = 0.05
"""Part of the weights that may lie beyond the outermost knots of a curve without a finding."""


def findings(e: Evidence) -> Iterator[str]:
    """Sentences: negative strengths that were applied, rows in no equation, knots too narrow."""
    if signs_are_findings(e) and not e.nonnegative:
        for names, numbers in negative_strengths(e):
            yield (
                f"The strength of {names[0]} is negative ({numbers['strengths']:.3g}): what was "
                "applied rewards what this penalty punishes."
            )
    if left_out := sum(block.left_out for block in e.equations.blocks):
        yield (
            f"{left_out:,} of {left_out + e.equations.rows:,} rows lie at a kink of a regularizer "
            "(a zero weight, group or singular value): their condition is an inequality, so they "
            "are in no equation. The other rows carry the estimate."
        )
    yield from _beyond_knots(e)


def _beyond_knots(e: Evidence) -> Iterator[str]:
    for family in e.equations.families:
        if family.shape is None or family.size == 1:
            continue
        counts = [s.counts[family.name] for s in e.equations.sources if family.name in s.counts]
        beyond, every = sum(c[0] + c[-1] for c in counts), sum(map(sum, counts))
        if beyond > BEYOND * every:
            yield (
                f"{beyond:,} of {every:,} {family.shape.of} lie beyond the outermost knots of "
                f"{family.name}, where s′ is taken to be a straight line: its shape there is not "
                "estimated. Pass knots that cover them."
            )
