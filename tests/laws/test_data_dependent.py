"""Laws of training whose penalty is read from data, each recovered with its coefficient."""

from itertools import permutations, product

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective
from tacit.regularizers import (
    activation_norm,
    gradient_norm,
    gradient_variance,
    input_jacobian,
    input_laplacian,
    mean_of,
)


def half_squares(output, target):
    """½(f − y)², a mean over examples."""
    return (output - target).square().sum(1).mean() / 2


def class_data(seed, count=40):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, 3, (count,), generator=generator)


def difference(technique, plain, penalty):
    """The strength of a penalty in what a technique adds."""
    fit = tacit.fit(tacit.difference_equations(technique, plain, penalty))
    assert fit.explained > 0.999
    return fit.strengths[penalty.name]


@pytest.mark.parametrize(("radius", "error"), [(1e-2, 2e-2), (1e-3, 2e-3), (1e-4, 2e-4)])
def test_sharpness_aware_steps_add_the_gradient_norm_at_their_radius(radius, error):
    """∇L(θ + ρ∇L/‖∇L‖) = ∇(L + ρ‖∇L‖) + O(ρ²): the strength is ρ, the error of order ρ."""
    model, data = tanh_mlp(0), random_data(0)
    objective, theta = Objective(model, half_squares, data), params_of(model)

    gradient = objective.gradient(theta)
    size = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    ahead = objective.gradient({n: p + radius * gradient[n] / size for n, p in theta.items()})
    step = tacit.Trajectory([theta], [{n: -1e-3 * g for n, g in ahead.items()}], [1e-3])
    equations = tacit.trajectory_equations(
        objective, step, gradient_norm(objective, power=1), reference=tacit.equations.euler
    )
    assert tacit.fit(equations).strengths["gradient_norm"] / radius == pytest.approx(1, abs=error)


def test_input_noise_adds_bishops_pair():
    """Gaussian input noise σ adds σ²/2 · mean ‖∂f/∂x‖² and σ²/2 · mean r·Δ_x f (Bishop 1995)."""
    model, (X, y), sigma = tanh_mlp(1, sizes=(3, 6, 1)), random_data(1, inputs=3), 0.05

    def noisy(model, batch, noise):
        return (model(batch[0] + sigma * noise.normal(batch[0])) - batch[1]).square()[:, 0] / 2

    technique = Objective.from_batch_loss(model, noisy, (X, y), training=True, draws=2000)
    plain = Objective(model, half_squares, (X, y))
    pair = [input_jacobian(plain), input_laplacian(plain)]
    fit = tacit.fit(tacit.difference_equations(technique, plain, pair, groups=10))
    for name, (low, high) in fit.intervals()["draws"].items():
        assert low <= sigma**2 / 2 <= high
        assert fit.strengths[name] / (sigma**2 / 2) == pytest.approx(1, abs=0.05)


def test_label_smoothing_is_a_mean_over_examples_at_its_rate():
    """Label smoothing ε adds ε · mean[log p_y − mean_k log p_k]."""
    model, data = tanh_mlp(2, sizes=(5, 8, 3)), class_data(2)

    def penalties(model, batch):
        log_p = F.log_softmax(model(batch[0]), 1)
        return log_p.gather(1, batch[1][:, None])[:, 0] - log_p.mean(1)

    technique = Objective(model, nn.CrossEntropyLoss(label_smoothing=0.1), data)
    plain = Objective(model, F.cross_entropy, data)
    penalty = mean_of(Objective.from_batch_loss(model, penalties, data), name="smoothing")
    assert difference(technique, plain, penalty) / 0.1 == pytest.approx(1, abs=1e-10)


def test_a_confidence_penalty_is_a_mean_over_examples_at_its_weight():
    """A confidence penalty β adds β · mean Σ_k p_k log p_k (Pereyra et al. 2017)."""
    model, data = tanh_mlp(3, sizes=(5, 8, 3)), class_data(3)

    def negative_entropies(model, batch):
        log_p = F.log_softmax(model(batch[0]), 1)
        return (log_p.exp() * log_p).sum(1)

    def trained(output, target):
        log_p = F.log_softmax(output, 1)
        return F.nll_loss(log_p, target) + 0.05 * (log_p.exp() * log_p).sum(1).mean()

    technique, plain = (Objective(model, loss, data) for loss in (trained, F.cross_entropy))
    penalty = mean_of(Objective.from_batch_loss(model, negative_entropies, data))
    assert difference(technique, plain, penalty) / 0.05 == pytest.approx(1, abs=1e-10)


