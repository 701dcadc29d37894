"""Modules as regularizers: what they explain of endpoints held out, and what they memorise."""

import json
import math

import pytest
import torch
from support.bad_calls import assert_refused
from support.systems import draw
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations.points import Setting, TargetPoint


class SumOverWeights(nn.Module):
    """Σ_j s(θ_j), s′ a sum of tanh(θ/w) with widths from 0.001 to 1 to begin with."""

    def __init__(self, count=5):
        super().__init__()
        self.log_widths = nn.Parameter(torch.linspace(math.log(1e-3), 0.0, count))
        self.heights = nn.Parameter(torch.ones(count))

    def forward(self, params):
        theta = torch.cat([p.flatten() for p in params.values()])[:, None]
        widths = self.log_widths.exp()
        z = (theta / widths).abs()
        return (self.heights * widths * (z + F.softplus(-2 * z))).sum()


class Network(nn.Module):
    """Σ_j s(θ_j) + s(−θ_j) for a small network s of θ/0.01."""

    def __init__(self, activation, hidden=8):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, hidden), activation, nn.Linear(hidden, 1))

    def forward(self, params):
        theta = torch.cat([p.flatten() for p in params.values()])[:, None] / 0.01
        return (self.net(theta) + self.net(-theta)).sum()


class Ridge(nn.Module):
    """exp(a) ‖θ‖² + b ‖θ‖₁."""

    def __init__(self, start=0.0):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(start)), nn.Parameter(torch.tensor(0.5))

    def forward(self, params):
        squares = sum(p.square().sum() for p in params.values())
        return self.a.exp() * squares + self.b * sum(p.abs().sum() for p in params.values())


def target_at(theta, vector, **options):
    """A target that is that vector at these parameters."""
    vectors = vector if isinstance(vector, list) else [vector]
    setting = Setting(options.pop("mode", "endpoint"), None, groups=len(vectors))
    point = TargetPoint({"w": theta}, [{"w": v} for v in vectors], {"w": 0.0}, 1.0)
    return tacit.Target(setting, (point,), **options)


def targets_of(gradient, count=6, size=40, scale=1.0):
    points = [scale * draw(seed, size) for seed in range(count)]
    return [target_at(theta, gradient(theta)) for theta in points]


RIDGE = targets_of(lambda theta: 1e-6 * (0.6 * theta + 0.2 * theta.sign()))


def test_a_module_of_the_right_form_is_exact_at_any_scale():
    module = Ridge()
    before = [p.detach().clone() for p in module.parameters()]
    fit = tacit.fit_regularizer(RIDGE, module)
    assert fit.explained == pytest.approx(1, abs=1e-6)
    assert fit.held_out.keys() == {3}
    assert fit.held_out_explained == fit.held_out[3] == pytest.approx(1, abs=1e-6)
    assert fit.problems == ()
    theta = RIDGE[3].points[0].params["w"]
    expected = 1e-6 * (0.3 * theta.square().sum() + 0.2 * theta.abs().sum())
    assert float(fit.module({"w": theta}).detach()) == pytest.approx(float(expected), rel=1e-2)
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert parameter.equal(value)
        assert parameter.grad is None
    assert (fit.coefficients, fit.rows) == (2, 200)


def test_the_matching_loss_is_the_mean_square_over_equations():
    fit = tacit.fit_regularizer(RIDGE, Ridge(), held_out=[0, 1])
    squares = []
    for target in RIDGE[2:]:
        point = target.points[0]
        gradient = fit.regularizer().gradient(point.params)["learned"]["w"]
        squares.append((gradient - point.vectors[0]["w"]).square())
    assert fit.matching_loss == pytest.approx(float(torch.cat(squares).mean()), rel=1e-6)


def test_the_same_seed_gives_the_same_numbers():
    hard = targets_of(lambda theta: theta.sin(), count=2)
    first, again = (tacit.fit_regularizer(hard, Ridge(), seed=3).to_dict() for _ in range(2))
    assert first == again


