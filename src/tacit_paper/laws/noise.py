"""Laws of sharpness-aware steps and of noise on weights and inputs."""

from tacit import techniques
from tacit.regularizers import gradient_norm, hessian_trace
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.small_models import difference, regression


@law(
    "sharpness-aware steps (SAM)",
    {"gradient_norm": "ρ · ‖∇L‖"},
    source="Foret et al. 2021, first order in ρ",
    parameter="ρ",
    values=(4e-3, 2e-3, 1e-3),
    order=1,
)
def sam(radius: float, seed: int) -> Recovered:
    """∇L(θ + ρ∇L/‖∇L‖) = ∇(L + ρ‖∇L‖) + O(ρ²)."""
    objective = regression(seed)
    technique = techniques.sam(objective, radius)
    fit = difference(technique, objective, gradient_norm(objective, power=1))
    return Recovered(fit, {"gradient_norm": radius})


@law(
    "Gaussian noise on weights",
    {"hessian_trace": "σ²/2 · tr H"},
    source="expansion of E L(θ + σz) to order σ²",
    parameter="σ",
    values=(0.02,),
    draws=1024,
)
def weight_noise(sigma: float, seed: int, draws: int) -> Recovered:
    """E L(θ + σz) = L + σ²/2 · tr H + O(σ⁴)."""
    objective = regression(seed)
    technique = techniques.weight_noise(objective, sigma, draws=draws, seed=seed)
    fit = difference(technique, objective, hessian_trace(objective))
    return Recovered(fit, {"hessian_trace": sigma**2 / 2})
