"""Noise as an argument: mirrored pairs, known laws of noisy inputs and weights, clear refusals."""

import functools

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.func import functional_call

import tacit
from tacit.fitting.disagreement import error_bars_from
from tacit.objective.randomness import Noise


def half_squares(output, target):
    return (output - target).square().sum(1) / 2


def quiet(model, batch):
    X, y = batch
    return half_squares(model(X), y)


def noisy_inputs(sigma):
    def batch_loss(model, batch, noise):
        X, y = batch
        return half_squares(model(X + sigma * noise.normal(X)), y)

    return batch_loss


def noisy_weights(sigma):
    def batch_loss(model, batch, noise):
        X, y = batch
        moved = {n: p + sigma * noise.normal(p) for n, p in model.named_parameters()}
        return half_squares(functional_call(model, moved, (X,)), y)

    return batch_loss


def without_mirrors(batch_loss):
    """The same technique with draws that are independent of each other."""

    class Plain:
        def normal(self, like):
            return torch.randn_like(like)

    return lambda model, batch: batch_loss(model, batch, Plain())


def objective(model, batch_loss, data, **options):
    return tacit.Objective.from_batch_loss(model, batch_loss, data, **options)


@pytest.mark.parametrize("kind", ["normal", "uniform", "signs"])
def test_draws_come_in_mirrored_pairs(kind):
    like = torch.zeros(50, 40, dtype=torch.float64)
    first, second = (getattr(Noise(3, draw, 5), kind) for draw in (6, 7))
    for _ in range(2):  # again: later numbers of the same draw are others, mirrored as well
        a, b = first(like), second(like)
        torch.testing.assert_close(a + b, torch.full_like(a, float(kind == "uniform")))
        assert a.unique().numel() == (2 if kind == "signs" else 2000)
        assert abs(a.mean() - 0.5 * (kind == "uniform")) < 4 / 2000**0.5
    same = getattr(Noise(3, 6, 5), kind)(like)
    assert torch.equal(same, getattr(Noise(3, 6, 5), kind)(like))
    assert not torch.equal(same, first(like))
    for other in (Noise(4, 6, 5), Noise(3, 8, 5), Noise(3, 6, 4)):
        assert not torch.equal(same, getattr(other, kind)(like))


def test_noise_is_where_and_what_a_tensor_is():
    half, tokens = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.long)
    noise = Noise(0, 0, 0)
    assert noise.normal(half).dtype == noise.signs(half).dtype == torch.bfloat16
    assert noise.uniform(tokens).dtype == torch.float32
    assert noise.uniform(tokens).shape == (2, 3)


def test_a_mirrored_pair_of_signs_is_exactly_ridge():
    """One input, x ± σ: the mean over a pair is L + σ²/2 · w², whatever the signs are."""
    sigma, (X, y) = 0.3, random_data(0, inputs=1)
    model = nn.Linear(1, 1, bias=False).double()

    def batch_loss(model, batch, noise):
        X, y = batch
        return half_squares(model(X + sigma * noise.signs(X)), y)

    technique = objective(model, batch_loss, (X, y), training=True, draws=4, batch_size=17)
    equations = tacit.difference_equations(technique, objective(model, quiet, (X, y)), [tacit.l2()])
    found = tacit.fit(equations)
    assert equations.targets == 2
    assert found.strengths["l2"] == pytest.approx(sigma**2 / 2, rel=1e-12)


def test_noise_of_the_inputs_is_ridge_in_linear_regression():
    """The coefficient of ½‖w‖² is σ²."""
    sigma, data = 0.1, random_data(1, count=200)
    torch.manual_seed(1)
    model = nn.Linear(5, 1).double()
    technique = objective(model, noisy_inputs(sigma), data, training=True, draws=200)
    equations = tacit.difference_equations(
        technique, objective(model, quiet, data), [tacit.l2(scope="weight")]
    )
    ((name, strength),) = tacit.fit(equations).strengths.items()
    bars = error_bars_from(equations, torch.tensor([strength]).double())
    low, high = bars["draws"].intervals({name: strength}, 0.999)[name]
    assert low < sigma**2 / 2 < high
    assert strength == pytest.approx(sigma**2 / 2, rel=0.02)
    assert equations.targets == 8


def trace_of_the_hessian(model, data):
    X, y = data
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def loss(flat):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        params = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        return half_squares(functional_call(model, params, (X,)), y).mean()

    def trace(params):
        flat = torch.cat([params[n].flatten() for n in shapes])
        return torch.func.jacrev(torch.func.grad(loss))(flat).trace()

    return tacit.regularizer("trace", trace)


