"""Laws of where training ends: decay, early stopping, averaging, other parameters of a model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tacit import (
    Fit,
    Objective,
    Trajectory,
    average_epochs,
    estimate,
    fit,
    l1,
    l2,
    regularizer,
    rk4,
    theory,
)
from tacit.equations import accumulated_target
from tacit.objective.params import Params
from tacit.regularizers import (
    distance_to,
    group_l2,
    hypentropy,
    nuclear_norm,
    optimizer_penalties,
    power,
    schatten,
    spectral_norm,
)
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.least_squares import (
    ENTRIES,
    decayed_product,
    descend_from_zero,
    entrywise,
    error_matrices,
    fit_targets,
    linear_data,
    low_rank_data,
    matrix_product,
    penalty_matrix,
    proximal_descent,
    recover_matrix,
    sparse_data,
)
from tacit_paper.laws.small_models import (
    Examples,
    draw,
    half_squares,
    linear_model,
    regression_data,
    tanh_network,
    train,
)
from tacit_paper.minimising import minimise

# Decay, and distances to where training started.


def _train(
    model: nn.Module, data: Examples, optimizer: torch.optim.Optimizer, steps: int
) -> Objective:
    """Train on the whole data; the loss at the end."""
    for _ in train(model, data, optimizer, steps):
        pass
    return Objective(model, half_squares, data)


@law(
    "weight decay w in SGD",
    {"l2": "w/2 · ‖θ‖²"},
    source="steps along ∇L + wθ",
    parameter="w",
    values=(0.1,),
)
def weight_decay(decay: float, seed: int) -> Recovered:
    """Training rests where ∇L + wθ = 0."""
    model = tanh_network(seed, (6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=decay)
    objective = _train(model, linear_data(seed, 6, 1), optimizer, 500)
    return Recovered(estimate(objective, l2()), {"l2": decay / 2})


@law(
    "weight decay w in SGD with momentum",
    {"l2": "w/2 · ‖θ‖²"},
    source="steps along a mean of ∇L + wθ",
    parameter="w",
    values=(0.05,),
)
def weight_decay_with_momentum(decay: float, seed: int) -> Recovered:
    """Training with momentum rests where ∇L + wθ = 0, too."""
    model = tanh_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=decay)
    objective = _train(model, regression_data(seed), optimizer, 1000)
    return Recovered(estimate(objective, l2()), {"l2": decay / 2})


@law(
    "decay towards the start (L2-SP)",
    {"distance_to": "w/2 · ‖θ − θ₀‖²"},
    source="Li, Grandvalet & Davoine 2018",
    parameter="w",
    values=(0.1,),
)
def decay_towards_start(decay: float, seed: int) -> Recovered:
    """Training rests where ∇L + w(θ − θ₀) = 0."""
    model, (X, y) = tanh_network(seed), regression_data(seed)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}

    def penalised() -> Tensor:
        moved = [(p - start[n]).square().sum() for n, p in model.named_parameters()]
        return half_squares(model(X), y) + decay / 2 * torch.stack(moved).sum()

    minimise(penalised, model.parameters())
    objective = Objective(model, half_squares, (X, y))
    return Recovered(estimate(objective, distance_to(start)), {"distance_to": decay / 2})


@law(
    "AdamW on the whole data, decay w",
    {"barrier": "ε · −Σ[|θ| + ln(1 − w|θ|)/w]"},
    source="at rest √v̂ = |g|, and g/(|g| + ε) + wθ = 0",
    parameter="ε",
    values=(0.1,),
)
def adamw_at_rest(eps: float, seed: int) -> Recovered:
    """Without noise training rests where −g = ε·wθ/(1 − w|θ|), entry by entry."""
    decay, model = 0.4, linear_model(torch.zeros(1, 6, dtype=torch.float64))
    options = {"betas": (0.9, 0.99), "weight_decay": decay}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=eps, **options)

    def barrier(params: Params) -> Tensor:
        size = params["weight"].abs()
        return -(size + (1 - decay * size).log() / decay).sum()

    objective = _train(model, linear_data(seed, 6, 1), optimizer, 3000)
    return Recovered(estimate(objective, regularizer("barrier", barrier)), {"barrier": eps})


def _average_epochs(
    make: Callable[..., torch.optim.Optimizer], decay: float, seed: int, epochs: int
) -> Fit:
    """The fit of an optimizer's decay to averages over epochs of batches."""
    X, y = regression_data(seed, examples=128, inputs=6)
    model = tanh_network(seed, (6, 1))
    minimise(lambda: half_squares(model(X), y), model.parameters())
    optimizer = make(model.parameters(), lr=1e-3, weight_decay=decay)
    averages = average_epochs(model, optimizer, epochs=epochs)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(100 + epochs):
        for rows in torch.randperm(128, generator=generator).split(16):
            next(train(model, (X[rows], y[rows]), optimizer, 1))
        averages.end_epoch()
    (penalty,) = optimizer_penalties(optimizer, model)
    return fit(averages.equations(Objective(model, half_squares, (X, y)), penalty))


