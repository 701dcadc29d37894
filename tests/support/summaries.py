"""A summary with everything that a format has to escape."""

from tacit.display import Column, Note, Summary, Table
from tacit.errors import Problem

AWKWARD = r"a_b & 50% of $x#1 {\c} ~^<d>|e|*f*`g`[h] \\ [2ex] --- 'i' " + '"j"'
"""What Markdown, LaTeX or HTML would read as something else."""
LETTERS = "−∇L ‖θ̂‖² Σλ_k Λ ⪰ 0 ½ ηᵀ x₁ ⅓ ∫ r̂ é ė 模"

CONTENT = Summary(
    title="tacit: a title & more",
    lead=(f"First {AWKWARD}.", "Second."),
    facts=(("target", LETTERS), ("loss", AWKWARD)),
    tables=(
        Table(
            (Column("name", 11, "left"), Column("value", 12), Column("±kind", 11, optional=True)),
            ((AWKWARD, "-0.5", "1"), ("1. two", "(3e-05)", "–"), (), ("… and 2 more",)),
            (Note("± a note"), Note("95 % intervals: l2 [-1, 2]", is_detail=True)),
        ),
    ),
    numbers=((("explained", "0.5"), ("cosine", "0.7")), (("rank", "1 of 2"),)),
    problems=(Problem("weak", f"message {AWKWARD}", "remedy {"), Problem("noisy", "b", "c")),
    findings=(f"finding {AWKWARD}",),
    no_problems="No problems found.",
)
