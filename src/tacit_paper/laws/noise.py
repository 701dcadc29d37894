"""Laws of sharpness-aware steps and of noise on weights and inputs."""

from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from tacit import Objective, Regularizer, endpoint_equations, fit, l2, regularizer, techniques
from tacit.objective.params import Params
from tacit.regularizers import (
    gradient_norm,
    hessian_trace,
    input_jacobian,
    input_laplacian,
    mean_of,
)
from tacit_paper.laws.expectations import (
    add_vector,
    expected,
    gaussian,
    masks,
    minimum,
    moved_weights,
    size_of,
    uniform,
)
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.small_models import (
    Examples,
    class_data,
    difference,
    draw,
    half_squares,
    linear_model,
    regression,
    regression_data,
    tanh_network,
)


@law(
    "sharpness-aware steps (SAM)",
    {"gradient_norm": "ρ · ‖∇L‖"},
    source="Foret et al. 2021, first order in ρ",
    parameter="ρ",
    values=(2e-3, 1e-3, 5e-4),
    order=1,
)
def sam(radius: float, seed: int) -> Recovered:
    """∇L(θ + ρ∇L/‖∇L‖) = ∇(L + ρ‖∇L‖) + O(ρ²)."""
    objective = regression(seed)
    technique = techniques.sam(objective, radius)
    fit = difference(technique, objective, gradient_norm(objective, power=1))
    return Recovered(fit, {"gradient_norm": radius})


@law(
    "SAM with steps that are not normalised",
    {"gradient_norm": "ρ/2 · ‖∇L‖²"},
    source="Andriushchenko & Flammarion 2022, first order in ρ",
    parameter="ρ",
    values=(2e-3, 1e-3, 5e-4),
    order=1,
)
def unnormalised_sam(radius: float, seed: int) -> Recovered:
    """∇L(θ + ρ∇L) = ∇(L + ρ/2 · ‖∇L‖²) + O(ρ²)."""
    objective = regression(seed)
    technique = techniques.sam(objective, radius, normalised=False)
    fit = difference(technique, objective, gradient_norm(objective))
    return Recovered(fit, {"gradient_norm": radius / 2})


@law(
    "Gaussian noise on weights",
    {"hessian_trace": "σ²/2 · tr H"},
    source="expansion of E L(θ + σz) to order σ²",
    parameter="σ",
    values=(0.02, 0.01, 0.005),
    order=2,
)
def weight_noise(sigma: float, seed: int) -> Recovered:
    """E L(θ + σz) = L + σ²/2 · tr H + O(σ⁴)."""
    objective = regression(seed)
    noise = gaussian(size_of(objective.model), sigma)
    fit = difference(expected(objective, moved_weights, noise), objective, hessian_trace(objective))
    return Recovered(fit, {"hessian_trace": sigma**2 / 2})


@law(
    "dithered weights",
    {"hessian_trace": "D²/24 · tr H"},
    source="subtractive dither of spacing D: a uniform error of variance D²/12",
    parameter="D",
    values=(0.08, 0.04, 0.02),
    order=2,
)
def dithered_weights(spacing: float, seed: int) -> Recovered:
    """E L(θ + e) = L + D²/24 · tr H + O(D⁴), with e uniform in ±D/2."""
    objective = regression(seed)
    dither = uniform(size_of(objective.model), spacing)
    fit = difference(
        expected(objective, moved_weights, dither), objective, hessian_trace(objective)
    )
    return Recovered(fit, {"hessian_trace": spacing**2 / 24})


@law(
    "noise on weights in proportion to them",
    {"curvature": "s²/2 · Σ_j θ_j² H_jj"},
    source="expansion of E L(θ(1 + sz)) to order s²",
    parameter="s",
    values=(0.08, 0.04, 0.02),
    order=2,
)
def proportional_weight_noise(size: float, seed: int) -> Recovered:
    """E L(θ(1 + sz)) = L + s²/2 · Σ θ_j² H_jj + O(s⁴)."""
    objective = regression(seed)
    (X, y), count = objective.data, size_of(objective.model)

    def curvature(params: Params) -> Tensor:
        """The trace of the Hessian of L(θ(1 + z)) by z, at z = 0."""

        def loss(z: Tensor) -> Tensor:
            return half_squares(functional_call(objective.model, scaled(params, z), (X,)), y)

        return jacrev(jacrev(loss))(torch.zeros(count).double()).trace()

    def with_noise(model: nn.Module, inputs: Tensor, z: Tensor) -> Tensor:
        return functional_call(model, scaled(dict(model.named_parameters()), z), (inputs,))

    technique = expected(objective, with_noise, gaussian(count, size))
    fit = difference(technique, objective, regularizer("curvature", curvature))
    return Recovered(fit, {"curvature": size**2 / 2})