@law(
    "weight decay w, epochs far from rest",
    {"l2": "w/2 · ‖θ‖²"},
    source="in the mean of an epoch, ∇L + wθ = −Δθ/time, where ∇L is linear",
    parameter="w",
    values=(0.1,),
)
def decay_far_from_rest(decay: float, seed: int) -> Recovered:
    """What the weights still moved is part of the equations, at their mean over the epoch."""
    model, data = tanh_network(seed, (6, 1)), linear_data(seed, 6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=decay)
    averages = average_epochs(model, optimizer, epochs=3)
    for _ in range(3):
        _train(model, data, optimizer, 5)
        averages.end_epoch()
    objective = Objective(model, half_squares, data)
    return Recovered(fit(averages.equations(objective, l2())), {"l2": decay / 2})


@law(
    "AdamW on batches, decay w",
    {"weight_decay": "w/2 · Σ(√v̂ + ε)θ²"},
    source="steps along M⁻¹∇L + wθ with M = √v̂ + ε",
    parameter="w",
    values=(0.3,),
    draws=24,
    bars="training",
)
def adamw_on_batches(decay: float, seed: int, epochs: int) -> Recovered:
    """On the mean of an epoch, ∇L + w(√v̂ + ε)θ + MΔθ/time = 0."""
    return Recovered(
        _average_epochs(torch.optim.AdamW, decay, seed, epochs), {"weight_decay": decay / 2}
    )


@law(
    "weight decay w in Adam, on batches",
    {"weight_decay": "w/2 · ‖θ‖²"},
    source="added to the gradient before it is rescaled",
    parameter="w",
    values=(0.3,),
    draws=24,
    bars="training",
)
def coupled_decay_in_adam(decay: float, seed: int, epochs: int) -> Recovered:
    """On the mean of an epoch, ∇L + wθ + MΔθ/time = 0 with M = √v̂ + ε."""
    return Recovered(
        _average_epochs(torch.optim.Adam, decay, seed, epochs), {"weight_decay": decay / 2}
    )


# Linear regression from zero, stopped early: see least_squares.py.


STEP = 0.1
QUADRATIC = dict.fromkeys(ENTRIES.values(), "½θᵀQθ, Q = S P(1 − P)⁻¹")


@law(
    "gradient descent stopped after t steps",
    dict.fromkeys(ENTRIES.values(), "½θᵀQθ, Q = S((1 − ηS)^−t − 1)⁻¹"),
    source="t steps in closed form; Ali, Kolter & Tibshirani 2019 for the flow",
    parameter="t",
    values=(12,),
)
def early_stopping(steps: int, seed: int) -> Recovered:
    """The t-th iterate is the minimum of the loss with a quadratic penalty, for every target."""
    data = linear_data(seed)
    *_, model = descend_from_zero(data, steps, lr=STEP)
    return recover_matrix(data, model.weight, theory.early_stopping(data[0], STEP, steps))