def test_dropout_of_the_last_hidden_layer_adds_an_activation_weighted_ridge():
    """Under ½(f − y)², dropout q of h adds ½ q/(1−q) · mean Σ_k a_k² h_k², exactly."""
    model, data, q = tanh_mlp(4, sizes=(5, 4, 1)), random_data(4), 0.3

    def over_all_masks(model, batch):
        h, total = model[1](model[0](batch[0])), 0
        for kept in product((0, 1), repeat=4):
            chance = q ** (4 - sum(kept)) * (1 - q) ** sum(kept)
            f = model[2](h * torch.tensor(kept) / (1 - q))
            total = total + chance * (f - batch[1]).square()[:, 0] / 2
        return total

    technique = Objective.from_batch_loss(model, over_all_masks, data)
    plain = Objective(model, half_squares, data)
    penalty = activation_norm(plain, layers="2", weighted=True)
    strength = difference(technique, plain, penalty)
    assert strength / (q / (1 - q) / 2) == pytest.approx(1, abs=1e-10)


def test_dropout_of_the_inputs_of_a_regression_adds_an_input_weighted_ridge():
    """Trained with dropout q of its inputs, the optimum has ½ q/(1−q) · Σ_j mean x_j² θ_j²."""
    (X, y), q, model = random_data(5), 0.2, nn.Linear(5, 1, bias=False).double()
    S = X.T @ X / len(X)
    optimum = torch.linalg.solve(S + q / (1 - q) * S.diagonal().diag(), X.T @ y / len(X)).T

    objective = Objective(model, half_squares, (X, y))
    penalty = activation_norm(objective, layers="", weighted=True)
    equations = tacit.endpoint_equations(objective, penalty, params={"weight": optimum})
    strength = tacit.fit(equations).strengths["activation_norm"]
    assert strength / (q / (1 - q) / 2) == pytest.approx(1, abs=1e-10)


def mean_epoch(model, theta, epochs, step):
    """The mean displacement of epochs of SGD, each a list of batches."""
    total = {n: torch.zeros_like(p) for n, p in theta.items()}
    for batches in epochs:
        moved = theta
        for batch in batches:
            gradient = torch.func.grad(loss_of(model, half_squares, batch))(moved)
            moved = {n: p - step * gradient[n] for n, p in moved.items()}
        total = {n: t + (moved[n] - theta[n]) / len(epochs) for n, t in total.items()}
    return total


def test_shuffled_epochs_of_sgd_add_gradient_norm_and_gradient_variance():
    """The mean over orders follows L + η/4 ‖∇L‖² + η/4 · variance over batches (Smith et al. 2021).

    The flow takes the time mη of m steps.
    """
    model, (X, y), step = tanh_mlp(6), random_data(6, count=12), 1e-3
    batches = list(zip(X.split(4), y.split(4), strict=True))
    points = [params_of(tanh_mlp(seed)) for seed in range(3)]
    moved = [mean_epoch(model, theta, list(permutations(batches)), step) for theta in points]

    objective = Objective(model, half_squares, batches)
    pair = [gradient_norm(objective), gradient_variance(objective)]
    epochs = tacit.Trajectory(points, moved, [3 * step] * 3)
    equations = tacit.trajectory_equations(objective, epochs, pair, reference=tacit.rk4())
    for strength in tacit.fit(equations).strengths.values():
        assert strength / (step / 4) == pytest.approx(1, abs=0.01)


def test_epochs_that_shuffle_examples_add_the_variance_over_examples_at_a_part_of_it():
    """Batches of B out of n examples, grouped anew: (η/4)(n−B)/(B(n−1)) of that over examples."""
    model, (X, y), step = tanh_mlp(7), random_data(7, count=4), 1e-3
    orders = [torch.tensor(order).split(2) for order in permutations(range(4))]
    points = [params_of(tanh_mlp(seed)) for seed in range(3)]
    shuffled = [[(X[part], y[part]) for part in parts] for parts in orders]
    moved = [mean_epoch(model, theta, shuffled, step) for theta in points]

    objective = Objective(model, half_squares, (X, y), batch_size=1)
    pair = [gradient_norm(objective), gradient_variance(objective)]
    epochs = tacit.Trajectory(points, moved, [2 * step] * 3)
    equations = tacit.trajectory_equations(objective, epochs, pair, reference=tacit.rk4())
    strengths = tacit.fit(equations).strengths
    assert strengths["gradient_norm"] / (step / 4) == pytest.approx(1, abs=0.01)
    expected = step / 4 * (4 - 2) / (2 * (4 - 1))
    assert strengths["gradient_variance"] / expected == pytest.approx(1, abs=0.01)
