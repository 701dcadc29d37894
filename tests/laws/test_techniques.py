"""What techniques add to the loss, where theory knows the penalty and its coefficient.

L is a mean over examples, and the squared loss has a factor ½.
"""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import tacit
from tacit import techniques
from tacit.regularizers import (
    hessian_trace,
    input_jacobian,
    input_laplacian,
    mean_of,
)

X, Y = random_data(1, count=40, inputs=3)
CLASSES = torch.arange(40) % 3


def squared(output, target):
    return F.mse_loss(output, target) / 2


def linear():
    torch.manual_seed(3)
    data = random_data(2, count=60, inputs=20)
    return tacit.Objective(nn.Linear(20, 1).double(), squared, data)


def network(loss=squared, target=Y, outputs=1):
    return tacit.Objective(tanh_mlp(5, (3, 4, outputs)), loss, (X, target))


def penalty(objective, name, value, **options):
    """The penalty value(model function, parameters), where the function is of the inputs."""

    def of_params(params):
        return value(lambda x: functional_call(objective.model, params, (x,)), params)

    return tacit.regularizer(name, of_params, **options)


def fitted(technique, objective, *penalties):
    return tacit.fit(tacit.difference_equations(technique, objective, penalties))


def assert_law(fit, name, coefficient, *, exact=None):
    """The estimate over the coefficient is 1: to a precision, or within a precise interval."""
    assert not fit.problems
    ratio = fit.strengths[name] / coefficient
    if exact is not None:
        assert ratio == pytest.approx(1, abs=exact)
        return
    low, high = (end / coefficient for end in fit.intervals(0.999)["draws"][name])
    assert min(low, high) < 1 < max(low, high)
    assert fit.standard_errors["draws"][name] / abs(coefficient) < 0.05


def test_label_smoothing_penalises_confidence_beyond_the_uniform_distribution():
    """Smoothing ε adds exactly ε · mean_i[−mean_k log p_k + log p_y]."""
    objective = network(F.cross_entropy, CLASSES, outputs=3)

    def uniform_minus_plain(model, batch):
        log_p = model(batch[0]).log_softmax(1)
        return log_p.gather(1, batch[1][:, None])[:, 0] - log_p.mean(1)

    per_example = tacit.Objective.from_batch_loss(
        objective.model, uniform_minus_plain, objective.data
    )
    smoothing = mean_of(per_example, name="smoothing")
    fit = fitted(techniques.label_smoothing(objective, 0.1), objective, smoothing)
    assert_law(fit, "smoothing", 0.1, exact=1e-9)
    assert fit.with_halved().step_errors["smoothing"] < 1e-10


def test_input_noise_is_ridge_in_linear_regression():
    """Noise σ on the inputs of a linear model adds σ² · ½‖w‖², not on the bias."""
    objective = linear()
    technique = techniques.input_noise(objective, 0.1, draws=256)
    fit = fitted(technique, objective, tacit.l2(scope="weight"))
    assert_law(fit, "l2", 0.1**2 / 2)


def test_input_noise_in_a_network_is_bishops_pair():
    """Noise σ adds σ²/2 · mean ‖∇ₓf‖² and σ²/2 · mean (f−y)Δₓf (Bishop 1995)."""
    objective = network()
    pair = input_jacobian(objective), input_laplacian(objective)
    technique = techniques.input_noise(objective, 0.1, draws=512)
    fit = fitted(technique, objective, *pair)
    for penalty in pair:
        assert_law(fit, penalty.name, 0.1**2 / 2)


def test_weight_noise_penalises_the_trace_of_the_hessian():
    """Gaussian noise σ on the weights adds σ²/2 · tr H, up to order σ⁴."""
    objective = network()
    technique = techniques.weight_noise(objective, 0.02, draws=1024)
    assert_law(fitted(technique, objective, hessian_trace(objective)), "hessian_trace", 2e-4)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.branch = tanh_mlp(2, (3, 3)), tanh_mlp(4, (3, 5, 3))
        self.head = nn.Linear(3, 1).double()

    def forward(self, x):
        x = self.inner(x).tanh()
        return self.head(x + self.branch(x))


def test_stochastic_depth_penalises_what_the_last_block_adds():
    """Dropping the last block with probability q adds q/(1−q) · ½ mean (what it adds to f)²."""
    model = Residual()
    objective = tacit.Objective(model, squared, (X, Y))

    def contribution(params):
        hidden = functional_call(model.inner, part(params, "inner"), (X,)).tanh()
        branch = functional_call(model.branch, part(params, "branch"), (hidden,))
        return (branch @ params["head.weight"].T).square().mean() / 2

    technique = techniques.stochastic_depth(objective, 0.2, layers="branch", draws=512)
    fit = fitted(technique, objective, tacit.regularizer("contribution", contribution))
    assert_law(fit, "contribution", 0.2 / 0.8)


def part(params, module):
    return {n.removeprefix(f"{module}."): p for n, p in params.items() if n.startswith(module)}


def test_augmentation_of_linear_features_penalises_the_variance_of_outputs():
    """Augmented inputs of mean x add ½ mean variance of the augmented outputs."""
    objective = linear()

    def scaled(x, generator):
        return x * (0.2 + 1.6 * torch.rand(len(x), 1, generator=generator, dtype=x.dtype))

    X, _ = objective.data
    variance = penalty(
        objective, "variance", lambda f, p: (f(X) - p["bias"]).square().mean() / 2 * 1.6**2 / 12
    )
    fit = fitted(techniques.augment(objective, scaled, draws=1536), objective, variance)
    assert_law(fit, "variance", 1.0)