@law(
    "gradient flow stopped after time τ",
    dict.fromkeys(ENTRIES.values(), "½θᵀQθ, Q = S(exp(τS) − 1)⁻¹"),
    source="Ali, Kolter & Tibshirani 2019",
    parameter="τ",
    values=(1.0,),
)
def early_stopping_of_flow(time: float, seed: int) -> Recovered:
    """As of gradient descent, in the limit of small steps."""
    data = linear_data(seed)
    model = linear_model(torch.zeros(12, 3, dtype=torch.float64))
    objective = Objective(model, half_squares, data)
    moved = rk4(100)(objective, objective.point(), time, 0)["weight"]
    return recover_matrix(data, moved, theory.early_stopping_flow(data[0], time))


@law(
    "gradient flow stopped after a short time τ",
    {"l2": "1/(2τ) · ‖θ‖²"},
    source="Q = S(exp(τS) − 1)⁻¹ = 1/τ − S/2 + O(τ)",
    parameter="τ",
    values=(0.02, 0.01, 0.005),
    order=1,
)
def short_training(time: float, seed: int) -> Recovered:
    """Early stopping is ridge only where it stops very early: then at strength 1/(2τ)."""
    data = linear_data(seed)
    model = linear_model(torch.zeros(12, 3, dtype=torch.float64))
    objective = Objective(model, half_squares, data)
    moved = rk4(4)(objective, objective.point(), time, 0)["weight"]
    return Recovered(fit_targets(data, moved, l2()), {"l2": 1 / (2 * time)})


@law(
    "implicit steps stopped after t",
    QUADRATIC,
    source="P = (1 + ηS)^−t: iterated ridge regression",
    parameter="t",
    values=(6,),
)
def early_stopping_of_implicit_steps(steps: int, seed: int) -> Recovered:
    """θ ← θ − η∇L at the next θ."""
    X, y = data = linear_data(seed)
    implicit, theta = torch.eye(3).double() + STEP * X.T @ X / 40, torch.zeros(3, 12).double()
    for _ in range(steps):
        theta = torch.linalg.solve(implicit, theta + STEP * X.T @ y / 40)
    P = torch.linalg.matrix_power(torch.linalg.inv(implicit), steps)
    return recover_matrix(data, theta.T, penalty_matrix(X, P))


@law(
    "momentum stopped after t steps",
    {"Q": "1 · ½θᵀQθ, Q = S P(1 − P)⁻¹"},
    source="P by recursion; negative where the iterates have passed the optimum",
    parameter="t",
    values=(12,),
)
def early_stopping_of_momentum(steps: int, seed: int) -> Recovered:
    """With momentum Q is indefinite, and is the penalty all the same: its coefficient is 1."""
    data, options = linear_data(seed), {"lr": STEP, "momentum": 0.7}
    *_, model = descend_from_zero(data, steps, **options)
    *_, P = error_matrices(data[0], steps, **options)
    Q = penalty_matrix(data[0], P)
    penalty = regularizer("Q", lambda params: (params["weight"] @ Q @ params["weight"].T).sum() / 2)
    return Recovered(fit_targets(data, model.weight, penalty), {"Q": 1.0})


def _averaged(
    seed: int, steps: int, averaging: Callable[..., None] | None = None
) -> tuple[Examples, Tensor]:
    """Averages of the weights over the steps of gradient descent, by default their mean."""
    data, start = linear_data(seed), torch.zeros(12, 3, dtype=torch.float64)
    average = AveragedModel(
        linear_model(start), multi_avg_fn=averaging
    )  # overwritten by the first iterate
    for model in descend_from_zero(data, steps, lr=STEP):
        average.update_parameters(model)
    (weights,) = average.module.parameters()
    return data, weights.detach()


