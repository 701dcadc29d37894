"""Laws of what acts beside the loss gradient in every step: clipping, weight decay, noise."""

from functools import partial

import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
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
from tacit.equations import Equations
from tacit.objective.params import Params
from tacit.regularizers import metric_ridge
from tacit_paper.laws.expectations import add_vector, size_of
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.loops import loss_of, record_steps
from tacit_paper.laws.small_models import (
    draw,
    half_squares,
    linear_model,
    regression,
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
    path = record_steps(
        objective, sgd, 1, before_step=lambda: nn.utils.clip_grad_norm_(parameters, largest)
    )
    loss = regularizer("loss", lambda params: loss_at(objective.model, params, *objective.data))
    fitted = fit(trajectory_equations(objective, path, loss))
    return Recovered(fitted, {"loss": -float(1 - largest / size)})


def loss_at(model: nn.Module, params: Params, inputs: Tensor, target: Tensor) -> Tensor:
    """½(f − y)² over all examples, with these parameters."""
    return half_squares(functional_call(model, params, inputs), target)


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
    fitted = fit(trajectory_equations(objective, record_steps(objective, sgd, 12), l2()))
    return Recovered(fitted, {"l2": decay / 2})


@law(
    "AdamW's decay w, in the metric of its steps",
    {"metric_ridge": "w/2 · Σ(√v̂ + ε)θ²"},
    source="a step of AdamW is −η(∇L/(√v̂ + ε) + wθ), momentum left out",
    parameter="w",
    values=(0.1,),
)
def adamw_steps(decay: float, seed: int) -> Recovered:
    """The metric of every step is recorded with it; ε is as large as the gradients, and shows."""
    objective = regression(seed)
    parameters = objective.model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=0.1, weight_decay=decay)
    path = record_steps(objective, optimizer, 12)
    ridge = metric_ridge(optimizer, objective.model)
    return Recovered(fit(trajectory_equations(objective, path, ridge)), {"metric_ridge": decay / 2})


