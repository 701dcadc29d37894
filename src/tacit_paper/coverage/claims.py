"""What the paper proves about the error of estimates, which no figure tests."""

from tacit_paper import Claim

CLAIMS = (
    Claim(
        "With high probability the error of the strengths is of order √(r/p_eff).",
        "App. B, App. C",
        "not tested",
        lambda rows: None,
        "By no figure: the three bounds are in `tacit.bounds`, as their proofs have them, and hold "
        "in simulations; three printed theorems differ from their proofs.",
    ),
)