def scaled(point: Params, z: Tensor) -> Params:
    """The point θ(1 + z)."""
    factors = add_vector({n: torch.ones_like(p) for n, p in point.items()}, z)
    return {n: p * factors[n] for n, p in point.items()}


@law(
    "Gaussian noise on the weights of β = u² − v²",
    {"widths": "2σ² · Σ_j (XᵀX/n)_jj (u² + v²)_j"},
    source="Var[(u + σz)² − (v + σz′)²] = 4σ²(u² + v²) + 4σ⁴",
    parameter="σ",
    values=(0.3,),
)
def weight_noise_of_squares(sigma: float, seed: int) -> Recovered:
    """E L(u + σz, v + σz′) = L + 2σ² Σ_j (XᵀX/n)_jj (u² + v²)_j + a constant."""
    X, y = regression_data(seed, inputs=4)
    objective = Objective(DifferenceOfSquares(*draw(seed, (4,), (4,))), half_squares, (X, y))

    def widths(params: Params) -> Tensor:
        return X.square().mean(0) @ (params["u"].square() + params["v"].square())

    technique = expected(objective, moved_weights, gaussian(8, sigma))
    fit = difference(technique, objective, regularizer("widths", widths))
    return Recovered(fit, {"widths": 2 * sigma**2})


