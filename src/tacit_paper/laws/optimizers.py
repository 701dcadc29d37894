"""Laws of steps of finite size, against the gradient flow over the same time."""

from itertools import permutations, product

import torch

from tacit import Fit, Objective, Trajectory, fit, l2, regularizer, rk4, trajectory_equations
from tacit.equations import adam_flow
from tacit.objective.params import Params
from tacit.regularizers import gradient_l1, gradient_norm, gradient_variance
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.loops import in_batches, mean_path, record_steps, step_on_each
from tacit_paper.laws.small_models import (
    against_flow,
    descend,
    draw,
    half_squares,
    linear_model,
    move,
    regression,
)

STEPS = (4e-4, 2e-4, 1e-4)
"""Steps η at which the order of most laws is measured."""


@law(
    "gradient descent",
    {"gradient_norm": "η/4 · ‖∇L‖²"},
    source="Barrett & Dherin 2021",
    parameter="η",
    values=(4e-3, 2e-3, 1e-3),
    order=1,
)
def gradient_descent(step: float, seed: int) -> Recovered:
    """Steps of size η follow the flow of L + η/4 · ‖∇L‖², up to order η²."""
    objective = regression(seed)
    positions = descend(objective.gradient, objective.point(), step, 8)
    path = Trajectory.from_positions(positions, step)
    fitted = against_flow(objective, path, gradient_norm(objective), substeps=1)
    return Recovered(fitted, {"gradient_norm": step / 4})


@law(
    "gradient descent with weight decay η",
    {"l2": "η/2 · ‖θ‖²", "gradient_norm": "η/4 · ‖∇L‖²"},
    source="Barrett & Dherin 2021, beside an explicit ridge",
    parameter="η",
    values=(4e-3, 2e-3, 1e-3),
    order=1,
)
def gradient_descent_with_ridge(step: float, seed: int) -> Recovered:
    """One step of −η(∇L + wθ) leaves the flow of L by (w/2)∇‖θ‖² + (η/4)∇‖∇L‖² + O(η²).

    The decay w is η, so that both penalties are of one size.
    """
    objective = regression(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), lr=step, weight_decay=step)
    path = record_steps(objective, sgd, 8)
    fitted = against_flow(objective, path, l2(), gradient_norm(objective), substeps=1)
    return Recovered(fitted, {"l2": step / 2, "gradient_norm": step / 4})


@law(
    "SGD, shuffled epochs",
    {"gradient_norm": "η/4 · ‖∇L‖²", "gradient_variance": "η/4 · variance of ∇L over batches"},
    source="Smith et al. 2021, mean over all orders of the batches",
    parameter="η",
    values=STEPS,
    order=1,
)
def shuffled_epochs(step: float, seed: int) -> Recovered:
    """An epoch of m batches, averaged over their orders, against the flow over the time mη."""
    whole, batches = in_batches(seed)
    start = whole.point()
    ends = [step_on_each(start, order, step) for order in permutations(batches)]
    path = mean_path(start, ends, step * len(batches))
    fitted = against_flow(whole, path, gradient_norm(whole), gradient_variance(whole), substeps=1)
    return Recovered(fitted, {"gradient_norm": step / 4, "gradient_variance": step / 4})


@law(
    "SGD, batches drawn with replacement",
    {"gradient_norm": "η/4 · ‖∇L‖²", "gradient_variance": "0 · variance of ∇L over batches"},
    source="Smith et al. 2021: E H_b ∇L_c = H ∇L of independent batches b and c",
    parameter="η",
    values=STEPS,
    order=1,
)
def batches_with_replacement(step: float, seed: int) -> Recovered:
    """Three steps, averaged over all sequences of three batches."""
    whole, batches = in_batches(seed)
    start = whole.point()
    ends = [step_on_each(start, sequence, step) for sequence in product(batches, repeat=3)]
    path = mean_path(start, ends, 3 * step)
    fitted = against_flow(whole, path, gradient_norm(whole), gradient_variance(whole), substeps=1)
    return Recovered(fitted, {"gradient_norm": step / 4, "gradient_variance": 0.0}, unit=step / 4)