def test_noise_of_the_weights_is_the_trace_of_the_hessian():
    sigma, data, model = 0.03, random_data(2), tanh_mlp(2, (5, 4, 1))
    technique = objective(model, noisy_weights(sigma), data, training=True, draws=600)
    equations = tacit.difference_equations(
        technique, objective(model, quiet, data), [trace_of_the_hessian(model, data)]
    )
    found = tacit.fit(equations)
    assert found.strengths["trace"] == pytest.approx(sigma**2 / 2, rel=0.1)
    assert found.explained == pytest.approx(1, abs=0.1)


def test_mirrored_draws_cut_the_error_tenfold_where_noise_is_small():
    """Standard deviations over seeds at as many draws: independent ones have 12 and 18 times it."""
    data, model = random_data(3), tanh_mlp(3, (5, 4, 1))
    plain, ratios = objective(model, quiet, data), {}
    for name, technique in {"inputs": noisy_inputs(0.1), "weights": noisy_weights(0.03)}.items():
        spread = []
        for batch_loss in (technique, without_mirrors(technique)):
            found = [
                tacit.fit(
                    tacit.difference_equations(
                        objective(model, batch_loss, data, training=True, draws=8, seed=seed),
                        plain,
                        [tacit.l2()],
                    )
                ).strengths["l2"]
                for seed in range(40)
            ]
            spread.append(float(torch.tensor(found).std()))
        ratios[name] = spread[1] / spread[0]
    assert ratios["inputs"] > 8
    assert ratios["weights"] > 12


def test_groups_keep_pairs_together():
    data, model = random_data(4), tanh_mlp(4, (5, 4, 1))
    technique = objective(model, noisy_inputs(0.2), data, training=True, draws=10)
    plain, params = objective(model, quiet, data), params_of(model)
    equations = tacit.difference_equations(technique, plain, [tacit.l2()], groups=2)
    means = []
    for draws in ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7]):
        _, gradient = technique.value_and_gradient(params, draws=draws)
        means.append(
            sum(((gradient[n] - g) * params[n]).sum() for n, g in plain.gradient().items())
        )
    factor = equations.factor()
    inner = factor[:, 0] @ factor[:, 1:] / 2
    torch.testing.assert_close(inner, torch.stack(means), rtol=1e-10, atol=1e-14)
    assert tacit.difference_equations(technique, plain, [tacit.l2()]).targets == 5


def test_the_models_own_dropout_is_active_beside_the_noise():
    data = random_data(5)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1)).double()
    both = objective(model, noisy_inputs(0.0), data, training=True, draws=2)
    (a, _), (b, _) = (both.value_and_gradient(draws=[draw]) for draw in (0, 1))
    assert a != b
    assert both.value() == pytest.approx((a + b) / 2, rel=1e-12)


def scaled(model, batch, noise, scale):
    raise AssertionError


def optional(model, batch, noise=None):
    raise AssertionError


def any_number(*given):
    return quiet(*given)


DATA, MODEL = random_data(6), tanh_mlp(6)
NOISE, QUIET = noisy_inputs(0.1), quiet
WRONG = [
    (NOISE, {}, r"training=False and draws=1.*training=True and an even number"),
    (NOISE, {"training": True}, r"draws=1.*mirrored pairs.*draws=16"),
    (NOISE, {"training": True, "draws": 3}, r"draws=3.*mirrored pairs"),
    (scaled, {"training": True, "draws": 2}, r"\(model, batch, noise, scale\) may or may not"),
    (optional, {"training": True, "draws": 2}, r"noise=None\) may or may not take noise"),
    (any_number, {"training": True, "draws": 2}, r"\(\*given\) may or may not.*functools\.partial"),
]


@pytest.mark.parametrize(("batch_loss", "options", "message"), WRONG)
def test_signatures_that_do_not_say_are_refused(batch_loss, options, message):
    with pytest.raises(tacit.InputError, match=message):
        objective(MODEL, batch_loss, DATA, **options)


def test_signatures_that_say_are_understood():
    def with_options(model, batch, scale=2.0):
        return scale * quiet(model, batch)

    bound = functools.partial(
        lambda s, model, batch, noise: noisy_inputs(s)(model, batch, noise), 0.1
    )
    assert objective(MODEL, bound, DATA, training=True, draws=2).paired
    assert not objective(MODEL, with_options, DATA, training=True, draws=2).paired
    assert not objective(MODEL, any_number, DATA).paired
    assert not tacit.Objective(MODEL, nn.functional.mse_loss, DATA).paired


def test_too_few_pairs_for_groups_are_refused():
    plain = objective(MODEL, quiet, DATA)
    technique = objective(MODEL, NOISE, DATA, training=True, draws=4)
    with pytest.raises(
        tacit.InputError, match=r"4 draws cannot make 3 groups of mirrored.*draws=6"
    ):
        tacit.difference_equations(technique, plain, [tacit.l2()], groups=3)
    single = objective(MODEL, without_mirrors(NOISE), DATA, training=True)
    with pytest.raises(tacit.InputError, match=r"1 draws cannot make 2 groups"):
        tacit.difference_equations(single, plain, [tacit.l2()])
