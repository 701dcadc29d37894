"""What is remarkable about a fit without being a reason to doubt it."""

from collections.abc import Iterator

from tacit.fitting.evidence import Evidence
from tacit.fitting.problems import negative_strengths, signs_are_findings


def findings(e: Evidence) -> Iterator[str]:
    """Sentences: negative strengths that were applied, and rows that are in no equation."""
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
