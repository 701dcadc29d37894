"""Noise on weights and SAM: against naive versions, and what is refused."""

import math

import pytest
import torch
from support.models import params_of, random_data, small_cnn, tanh_mlp
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import tacit
from tacit import techniques
from tacit.objective import Noise
from tacit.objective.randomness import WHOLE
from tacit.techniques import check_contract

X, Y = random_data(1, count=24, inputs=3)
MODEL = tanh_mlp(0, (3, 4, 1))
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, (X, Y), batch_size=7)


def loss_at(params):
    return F.mse_loss(functional_call(MODEL, params, (X,)), Y)


def gradient_at(params):
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    gradients = torch.autograd.grad(loss_at(leaves), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def assert_close(ours, theirs):
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor)


@pytest.mark.parametrize("relative", [False, True])
def test_weight_noise_is_the_mean_over_moved_weights(relative):
    technique = techniques.weight_noise(
        OBJECTIVE, 0.2, scope="*.weight", relative=relative, draws=4, seed=3
    )
    params, value, total = params_of(MODEL), 0.0, None
    for draw in range(4):
        noise = Noise(3, draw, WHOLE)
        leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        factors = {n: 0.2 * noise.normal(p) for n, p in leaves.items() if n.endswith("weight")}
        moved = {
            n: p if n not in factors else p * (1 + factors[n]) if relative else p + factors[n]
            for n, p in leaves.items()
        }
        loss = loss_at(moved)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        value += float(loss.detach()) / 4
        total = [g / 4 + (0 if total is None else total[i]) for i, g in enumerate(gradients)]
    assert technique.value() == pytest.approx(value, rel=1e-12)
    assert_close(technique.gradient(), dict(zip(params, total, strict=True)))


def test_hessian_products_and_scores_are_those_of_the_moved_loss():
    technique = techniques.weight_noise(OBJECTIVE, 0.2, relative=True, draws=4)
    params = params_of(MODEL)
    direction = {n: torch.ones_like(p) for n, p in params.items()}
    step = 1e-5
    ahead, behind = (
        technique.gradient({n: p + s * step * direction[n] for n, p in params.items()})
        for s in (1, -1)
    )
    quotient = {n: (ahead[n] - behind[n]) / (2 * step) for n in params}
    product = technique.hvp(direction)
    for name, tensor in quotient.items():
        torch.testing.assert_close(product[name], tensor, rtol=1e-5, atol=1e-7)
    fit = tacit.fit(tacit.difference_equations(technique, OBJECTIVE, tacit.l2()))
    assert tacit.score_examples(fit).values.shape == (24, 1)  # which compares with the strength


def test_sam_takes_its_step_from_all_the_data():
    params = params_of(MODEL)
    gradient = gradient_at(params)
    size = sum(g.square().sum() for g in gradient.values()).sqrt()
    for normalised, factor in ((True, 0.1 / size), (False, 0.1)):
        moved = {n: p + factor * gradient[n] for n, p in params.items()}
        technique = techniques.sam(OBJECTIVE, 0.1, normalised=normalised)
        assert technique.value() == pytest.approx(float(loss_at(moved)), rel=1e-12)
        assert_close(technique.gradient(), gradient_at(moved))


def test_sam_is_last_and_has_no_hessian():
    technique = techniques.sam(OBJECTIVE, 0.1)
    with pytest.raises(tacit.InputError, match="sam last"):
        techniques.input_noise(technique, 0.1)
    with pytest.raises(tacit.InputError, match="no Hessian"):
        technique.hvp(params_of(MODEL))
    fit = tacit.fit(tacit.difference_equations(technique, OBJECTIVE, tacit.l2()))
    with pytest.raises(tacit.InputError, match="no mean over examples"):
        tacit.score_examples(fit)
    with pytest.raises(tacit.InputError, match="is random"):
        techniques.sam(techniques.weight_noise(OBJECTIVE, 0.1), 0.1)


