"""Random draws depend only on the seed, and noise as an argument comes in mirrored pairs."""

import functools

import numpy as np
import pytest
import torch
from support.models import random_data, tanh_mlp
from support.noise import noise_objective, noiseless, noisy_inputs
from support.objectives import dropout_mlp, dropout_objective, random_batches
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective, reference
from tacit.objective.randomness import Noise


def test_training_makes_dropout_active():
    model, (X, _) = dropout_mlp(), random_data(1, count=8)
    data = X, model.eval()(X).detach()
    assert Objective(model, F.mse_loss, data).value() == 0
    values = [dropout_objective(data, model=model, seed=s, draws=50).value() for s in range(20)]
    # The variance of Σ w h m/½ over fair masks m is Σ (w h)².
    expected = (model[3].weight * model[:2](X)).detach().square().sum(1).mean()
    error = np.std(values) / len(values) ** 0.5
    assert np.mean(values) == pytest.approx(expected.item(), abs=4 * error)
    assert expected > 20 * error


def test_the_same_seed_gives_the_same_bytes_for_any_global_random_state():
    data = random_data(1)
    model = dropout_mlp()
    gradients = []
    for global_seed, seed in [(0, 3), (1, 3), (0, 4)]:
        objective = dropout_objective(data, model=model, seed=seed, draws=2, batch_size=9)
        torch.manual_seed(global_seed)
        gradients.append(reference.flat(objective.gradient()))
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2], rtol=1e-3)


def test_the_draws_of_a_batch_do_not_depend_on_other_batches():
    (a, b), (c,) = random_batches(1, sizes=(8, 8)), random_batches(2, sizes=(5,))

    def total_loss(*parts):
        return dropout_objective(list(parts)).value() * sum(len(part[0]) for part in parts)

    second = total_loss(a, b) - total_loss(a)
    assert second == pytest.approx(total_loss(c, b) - total_loss(c), rel=1e-12)
    assert second != pytest.approx(total_loss(b), rel=1e-3)  # as the first batch it has other masks


@pytest.mark.parametrize("kind", ["normal", "uniform", "signs"])
def test_draws_come_in_mirrored_pairs(kind):
    like = torch.zeros(50, 40, dtype=torch.float64)
    first, second = (getattr(Noise(3, draw, 5), kind) for draw in (6, 7))
    for _ in range(2):  # later numbers of a draw differ from the first, and are mirrored too
        a, b = first(like), second(like)
        torch.testing.assert_close(a + b, torch.full_like(a, float(kind == "uniform")))
        assert a.unique().numel() == (2 if kind == "signs" else 2000)
        assert abs(a.mean() - 0.5 * (kind == "uniform")) < 4 / 2000**0.5
    same = getattr(Noise(3, 6, 5), kind)(like)
    assert torch.equal(same, getattr(Noise(3, 6, 5), kind)(like))
    assert not torch.equal(same, first(like))
    for other in (Noise(4, 6, 5), Noise(3, 8, 5), Noise(3, 6, 4)):
        assert not torch.equal(same, getattr(other, kind)(like))


def test_noise_has_the_shape_and_dtype_of_a_tensor():
    half, tokens = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.long)
    noise = Noise(0, 0, 0)
    assert noise.normal(half).dtype == noise.signs(half).dtype == torch.bfloat16
    assert noise.uniform(tokens).dtype == torch.float32
    assert noise.uniform(tokens).shape == (2, 3)


def test_dropout_in_the_model_is_active_beside_the_noise():
    data = random_data(5)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1)).double()
    both = noise_objective(model, noisy_inputs(0.0), data, training=True, draws=2)
    (a, _), (b, _) = (both.value_and_gradient(draws=[draw]) for draw in (0, 1))
    assert a != b
    assert both.value() == pytest.approx((a + b) / 2, rel=1e-12)


def with_fourth_parameter(model, batch, noise, scale):
    raise AssertionError


def with_optional_noise(model, batch, noise=None):
    raise AssertionError


def with_any_number(*arguments):
    return noiseless(*arguments)


DATA, MODEL = random_data(6), tanh_mlp(6)
NOISY = noisy_inputs(0.1)
WRONG = [
    (NOISY, {}, r"training=False and draws=1.*training=True and an even number"),
    (NOISY, {"training": True}, r"draws=1.*mirrored pairs.*draws=16"),
    (NOISY, {"training": True, "draws": 3}, r"draws=3.*mirrored pairs"),
    (
        with_fourth_parameter,
        {"training": True, "draws": 2},
        r"\(model, batch, noise, scale\) may or may not",
    ),
    (
        with_optional_noise,
        {"training": True, "draws": 2},
        r"noise=None\) may or may not take noise",
    ),
    (
        with_any_number,
        {"training": True, "draws": 2},
        r"\(\*arguments\) may or may not.*functools\.partial",
    ),
]


@pytest.mark.parametrize(("batch_loss", "options", "message"), WRONG)
def test_batch_losses_that_may_or_may_not_take_noise_are_refused(batch_loss, options, message):
    with pytest.raises(tacit.InputError, match=message):
        noise_objective(MODEL, batch_loss, DATA, **options)


def test_a_batch_loss_takes_noise_if_it_has_three_required_parameters():
    def with_options(model, batch, scale=2.0):
        return scale * noiseless(model, batch)

    bound = functools.partial(
        lambda sigma, model, batch, noise: noisy_inputs(sigma)(model, batch, noise), 0.1
    )
    assert noise_objective(MODEL, bound, DATA, training=True, draws=2).paired
    assert not noise_objective(MODEL, with_options, DATA, training=True, draws=2).paired
    assert not noise_objective(MODEL, with_any_number, DATA).paired
    assert not tacit.Objective(MODEL, nn.functional.mse_loss, DATA).paired