class UnitLength(nn.Module):
    """Linear outputs of a weight that is scaled to unit length: the loss ignores its length."""

    def __init__(self, seed: int):
        super().__init__()
        (weight,) = draw(seed + 1000, (3, 5))
        self.weight = nn.Parameter(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """(W/‖W‖) x."""
        return inputs @ (self.weight / self.weight.norm()).T


def scale_invariant(seed: int) -> Objective:
    """The squared loss of three such outputs on noisy linear data."""
    X, truth, noise = draw(seed, (40, 5), (5, 3), (40, 3))
    return Objective(UnitLength(seed), half_squares, (X, X @ truth + noise))


@law(
    "decay of scale-invariant weights: endpoint",
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
    fitted = estimate(objective, [l2(), regularizer("outputs", size)])
    return Recovered(fitted, {"l2": 0.0, "outputs": strength}, unit=decay / 2)


@law(
    "decay w of scale-invariant weights: steps",
    {"l2": "w/2 · ‖θ‖²"},
    source="∇(w/2 · ‖θ‖²) = wθ is added to every gradient",
    parameter="w",
    values=(0.05,),
)
def scale_invariant_steps(decay: float, seed: int) -> Recovered:
    """Steps show what an endpoint cannot."""
    objective = scale_invariant(seed)
    sgd = torch.optim.SGD(objective.model.parameters(), lr=0.1, weight_decay=decay)
    fitted = fit(trajectory_equations(objective, record_steps(objective, sgd, 12), l2()))
    return Recovered(fitted, {"l2": decay / 2})


@law(
    "Langevin steps h, noise √(2hT): mean weights",
    {"log_det": "T/2 · log det H(1 − hH/2)⁻¹"},
    source="at rest E ∇L = 0 and HC + CH − hHCH = 2T; for h → 0 it is log det H",
    parameter="T",
    values=(1e-3, 5e-4, 2.5e-4),
    order=1,
)
def langevin(temperature: float, seed: int, step: float = 3.0) -> Recovered:
    """Logistic regressions at the exact mean of the chain: its density is moved on a grid.

    E ∇L = ∇L(θ̄) + ½ Σ C_jk ∂_j∂_k∇L to first order in T, C the covariance of the chain at rest.
    """
    parts = [_chain_at_rest(10 * seed + number, temperature, step) for number in range(4)]
    return Recovered(fit(stack(parts)), {"log_det": temperature / 2})


def _chain_at_rest(seed: int, temperature: float, step: float) -> Equations:
    """Equations at the mean weights of a logistic regression."""
    X, truth, noise = draw(seed, (60, 2), (1, 2), (60, 1))
    y = (X @ truth.T / truth.norm() + 2 * noise > 0).double()
    objective = Objective(linear_model(truth), binary_cross_entropy_with_logits, (X, y))

    def log_det(params: Params) -> Tensor:
        p = (X @ params["weight"].T).sigmoid()
        H = X.T @ (p * (1 - p) * X) / len(X)
        return torch.logdet(H) - torch.logdet(torch.eye(2).double() - step / 2 * H)

    mean = {"weight": mean_of_logistic_chain(X, y, step, temperature)[None]}
    return endpoint_equations(objective, regularizer("log_det", log_det), params=mean)


def mean_of_logistic_chain(X: Tensor, y: Tensor, step: float, temperature: float) -> Tensor:
    """The mean at rest of θ' = θ − h∇L(θ) + √(2hT)·z, for two weights of logistic regression.

    A density on a grid of 25 × 25 points is moved by the chain's own transition probabilities.
    """
    centre, H = torch.zeros(2).double(), torch.eye(2).double()
    for _ in range(30):  # Newton's method
        p = (X @ centre).sigmoid()[:, None]
        H = X.T @ (p * (1 - p) * X) / len(X)
        centre = centre - torch.linalg.solve(H, (X.T @ (p - y))[:, 0] / len(X))
    spread = (temperature * torch.linalg.inv(H - step / 2 * H @ H)).diag().sqrt()
    ticks = centre[:, None] + spread[:, None] * torch.linspace(-6, 6, 25).double()
    grid = torch.cartesian_prod(*ticks)
    moved = grid - step * ((grid @ X.T).sigmoid() - y.T) @ X / len(X)
    first, second = (
        torch.exp(-(ticks[k][:, None] - moved[:, k]).square() / (4 * step * temperature))
        for k in range(2)
    )
    density = torch.ones(len(grid)).double()
    for _ in range(200):
        density = ((first * density) @ second.T).flatten()
        density = density / density.sum()
    return density @ grid


@law(
    "label noise σ on the manifold of solutions",
    {"curvature": "ησ²/B · −tr log(1 − ηH/2)/(2η)"},
    source="Damian et al. 2021, with the exact covariance of steps of finite size",
    parameter="σ",
    values=(0.02, 0.01, 0.005),
    order=2,
)
def label_noise(sigma: float, seed: int) -> Recovered:
    """For small η the penalty is ¼ tr H, over the curved directions: one for each label.

    The mean over 128 runs is the expectation up to order σ⁴: their signs, the columns of a Hadamard
    matrix and of its opposite, have the first three moments of independent signs.
    """
    (x,) = draw(seed, (3,))
    X, model = torch.stack([x, -x]) * 2 / x.norm(), tanh_network(seed, (3, 4, 1))
    y = model(X).detach()  # the weights fit the labels: training starts on the manifold
    objective = Objective(model, half_squares, (X, y))

    def curvature(params: Params) -> Tensor:
        eigenvalues = torch.linalg.eigvalsh(hessian_at(objective, params))[-len(X) :]
        return -torch.log(1 - step / 2 * eigenvalues).sum() / (2 * step)

    step = 1 / float(torch.linalg.eigvalsh(hessian_at(objective, objective.point())).max())
    columns = torch.from_numpy(hadamard(64)[:, 1:63]).double()
    signs = torch.cat([columns, -columns]).reshape(128, 31, 2, 1)
    gradients = vmap(grad(partial(loss_at, model)), in_dims=(0, None, 0))
    runs = {n: p.expand(128, *p.shape) for n, p in objective.point().items()}
    means = []
    for t in range(31):
        slopes = gradients(runs, X, y + sigma * signs[:, t])
        runs = {n: p - step * slopes[n] for n, p in runs.items()}
        means.append({n: p.mean(0) for n, p in runs.items()})
    path = Trajectory.from_positions(means[-3:], step)
    fitted = fit(trajectory_equations(objective, path, regularizer("curvature", curvature)))
    return Recovered(fitted, {"curvature": step * sigma**2 / len(X)})


def hessian_at(objective: Objective, params: Params) -> Tensor:
    """The whole Hessian of the squared loss, as one matrix."""

    def loss(shift: Tensor) -> Tensor:
        return loss_at(objective.model, add_vector(params, shift), *objective.data)

    return jacrev(grad(loss))(torch.zeros(size_of(objective.model), dtype=torch.float64))