def test_sam_has_no_direction_at_an_optimum():
    model = nn.Linear(3, 1).double()
    solution = torch.linalg.lstsq(torch.cat([X, torch.ones(24, 1).double()], 1), Y).solution
    params = {"weight": solution[:3].T, "bias": solution[3]}
    technique = techniques.sam(tacit.Objective(model, F.mse_loss, (X, Y)), 0.1)
    with pytest.raises(tacit.InputError, match="rounding error"):
        technique.gradient(params)


@pytest.mark.parametrize("scale", [0.4, 0.2])
def test_half_the_scale_shows_the_error_of_the_law(scale):
    """For L = mean exp θ, noise σ adds L·(exp(σ²/2) − 1) = L·(σ²/2 + σ⁴/8 + …)."""
    model = nn.Linear(1, 600, bias=False).double()
    nn.init.uniform_(model.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))

    ones = torch.ones(1, 1).double(), torch.ones(1, 600).double()
    objective = tacit.Objective(model, lambda output, ones: (output.exp() * ones).mean(), ones)
    law = tacit.regularizer("law", lambda p: p["weight"].exp().mean())
    technique = techniques.weight_noise(objective, scale, draws=400)
    fit = tacit.fit(tacit.difference_equations(technique, objective, law)).with_halved()
    exact = math.expm1(scale**2 / 2)  # E exp(θ + σz) = exp(θ + σ²/2)
    error = exact - scale**2 / 2
    assert fit.strengths["law"] == pytest.approx(exact, rel=0.01)
    assert fit.step_errors["law"] == pytest.approx(error, rel=0.25)
    assert "At half the sigma: law" in " ".join(fit.summary().split())


def test_only_the_difference_from_its_own_plain_objective_is_halved():
    smoothed = techniques.weight_noise(OBJECTIVE, 0.1)
    other = tacit.Objective(MODEL, F.mse_loss, (X, Y))
    fit = tacit.fit(tacit.difference_equations(smoothed, other, tacit.l2()))
    assert "with_halved" not in fit.summary()
    with pytest.raises(tacit.InputError, match="this same plain objective"):
        fit.with_halved()
    augmented = techniques.augment(OBJECTIVE, lambda x, generator: 1.1 * x)
    fit = tacit.fit(tacit.difference_equations(augmented, OBJECTIVE, tacit.l2()))
    with pytest.raises(tacit.InputError, match="has a scale"):
        fit.with_halved()


def test_a_scale_survives_saving(tmp_path):
    technique = techniques.sam(OBJECTIVE, 0.1)
    equations = tacit.difference_equations(technique, OBJECTIVE, tacit.l2())
    equations.save(tmp_path / "equations")
    loaded = tacit.Equations.load(tmp_path / "equations")
    assert loaded.sources == equations.sources
    assert loaded.sources[0].scale.name == "rho"


def test_moved_weights_keep_running_statistics():
    cnn = small_cnn(0)
    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    data = images, torch.arange(12) % 4
    plain = tacit.Objective(cnn, F.cross_entropy, data, batch_norm="running")
    assert techniques.weight_noise(plain, 0.0).value() == pytest.approx(plain.value(), rel=1e-12)
    check_contract(lambda o: techniques.weight_noise(o, 0.01, draws=8), plain)
    assert techniques.sam(plain, 0.05).value() > plain.value()


def test_float32_models_and_inference_mode_are_fine():
    model = tanh_mlp(0, (3, 4, 1)).float()
    data = X.float(), Y.float()
    with torch.inference_mode():
        plain = tacit.Objective(model, F.mse_loss, data)
        for name in ("weight_noise", "input_noise", "sam"):
            technique = getattr(techniques, name)(plain, 0.1)
            gradient = technique.gradient()
            exact = getattr(techniques, name)(OBJECTIVE, 0.1).gradient()
            assert all(g.dtype == torch.float64 for g in gradient.values())
            if name == "sam":
                for n, g in exact.items():
                    torch.testing.assert_close(gradient[n], g, rtol=1e-4, atol=1e-5)