class DifferenceOfSquares(nn.Module):
    """A linear model of the weights u² − v²."""

    def __init__(self, u: Tensor, v: Tensor):
        super().__init__()
        self.u, self.v = nn.Parameter(u), nn.Parameter(v)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs x·(u² − v²)."""
        return x @ (self.u.square() - self.v.square())[:, None]


@law(
    "stochastic rounding of linear weights",
    {"rounding": "D²/2 · Σ_j (XᵀX/n)_jj f_j(1 − f_j)"},
    source="spacing D: up with probability f_j, the fraction; variance D² f_j(1 − f_j)",
    parameter="D",
    values=(0.5,),
)
def stochastic_rounding(spacing: float, seed: int) -> Recovered:
    """E L(rounded w) = L + D²/2 · Σ_j (XᵀX/n)_jj f_j(1 − f_j), over all 2^d ways to round."""
    X, y = regression_data(seed, inputs=5)
    objective = Objective(linear_model(draw(seed, (1, 5))[0]), half_squares, (X, y))
    corners = torch.tensor(list(product((0.0, 1.0), repeat=5))).double()

    def rounded(model: nn.Linear, batch: Examples) -> Tensor:
        down = (model.weight / spacing).detach().floor()
        f = model.weight / spacing - down
        chances = (f * corners + (1 - f) * (1 - corners)).prod(1)
        outputs = spacing * (down + corners) @ batch[0].T
        return chances @ (outputs - batch[1].T).square() / 2

    def penalty(params: Params) -> Tensor:
        f = params["weight"] / spacing - (params["weight"] / spacing).detach().floor()
        return X.square().mean(0) @ (f * (1 - f))[0]

    technique = Objective.from_batch_loss(objective.model, rounded, (X, y))
    fit = difference(technique, objective, regularizer("rounding", penalty))
    return Recovered(fit, {"rounding": spacing**2 / 2})


@law(
    "rounding noise on the last hidden layer",
    {"l2": "D²/24 · ‖a‖²"},
    source="½ Var of Σ_k a_k e_k, with e_k uniform in ±D/2",
    parameter="D",
    values=(0.5,),
)
def activation_rounding(spacing: float, seed: int) -> Recovered:
    """E ½(a·(h + e) − y)² = ½(a·h − y)² + D²/24 · ‖a‖²."""
    objective = regression(seed)

    def with_noise(model: nn.Sequential, inputs: Tensor, e: Tensor) -> Tensor:
        return model[-1](model[:-1](inputs) + e)

    technique = expected(objective, with_noise, uniform(5, spacing))
    fit = difference(technique, objective, l2(scope="2.weight"))
    return Recovered(fit, {"l2": spacing**2 / 24})


@law(
    "Gaussian input noise, linear regression",
    {"l2": "σ²/2 · ‖w‖²"},
    source="½ Var of σ w·z (Bishop 1995); the optimum of the expected loss",
    parameter="σ",
    values=(0.5,),
)
def input_noise_of_regression(sigma: float, seed: int) -> Recovered:
    """Trained with noise on its inputs, a linear model ends where L + σ²/2 · ‖w‖² is minimal."""
    X, y = regression_data(seed, inputs=6)
    objective = Objective(linear_model(draw(seed, (1, 6))[0]), half_squares, (X, y))
    noisy = expected(objective, lambda model, x, z: model(x + z), gaussian(6, sigma))
    return Recovered(
        fit(endpoint_equations(objective, l2(), params=minimum(noisy))), {"l2": sigma**2 / 2}
    )


@law(
    "Gaussian input noise, network",
    {
        "input_jacobian": "σ²/2 · mean ‖∇ₓf‖²",
        "input_laplacian": "σ²/2 · mean (f − y)Δₓf",
    },
    source="Bishop 1995, to order σ²",
    parameter="σ",
    values=(0.04, 0.02, 0.01),
    order=2,
)
def input_noise_of_network(sigma: float, seed: int) -> Recovered:
    """E ½(f(x + σz) − y)² = ½(f − y)² + σ²/2 · (‖∇ₓf‖² + (f − y)Δₓf) + O(σ⁴)."""
    objective = Objective(tanh_network(seed, (3, 12, 1)), half_squares, regression_data(seed))
    noisy = expected(objective, lambda model, x, z: model(x + z), gaussian(3, sigma))
    pair = input_jacobian(objective), input_laplacian(objective)
    return Recovered(
        difference(noisy, objective, *pair), dict.fromkeys((p.name for p in pair), sigma**2 / 2)
    )


@law(
    "Gaussian input noise, network of classes",
    {
        "input_jacobian": "σ²/2 · mean tr(∇ₓfᵀ ℓ″ ∇ₓf)",
        "input_laplacian": "σ²/2 · mean ⟨ℓ′, Δₓf⟩",
    },
    source="Bishop 1995 for any loss ℓ(f), here cross-entropy, to order σ²",
    parameter="σ",
    values=(0.04, 0.02, 0.01),
    order=2,
)
def input_noise_of_classes(sigma: float, seed: int) -> Recovered:
    """E ℓ(f(x + σz)) = ℓ + σ²/2 · tr(∂²ℓ/∂x²) + O(σ⁴), by the chain rule in two parts."""
    objective = Objective(tanh_network(seed, (3, 8, 3)), F.cross_entropy, class_data(seed))
    noisy = expected(objective, lambda model, x, z: model(x + z), gaussian(3, sigma))
    pair = input_jacobian(objective), input_laplacian(objective)
    return Recovered(
        difference(noisy, objective, *pair), dict.fromkeys((p.name for p in pair), sigma**2 / 2)
    )


@law(
    "Gaussian input noise, logistic regression",
    {"curvature": "σ²/2 · mean_i A″(x_i·β) · ‖β‖²"},
    source="Wager et al. 2013 (additive noise), to order σ²",
    parameter="σ",
    values=(0.04, 0.02, 0.01),
    order=2,
)
def input_noise_of_logistic(sigma: float, seed: int) -> Recovered:
    """E A((x + σz)·β) = A + σ²/2 · A″‖β‖² + O(σ⁴), with A(z) = log(1 + e^z)."""
    X, y = regression_data(seed, inputs=5)
    model, data = linear_model(draw(seed, (1, 5))[0]), (X, (y > 0).double())
    objective = Objective(model, F.binary_cross_entropy_with_logits, data)

    def curvature(params: Params) -> Tensor:
        chance = (X @ params["weight"].T).sigmoid()
        return (chance * (1 - chance)).mean() * params["weight"].square().sum()

    noisy = expected(objective, lambda model, x, z: model(x + z), gaussian(5, sigma))
    fit = difference(noisy, objective, regularizer("curvature", curvature))
    return Recovered(fit, {"curvature": sigma**2 / 2})


@law(
    "small random rotations of the inputs",
    {
        "slope": "s² · ½ mean (D_t f)²",
        "bend": "s² · ½ mean (f − y)D_t²f",
    },
    source="Simard et al. 1991 (tangent prop), with the term of second derivatives; to order s²",
    parameter="s",
    values=(0.02, 0.01, 0.005),
    order=2,
)
def rotations(angle: float, seed: int) -> Recovered:
    """Angles of standard deviation s: E L = L + s²/2 · mean ((D_t f)² + (f − y)D_t²f) + O(s⁴)."""
    objective = regression(seed)

    def turned(model: nn.Module, inputs: Tensor, angle: Tensor) -> Tensor:
        cos, sin = angle.cos(), angle.sin()
        x, y, z = inputs.T[..., None]
        return model(torch.cat([cos * x - sin * y, sin * x + cos * y, z], 1))

    def terms(model: nn.Module, batch: Examples) -> tuple[Tensor, Tensor]:
        """½(D_t f)² and ½(f − y)D_t²f of every example, by its angle at 0."""
        angles = torch.zeros_like(batch[1], requires_grad=True)
        f = turned(model, batch[0], angles)
        (first,) = torch.autograd.grad(f.sum(), angles, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), angles, create_graph=True)
        return first[:, 0].square() / 2, ((f - batch[1]) * second)[:, 0] / 2

    def penalty(name: str, index: int) -> Regularizer:
        examples = Objective.from_batch_loss(
            objective.model, lambda model, batch: terms(model, batch)[index], objective.data
        )
        return mean_of(examples, name=name)

    technique = expected(objective, turned, gaussian(1, angle))
    fit = difference(technique, objective, penalty("slope", 0), penalty("bend", 1))
    return Recovered(fit, {"slope": angle**2, "bend": angle**2})


@law(
    "augmented data of a model linear in features",
    {"variance": "1 · ½ mean variance of the augmented outputs"},
    source="Dao et al. 2019; plain is the loss at the mean augmented features",
    parameter="s",
    values=(0.5,),
)
def augmented_features(size: float, seed: int) -> Recovered:
    """E ½(w·φ(x + e) − y)² = ½(w·Eφ − y)² + ½ Var w·φ(x + e), with e = ±s in every input.

    An identity: the trap is the plain loss, which is not that at the features of x itself.
    """
    X, y = regression_data(seed)
    moves = size * torch.tensor(list(product((-1.0, 1.0), repeat=3))).double()
    features = quadratic_features(X + moves[:, None])
    model = linear_model(draw(seed, (1, 9))[0])

    def variance(params: Params) -> Tensor:
        return (features @ params["weight"].T).var(0, correction=0).mean() / 2

    augmented = Objective(model, half_squares, (features.flatten(0, 1), y.repeat(len(moves), 1)))
    plain = Objective(model, half_squares, (features.mean(0), y))
    return Recovered(
        difference(augmented, plain, regularizer("variance", variance)), {"variance": 1.0}
    )


def quadratic_features(x: Tensor) -> Tensor:
    """The inputs, their squares, and their products with the next."""
    return torch.cat([x, x.square(), x * x.roll(1, -1)], -1)


@law(
    "stochastic depth of the last residual block",
    {"contribution": "q/(1−q) · ½ mean (what the block adds to f)²"},
    source="½ Var of the block's part of f, which is kept with probability 1 − q",
    parameter="q",
    values=(0.2,),
)
def stochastic_depth(q: float, seed: int) -> Recovered:
    """The block's part b of f times m/(1 − q): E ½(f − y)² = ½(f − y)² + q/(1−q) · ½b²."""
    model = ResidualNetwork(seed)
    objective = Objective(model, half_squares, regression_data(seed))

    def contributions(model: nn.Module, batch: Examples) -> Tensor:
        difference = model(batch[0]) - model(batch[0], block=0)
        return difference[:, 0].square() / 2

    examples = Objective.from_batch_loss(model, contributions, objective.data)
    technique = expected(objective, lambda model, x, mask: model(x, block=mask), masks(1, q))
    fit = difference(technique, objective, mean_of(examples, name="contribution"))
    return Recovered(fit, {"contribution": q / (1 - q)})