@law(
    "mean of the first t iterates (SWA)",
    QUADRATIC,
    source="P is the mean of (1 − ηS)^k over k = 1…t",
    parameter="t",
    values=(24,),
)
def uniform_averaging(steps: int, seed: int) -> Recovered:
    """The average of iterates has the average of their error polynomials."""
    data, weights = _averaged(seed, steps)
    P = torch.stack(list(error_matrices(data[0], steps, STEP))).mean(0)
    return recover_matrix(data, weights, penalty_matrix(data[0], P))


@law(
    "exponential average of t iterates (EMA)",
    QUADRATIC,
    source="P is the exponential average of (1 − ηS)^k over k = 1…t",
    parameter="t",
    values=(24,),
)
def exponential_averaging(steps: int, seed: int) -> Recovered:
    """As for the mean of iterates, with the weights of the exponential average."""
    data, weights = _averaged(seed, steps, get_ema_multi_avg_fn(0.9))
    P, *others = error_matrices(data[0], steps, STEP)
    for other in others:
        P = 0.9 * P + 0.1 * other
    return recover_matrix(data, weights, penalty_matrix(data[0], P))


@law(
    "geometric average of iterates, ratio a",
    {"l2": "(1 − a)/(2aη) · ‖θ‖²"},
    source="Neu & Rosasco 2018",
    parameter="a",
    values=(0.9,),
)
def geometric_averaging(ratio: float, seed: int) -> Recovered:
    """The average Σ_k (1 − a)a^k θ_k of all iterates is ridge regression."""
    data, weights = linear_data(seed), torch.zeros(12, 3, dtype=torch.float64)
    for k, model in enumerate(descend_from_zero(data, 300, lr=STEP), start=1):
        weights += (1 - ratio) * ratio**k * model.weight.detach()
    fit = fit_targets(data, weights, l2())
    return Recovered(fit, {"l2": (1 - ratio) / (2 * ratio * STEP)})


# Decay of factors as a penalty of their product.


@law(
    "θ = u ⊙ v with weight decay μ",
    {"l1": "μ · ‖θ‖₁"},
    source="min of (u² + v²)/2 at uv = θ is |θ|",
    parameter="μ",
    values=(0.1,),
)
def decay_of_two_factors(decay: float, seed: int) -> Recovered:
    """Decay of the factors is the lasso of their product, where that is not zero."""
    factors = [1 + 0.1 * f for f in draw(seed + 1000, (1, 24), (1, 24))]
    objective = decayed_product(sparse_data(seed), factors, entrywise, decay)
    return Recovered(estimate(objective, l1(zero_width=1e-6)), {"l1": decay})


@law(
    "θ = u ⊙ v ⊙ w with weight decay μ",
    {"power": "3μ/2 · Σ|θ|^⅔"},
    source="min of (u² + v² + w²)/2 at uvw = θ is 3/2 · |θ|^⅔",
    parameter="μ",
    values=(0.05,),
)
def decay_of_three_factors(decay: float, seed: int) -> Recovered:
    """With three factors it is a bridge penalty of their product."""
    factors = [1 + 0.1 * f for f in draw(seed + 1000, (1, 24), (1, 24), (1, 24))]
    objective = decayed_product(sparse_data(seed), factors, entrywise, decay)
    return Recovered(estimate(objective, power(2 / 3, zero_width=1e-6)), {"power": 1.5 * decay})


@law(
    "W = UVᵀ with weight decay μ",
    {"nuclear_norm": "μ · Σσ_k"},
    source="Srebro, Rennie & Jaakkola 2004",
    parameter="μ",
    values=(0.5,),
)
def decay_of_a_matrix_product(decay: float, seed: int) -> Recovered:
    """Decay of the factors is the nuclear norm of their product."""
    factors = [0.7 * f for f in draw(seed + 1000, (5, 4), (4, 7))]
    objective = decayed_product(low_rank_data(seed), factors, matrix_product, decay)
    return Recovered(estimate(objective, nuclear_norm(zero_width=1e-6)), {"nuclear_norm": decay})


