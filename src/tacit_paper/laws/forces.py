"""Laws of what acts beside the loss gradient in every step: clipping, weight decay, noise."""

import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from tacit import (
    Objective,
    Trajectory,
    endpoint_equations,
    estimate,
    fit,
    l2,
    regularizer,
    stack,
    trajectory_equations,
)
from tacit.objective.params import Params
from tacit.regularizers import activation_norm, metric_ridge
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.loops import loss_of, train
from tacit_paper.laws.small_models import (
    draw,
    half_squares,
    linear_model,
    regression,
    regression_data,
    tanh_network,
)


@law(
    "gradient clipped at the norm c",
    {"loss": "−(1 − c/‖∇L‖) · L"},
    source="a clipped step is −ηc ∇L/‖∇L‖",
    parameter="c",
    values=(0.05,),
)
def clipping(largest: float, seed: int) -> Recovered:
    """One step, beside an explicit step of ∇L: a part of the loss itself is taken away.

    The part changes from step to step: a fit of many steps says that their gradients are clipped.
    """
    objective = regression(seed)
    parameters = list(objective.model.parameters())
    size = torch.cat([g.flatten() for g in objective.gradient().values()]).norm()
    sgd = torch.optim.SGD(parameters, lr=0.01)
    path = train(
        objective, sgd, 1, before_step=lambda: nn.utils.clip_grad_norm_(parameters, largest)
    )
    loss = regularizer("loss", lambda params: loss_at(objective, params))
    found = fit(trajectory_equations(objective, path, loss))
    return Recovered(found, {"loss": -float(1 - largest / size)})


def loss_at(objective: Objective, params: Params) -> Tensor:
    """½(f − y)² over all examples of an objective, with these parameters."""
    inputs, target = objective.data
    return half_squares(functional_call(objective.model, params, inputs), target)


@law(
    "weight decay w of SGD with momentum",
    {"l2": "w/2 · ‖θ‖²"},
    source="∇(w/2 · ‖θ‖²) = wθ is added to every gradient",
    parameter="w",
    values=(0.01,),
)
def decay_with_momentum(decay: float, seed: int) -> Recovered:
    """What momentum carries over from earlier steps is recorded, and left out."""
    objective = regression(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), 0.01, momentum=0.9, weight_decay=decay)
    found = fit(trajectory_equations(objective, train(objective, sgd, 12), l2()))
    return Recovered(found, {"l2": decay / 2})


@law(
    "AdamW's decay w, in the metric of its steps",
    {"metric_ridge": "w/2 · Σ(√v̂ + ε)θ²"},
    source="a step of AdamW is −η(∇L/(√v̂ + ε) + wθ), momentum left out",
    parameter="w",
    values=(0.1,),
)
def adamw(decay: float, seed: int) -> Recovered:
    """The metric of every step is recorded with it."""
    objective = regression(seed)
    optimizer = torch.optim.AdamW(objective.model.parameters(), lr=1e-3, weight_decay=decay)
    path = train(objective, optimizer, 12)
    ridge = metric_ridge(optimizer, objective.model)
    return Recovered(fit(trajectory_equations(objective, path, ridge)), {"metric_ridge": decay / 2})


class UnitLength(nn.Module):
    """Linear outputs of a weight that is scaled to unit length: the loss ignores its length."""

    def __init__(self, seed: int):
        super().__init__()
        self.weight = nn.Parameter(*draw(seed + 1000, (3, 5)))

    def forward(self, inputs: Tensor) -> Tensor:
        """(W/‖W‖) x."""
        return inputs @ (self.weight / self.weight.norm()).T


def scale_invariant(seed: int) -> Objective:
    """The squared loss of three such outputs on noisy linear data."""
    X, truth, noise = draw(seed, (40, 5), (5, 3), (40, 3))
    return Objective(UnitLength(seed), half_squares, (X, X @ truth + noise))


@law(
    "weight decay of scale-invariant weights: endpoint",
    {"l2": "0 · ‖θ‖²", "outputs": "μ · mean Σ√(1 + f²)"},
    source="⟨θ, ∇L⟩ = 0 for all θ, whatever decay was applied",
    parameter="μ",
    values=(0.1,),
)
def scale_invariant_endpoint(strength: float, seed: int, decay: float = 2e-3) -> Recovered:
    """Trained with decay, and with a penalty of the outputs that does show at the endpoint."""
    objective = scale_invariant(seed)
    model, (inputs, _) = objective.model, objective.data
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=decay)

    def size(params: Params) -> Tensor:
        return (1 + functional_call(model, params, inputs).square()).sqrt().sum(1).mean()

    for _ in range(500):
        sgd.zero_grad()
        (loss_of(objective) + strength * size(dict(model.named_parameters()))).backward()
        sgd.step()
    found = estimate(objective, [l2(), regularizer("outputs", size)])
    return Recovered(found, {"l2": 0.0, "outputs": strength}, unit=decay / 2)


@law(
    "weight decay w of scale-invariant weights: steps",
    {"l2": "w/2 · ‖θ‖²"},
    source="∇(w/2 · ‖θ‖²) = wθ is added to every gradient",
    parameter="w",
    values=(0.05,),
)
def scale_invariant_steps(decay: float, seed: int) -> Recovered:
    """Steps show what an endpoint cannot."""
    objective = scale_invariant(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), lr=0.1, weight_decay=decay)
    found = fit(trajectory_equations(objective, train(objective, sgd, 12), l2()))
    return Recovered(found, {"l2": decay / 2})