class ResidualNetwork(nn.Module):
    """A layer, a residual block, and a linear output."""

    def __init__(self, seed: int):
        super().__init__()
        self.first, self.block = tanh_network(seed, (3, 4)), tanh_network(seed + 1, (4, 5, 4))
        self.last = tanh_network(seed + 2, (4, 1))

    def forward(self, x: Tensor, block: Tensor | float = 1.0) -> Tensor:
        """The outputs, with this factor of what the block adds."""
        h = self.first(x).tanh()
        return self.last(h + block * self.block(h))


@law(
    "mixup of a linear regression, λ uniform",
    {"loss": "−1/3 · L", "offset": "1/3 · ½(mean residual)²"},
    source="residuals are mixed as the examples: E λ² + (1−λ)² = 2/3, E 2λ(1−λ) = 1/3",
    parameter="α",
    values=(1.0,),
    draws=1024,
)
def mixup(alpha: float, seed: int, draws: int) -> Recovered:
    """E ½(λr_i + (1−λ)r_j)² = ⅔ L + ⅓ · ½(mean r)²."""
    X, y = regression_data(seed, inputs=6)
    objective = Objective(tanh_network(seed, (6, 1)), half_squares, (X, y + 1))

    def residuals(params: Params) -> Tensor:
        return functional_call(objective.model, params, (X,)) - y - 1

    fit = difference(
        techniques.mixup(objective, alpha, draws=draws, seed=seed),
        objective,
        regularizer("loss", lambda params: residuals(params).square().mean() / 2),
        regularizer("offset", lambda params: residuals(params).mean().square() / 2),
    )
    return Recovered(fit, {"loss": -1 / 3, "offset": 1 / 3})