@law(
    "W of three factors with weight decay μ",
    {"schatten": "3μ/2 · Σσ_k^⅔"},
    source="Shang et al. 2016: the Schatten quasi-norm",
    parameter="μ",
    values=(0.5,),
)
def decay_of_a_deep_product(decay: float, seed: int) -> Recovered:
    """With three factors it is a Schatten quasi-norm of their product."""
    factors = [0.7 * f for f in draw(seed + 1000, (5, 4), (4, 4), (4, 7))]
    objective = decayed_product(low_rank_data(seed), factors, matrix_product, decay)
    fit = estimate(objective, schatten(2 / 3, zero_width=1e-6))
    return Recovered(fit, {"schatten": 1.5 * decay})


@law(
    "θ = u² − v² from u = v = α",
    {"hypentropy": "¼ · α²Σq(θ/α²)"},
    source="Woodworth et al. 2020",
    parameter="η",
    values=(8e-3, 4e-3, 2e-3),
    order=1,
)
def diagonal_network(step: float, seed: int) -> Recovered:
    """Gradient flow of u and v adds up to the hyperbolic entropy of θ."""
    alpha, (X, y) = 0.3, linear_data(seed, 6, 1)
    u = v = torch.full((1, 6), alpha, dtype=torch.float64)
    positions = [{"weight": u * u - v * v}]
    for _ in range(round(1 / step)):
        gradient = (X @ positions[-1]["weight"].T - y).T @ X / len(X)
        u, v = u - 2 * step * u * gradient, v + 2 * step * v * gradient
        positions.append({"weight": u * u - v * v})
    objective = Objective(linear_model(u), half_squares, (X, y))
    target = accumulated_target(objective, Trajectory.from_positions(positions, step))
    return Recovered(estimate(target, hypentropy(alpha**2)), {"hypentropy": 0.25})


# Proximal steps.


@law(
    "soft thresholding and decay (ISTA)",
    {"l1": "a · ‖θ‖₁", "l2": "w/2 · ‖θ‖²"},
    source="Daubechies, Defrise & De Mol 2004; elastic net of Zou & Hastie 2005",
    parameter="a",
    values=(0.2,),
)
def soft_thresholding(threshold: float, seed: int) -> Recovered:
    """Steps by ηa towards zero, and decay by ηw: the elastic net."""
    step, decay = 0.3, 0.3

    def proximal(weight: Tensor) -> Tensor:
        return nn.functional.softshrink(weight, step * threshold) / (1 + step * decay)

    objective = proximal_descent(sparse_data(seed), proximal, step)
    return Recovered(estimate(objective, [l1(), l2()]), {"l1": threshold, "l2": decay / 2})


@law(
    "thresholding of rows",
    {"group_l2": "a · Σ‖row of W‖"},
    source="Yuan & Lin 2006: the group lasso",
    parameter="a",
    values=(1.5,),
)
def row_thresholding(threshold: float, seed: int) -> Recovered:
    """Steps that shorten every row by ηa."""

    def proximal(weight: Tensor) -> Tensor:
        return weight * (1 - 0.3 * threshold / weight.norm(dim=1, keepdim=True)).clamp_min(0)

    objective = proximal_descent(linear_data(seed, 4, 8), proximal)
    return Recovered(estimate(objective, group_l2()), {"group_l2": threshold})


@law(
    "steps that cut the largest singular values",
    {"spectral_norm": "a · σ₁(W)"},
    source="proximal steps of the largest singular value; several become equal",
    parameter="a",
    values=(3.0,),
)
def cut_singular_values(strength: float, seed: int) -> Recovered:
    """The minimiser of ½‖Z − W‖² + ηaσ₁(Z) has its largest singular values cut to one level."""

    def proximal(weight: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        levels = (s.cumsum(0) - 0.3 * strength) / torch.arange(1, len(s) + 1)
        return u * s.clamp(max=levels.max().clamp_min(0)) @ vh

    objective = proximal_descent(linear_data(seed, 5, 4), proximal)
    return Recovered(estimate(objective, spectral_norm()), {"spectral_norm": strength})