def trained(seed, beta=0.01):
    """The target of a small network, trained to an optimum with a smoothed lasso."""
    X = draw(seed, 30, 4)
    y = torch.sin(X @ draw(seed + 100, 4, 1)) + 0.1 * draw(seed + 200, 30, 1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=600, history_size=40, tolerance_grad=1e-10, tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        zeros = [torch.zeros_like(p) for p in parameters]
        penalty = sum(
            F.smooth_l1_loss(p, zero, beta=beta, reduction="sum")
            for p, zero in zip(parameters, zeros, strict=True)
        )
        value = F.mse_loss(model(X), y) + 0.01 * penalty
        value.backward()
        return value

    optimizer.step(closure)
    return tacit.endpoint_target(tacit.Objective(model, F.mse_loss, (X, y)))


@pytest.mark.slow
def test_a_smoothed_lasso_is_found_without_its_name():
    """β = 0.01, by two kinds of modules; then as an ordinary regularizer of an unseen network."""
    targets = [trained(seed) for seed in range(4)]
    for module in (SumOverWeights(), Network(nn.Softplus())):
        fit = tacit.fit_regularizer(targets, module)
        assert fit.held_out_explained > 0.99
        assert fit.explained > 0.99
        assert fit.problems == ()
    unseen = trained(77)
    beside = tacit.estimate(unseen, [fit.regularizer(), tacit.l2()])
    assert beside.strengths["learned"] == pytest.approx(1, abs=0.05)
    assert tacit.estimate(unseen, fit.regularizer()).explained > 0.99


class Memory(nn.Module):
    """A penalty of its own for every weight of every size: Σ_j a_j θ_j."""

    def __init__(self, size):
        super().__init__()
        self.a = nn.Parameter(torch.ones(size))

    def forward(self, params):
        return (self.a * params["w"]).sum()


def test_a_module_that_memorised_says_so():
    targets = targets_of(lambda theta: theta, count=2)
    fit = tacit.fit_regularizer(targets, Memory(40), starts=1)
    assert fit.explained > 0.999
    assert fit.held_out_explained < 0.1
    assert [problem.kind for problem in fit.problems] == ["memorised", "unidentified"]
    assert "memorised" in fit.summary()


def test_what_is_unexplained_and_what_is_not_held_out_is_reported():
    sines = targets_of(lambda theta: (9 * theta).sin())
    fit = tacit.fit_regularizer(sines, Ridge(), starts=1)
    assert [problem.kind for problem in fit.problems] == ["unexplained"]
    alone = tacit.fit_regularizer(RIDGE[0], Ridge())
    assert "No endpoint was held out" in alone.problems[0].message
    assert math.isnan(alone.held_out_explained)
    assert json.loads(json.dumps(alone.to_dict()))["held_out_explained"] is None


def test_the_noise_of_draws_is_not_unexplained():
    theta = [draw(seed, 400) for seed in range(4)]
    noise = [[0.3 * draw(10 * seed + group, 400) for group in range(4)] for seed in range(1, 5)]
    targets = [
        target_at(t, [2 * t + n for n in groups]) for t, groups in zip(theta, noise, strict=True)
    ]
    fit = tacit.fit_regularizer(targets, Ridge())
    assert fit.held_out_explained == pytest.approx(1, abs=0.01)


def test_rows_choose_the_equations():
    theta, bias = draw(0, 20), draw(1, 5)
    point = TargetPoint(
        {"w": theta, "b": bias}, [{"w": 2 * theta, "b": 1 + 0 * bias}], {"w": 0.0, "b": 0.0}, 1.0
    )
    target = tacit.Target(Setting("endpoint", None), (point, point))
    fit = tacit.fit_regularizer(target, Ridge(), rows="w")
    assert fit.explained == pytest.approx(1, abs=1e-6)
    assert fit.rows == 20
    assert tacit.fit_regularizer(target, Ridge(), starts=1).explained < 0.99


def test_a_relu_network_can_be_fitted():
    """∇R is a step function of θ, whose derivative by the outer weights exists."""
    signs = targets_of(lambda theta: theta.sign(), scale=0.01)
    fit = tacit.fit_regularizer(signs, Network(nn.ReLU()), starts=1)
    assert fit.held_out_explained > 0.95


class Wrong(nn.Module):
    """A module that does not answer as it should."""

    def __init__(self, answer, learned=True):
        super().__init__()
        self.a, self.answer = nn.Parameter(torch.tensor(1.0), requires_grad=learned), answer

    def forward(self, params):
        return self.answer(self.a, params["w"])


class Once(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def fit_wrong(answer, **options):
    return lambda: tacit.fit_regularizer(RIDGE, Wrong(answer, **options))


def changed_weights():
    theta = draw(0, 9)
    target = target_at(theta, 2 * theta.clone())
    theta += 1
    return tacit.fit_regularizer(target, Ridge())


MODULE = Ridge()
CASES = {
    "no module": (lambda: tacit.fit_regularizer(RIDGE, lambda p: p), ["module"], "nn.Module"),
    "no targets": (lambda: tacit.fit_regularizer([], Ridge()), ["no endpoints"], "endpoint_target"),
    "equations": (lambda: tacit.fit_regularizer([3], Ridge()), ["targets is 3"], "endpoint_target"),
    "no parameters": (
        fit_wrong(lambda a, w: w.sum(), learned=False), ["no parameters"], "tacit.regularizer"),
    "no scalar": (fit_wrong(lambda a, w: a * w), ["(40,)", "scalar"], "Sum"),
    "a float": (fit_wrong(lambda a, w: 3.0), ["float"], "scalar"),
    "a constant": (fit_wrong(lambda a, w: a * w.detach().sum()), ["does not"], "use"),
    "a gradient without φ": (fit_wrong(lambda a, w: a + w.square().sum()), ["∇R_φ"], "derivative"),
    "differentiable once": (
        fit_wrong(lambda a, w: Once.apply(a * w).sum()), ["twice"], "double backward"),
    "not finite": (
        fit_wrong(lambda a, w: a * (0 * w).square().sum().sqrt()), ["finite", "w"], "square root"),
    "random": (
        fit_wrong(lambda a, w: (a * F.dropout(w)).square().sum()), ["random"], "module.eval()"),
    "a trajectory": (
        lambda: tacit.fit_regularizer(target_at(draw(0, 3), draw(1, 3), mode="trajectory"), MODULE),
        ["trajectory"], "endpoint_target"),
    "no vectors": (
        lambda: tacit.fit_regularizer(
            tacit.Target(Setting("endpoint", None), (TargetPoint({"w": draw(0, 3)}, (), {}, 1.0),)),
            Ridge()),
        ["no vectors"], "endpoint_target"),
    "changed weights": (changed_weights, ["changed"], "write the equations again"),
    "a target of zero": (
        lambda: tacit.fit_regularizer(target_at(draw(0, 3), torch.zeros(3).double()), Ridge()),
        ["zero"], "Leave that endpoint out"),
    "all held out": (
        lambda: tacit.fit_regularizer(RIDGE, Ridge(), held_out=range(6)), ["6"], "not all"),
    "a place that is not there": (
        lambda: tacit.fit_regularizer(RIDGE, Ridge(), held_out=[6]), ["[6]"], "0 to 5"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words", "remedy"), CASES.values(), ids=CASES.keys())
def test_wrong_calls_are_refused(call, words, remedy):
    assert_refused(call, words, remedy)