@law(
    "federated averaging, K = 4 local steps",
    {
        "gradient_norm": "η/4 · ‖∇L‖²",
        "gradient_variance": "−(K−1)η/4 · variance of ∇L over clients",
    },
    source="expansion to order η²: each client drifts along the flow of its own loss",
    parameter="η",
    values=STEPS,
    order=1,
)
def federated_averaging(step: float, seed: int, local: int = 4) -> Recovered:
    """Client c adds (η/4)‖∇L_c‖² to its flow, whose second order is H_c∇L_c in place of H∇L.

    The time is T = Kη: in all T/4 · ‖∇L‖² − (T − η)/4 · mean ‖∇L_c‖².
    """
    whole, clients = in_batches(seed)
    start = whole.point()
    ends = [step_on_each(start, [client] * local, step) for client in clients]
    path = mean_path(start, ends, step * local)
    fitted = against_flow(whole, path, gradient_norm(whole), gradient_variance(whole), substeps=1)
    return Recovered(
        fitted, {"gradient_norm": step / 4, "gradient_variance": -(local - 1) * step / 4}
    )


@law(
    "heavy ball, momentum β = 0.5",
    {"gradient_norm": "η(1+β)/(4(1−β)²) · ‖∇L‖²"},
    source="Ghosh et al. 2023; flow over η/(1−β), after burn-in",
    parameter="η",
    values=STEPS,
    order=1,
)
def heavy_ball(step: float, seed: int, beta: float = 0.5) -> Recovered:
    """The buffer holds gradients of earlier points, on average β/(1−β) steps old."""
    objective = regression(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), lr=step, momentum=beta)
    path = record_steps(objective, sgd, 4, skip=40)
    fitted = against_flow(objective, path, gradient_norm(objective), substeps=1)
    return Recovered(fitted, {"gradient_norm": step * (1 + beta) / (4 * (1 - beta) ** 2)})


@law(
    "Nesterov's momentum as in torch, β = 0.5",
    {"gradient_norm": "η(1−β+2β²)/(4(1−β)²) · ‖∇L‖²"},
    source="Ghosh et al. 2023, with a step of ∇L + β · buffer",
    parameter="η",
    values=STEPS,
    order=1,
)
def nesterov(step: float, seed: int, beta: float = 0.5) -> Recovered:
    """As heavy ball, with the newest gradient counted more."""
    objective = regression(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), lr=step, momentum=beta, nesterov=True)
    path = record_steps(objective, sgd, 4, skip=40)
    fitted = against_flow(objective, path, gradient_norm(objective), substeps=1)
    theory = step * (1 - beta + 2 * beta**2) / (4 * (1 - beta) ** 2)
    return Recovered(fitted, {"gradient_norm": theory})


@law(
    "implicit Euler steps",
    {"gradient_norm": "−η/4 · ‖∇L‖²"},
    source="Barrett & Dherin 2021, with −η for η: the step backwards is an explicit one",
    parameter="η",
    values=(4e-3, 2e-3, 1e-3),
    order=1,
)
def implicit_euler(step: float, seed: int) -> Recovered:
    """θ' = θ − η∇L(θ'), by fixed-point iteration."""
    objective = regression(seed)
    positions = [objective.point()]
    for _ in range(4):
        end = positions[-1]
        for _ in range(12):
            end = move(positions[-1], objective.gradient(end), -step)
        positions.append(end)
    path = Trajectory.from_positions(positions, step)
    fitted = against_flow(objective, path, gradient_norm(objective), substeps=1)
    return Recovered(fitted, {"gradient_norm": -step / 4})


@law(
    "explicit midpoint steps, least squares",
    {"gradient_norm": "0 · ‖∇L‖²"},
    source="a method of second order; what it adds is −η²/12 · ∇LᵀH∇L",
    parameter="η",
    values=(0.04, 0.02, 0.01),
    order=2,
)
def explicit_midpoint(step: float, seed: int) -> Recovered:
    """With the penalty of next order as a second candidate; relative to the η/4 of Euler's."""
    return Recovered(_midpoint(step, seed), {"gradient_norm": 0.0}, unit=step / 4)


@law(
    "explicit midpoint steps, next order",
    {"curvature": "−η²/12 · ∇LᵀH∇L"},
    source="the flow has −η³/6 · H²∇L, the step has not",
    parameter="η",
    values=(0.02, 0.01, 0.005),
    order=1,
)
def next_order_of_midpoint(step: float, seed: int) -> Recovered:
    """The flow has to be known to third order: one of second order has this term itself."""
    return Recovered(_midpoint(step, seed), {"curvature": -(step**2) / 12})


def _midpoint(step: float, seed: int) -> Fit:
    """θ' = θ − η∇L(θ − (η/2)∇L), against the flow."""
    X, y, weight = draw(seed, (40, 6), (40, 1), (1, 6))
    objective = Objective(linear_model(weight), half_squares, (X, y))
    H = X.T @ X / len(X)

    def curvature(params: Params) -> torch.Tensor:
        slope = params["weight"] @ H - (y.T @ X) / len(X)
        return (slope @ H @ slope.T).sum()

    def middle_gradient(point: Params) -> Params:
        return objective.gradient(move(point, objective.gradient(point), -step / 2))

    path = Trajectory.from_positions(descend(middle_gradient, objective.point(), step, 7), step)
    third = regularizer("curvature", curvature)
    return against_flow(objective, path, gradient_norm(objective), third, substeps=2)


