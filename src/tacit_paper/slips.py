"""Slips in the paper's text: what is printed, and what its proofs, figures and code establish."""

from typing import NamedTuple


class Slip(NamedTuple):
    """Where the text slips, and how."""

    place: str
    text: str


SLIPS = (
    Slip(
        "Sec. 2.1",
        "Ridge is λ‖θ‖² in the introduction and the figures, and (λ/2)‖θ‖² beside half a sum of "
        "squares in the example. Here it is λ‖θ‖² beside a mean.",
    ),
    Slip("Sec. 2.2, Collinearity of gradients", "∇L = Σ λ_k ∇R_k lacks its minus sign."),
    Slip("Sec. 3, Elastic net", "“Deep ReLU networks”: they have one hidden layer (App. H)."),
    Slip(
        "Sec. 3, Early stopping",
        "η < 1/‖XᵀX‖ lacks n: the formula needs η < n/‖XᵀX‖. As printed, the paper's own η = 0.01 "
        "breaks it.",
    ),
    Slip(
        "Sec. 3, Early stopping",
        "Λ(t) is that of steps on half the mean squared error. On the mean squared error itself, η "
        "becomes 2η.",
    ),
    Slip("Sec. 3, Early stopping", "In αᵀΛα → 0, α is not defined; θ is meant."),
    Slip("App. B, linear theorem", "It divides by κ; the proof gives √κ."),
    Slip(
        "App. B, nonparametric theorem",
        "It bounds norms; the proof bounds squared norms. Its terms with ε lack 1/p.",
    ),
    Slip(
        "App. C, theorem",
        "It bounds the excess of 𝓔̂, with observed targets; the proof bounds that of 𝓔, with their "
        "conditional means.",
    ),
    Slip(
        "App. H, Elastic net",
        "The text trains with SGD, the authors' code with Adam. “ℓ₁ penalty weight set to 1.0”: "
        "the figure has six values.",
    ),
    Slip(
        "App. H, Elastic net",
        "Below β the smoothed ℓ₁ is ridge of strength 1/(2β), not 1/β; with λ₁ it is λ₁/(2β), not "
        "λ₁/β. “Resampling X, β, ε”: the coefficients are θ, and β is the smoothing.",
    ),
    Slip(
        "App. H, Early stopping, panel D",
        "“No minimum improvement threshold”: the published curve needs one of 0.001.",
    ),
    Slip("App. I", "Matrices are recovered from 5 pools here, from 10 in App. H."),
)
"""In the order of the paper."""