@law(
    "Adam, β = (0.5, 0.75), in its own flow",
    {"gradient_l1": "(η/2)(A−B) · Σ|∂L|,  A, B = (1+β)/(1−β)"},
    source="Cattaneo et al. 2024, gradients far above ε",
    parameter="η",
    values=(4e-6, 2e-6, 1e-6),
    order=1,
)
def adam(step: float, seed: int) -> Recovered:
    """Against the flow of −g/√(g² + ε): a reward where β₂ > β₁."""
    objective = regression(seed)
    parameters = objective.model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=step, betas=(0.5, 0.75), eps=1e-16)
    path = record_steps(objective, optimizer, 7, skip=120)
    penalty = gradient_l1(objective, eps=1e-32)
    flow = {"reference": rk4(1), "metric": adam_flow(1e-32)}
    fitted = fit(trajectory_equations(objective, path, penalty, **flow))
    return Recovered(fitted, {"gradient_l1": step / 2 * (3 - 7)})


def _delayed(step: float, seed: int, delay: int) -> Recovered:
    """θ_{t+1} = θ_t − η∇L(θ_{t−τ}), after burn-in."""
    objective = regression(seed)
    positions = [objective.point()]
    for number in range(30):
        late = positions[max(number - delay, 0)]
        positions.append(move(positions[-1], objective.gradient(late), -step))
    path = Trajectory.from_positions(positions[-5:], step)
    fitted = against_flow(objective, path, gradient_norm(objective), substeps=1)
    return Recovered(fitted, {"gradient_norm": step * (1 + 2 * delay) / 4})


_SOURCE_OF_DELAY = "∇L(θ_{t−τ}) = ∇L + τη H∇L, beside the η/4 of the step itself"


@law(
    "gradients one step late",
    {"gradient_norm": "η(1+2τ)/4 · ‖∇L‖²,  τ = 1"},
    source=_SOURCE_OF_DELAY,
    parameter="η",
    values=STEPS,
    order=1,
)
def delay_of_one(step: float, seed: int) -> Recovered:
    """As in a pipeline of two stages."""
    return _delayed(step, seed, 1)


@law(
    "gradients four steps late",
    {"gradient_norm": "η(1+2τ)/4 · ‖∇L‖²,  τ = 4"},
    source=_SOURCE_OF_DELAY,
    parameter="η",
    values=STEPS,
    order=1,
)
def delay_of_four(step: float, seed: int) -> Recovered:
    """As with asynchronous workers."""
    return _delayed(step, seed, 4)


@law(
    "a step size for each layer",
    {"0": "η_l/4 · ‖∇_l L‖²", "2": "η_l/4 · ‖∇_l L‖²"},
    source="Barrett & Dherin 2021, in the metric of the steps",
    parameter="η",
    values=STEPS,
    order=1,
)
def steps_by_layer(step: float, seed: int) -> Recovered:
    """Layers 0 and 2 have steps η and 4η: the metric is 1/η_l, and so is the flow's."""
    objective = regression(seed)
    rates = {"0": step, "2": 4 * step}
    layers = dict(objective.model.named_children())
    groups = [{"params": layers[n].parameters(), "lr": rate} for n, rate in rates.items()]
    path = record_steps(objective, torch.optim.SGD(groups), 6)
    norms = [gradient_norm(objective, of=layer, name=layer) for layer in rates]
    fitted = against_flow(objective, path, *norms, substeps=1)
    return Recovered(fitted, {layer: rate / 4 for layer, rate in rates.items()})


@law(
    "a cosine schedule of step sizes",
    {"gradient_norm": "η_t/4 · ‖∇L‖²"},
    source="Barrett & Dherin 2021, ¼ per unit of time",
    parameter="η",
    values=STEPS,
    order=1,
)
def cosine_schedule(step: float, seed: int) -> Recovered:
    """Every step has its own strength; in units of the step's time it is ¼ for all."""
    objective = regression(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), lr=step)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 10)
    path = record_steps(objective, sgd, 8, after_step=schedule.step)
    penalty, flow = gradient_norm(objective), {"reference": rk4(1), "scaled_by_time": True}
    return Recovered(
        fit(trajectory_equations(objective, path, penalty, **flow)), {"gradient_norm": 1 / 4}
    )
