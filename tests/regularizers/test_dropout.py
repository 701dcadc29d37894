"""Dropout's own regularizer: against dense Jacobians, and against all masks of a small network."""

from itertools import product

import pytest
import torch
from support.dense_dropout import check, class_data, gradient, halves, naive, network, whole_hessian
from support.problems import params_of, random_data
from torch import nn
from torch.nn import functional as F

import tacit


def quartic(output, target):
    """A loss whose Hessian is neither constant nor diagonal."""
    return ((output - target).sum(1) ** 4 + (output - target).cosh().prod(1)).mean()


SETTINGS = {
    "cross_entropy": (network(), F.cross_entropy, class_data()),
    "mse": (network(1, (4, 6, 5, 2)), F.mse_loss, random_data(1, count=7, inputs=4, outputs=2)),
    "custom": (network(2, (4, 5, 2)), quartic, random_data(2, count=5, inputs=4, outputs=2)),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


@every_setting
def test_values_and_gradients_are_those_of_dense_jacobians(setting):
    model, loss, data = setting
    functions = naive(halves(model), loss, data)
    objective, params = tacit.Objective(model, loss, data, batch_size=3), params_of(model)
    check(tacit.regularizers.explicit_dropout(objective, by_layer=True), params, functions)
    whole = tacit.regularizers.explicit_dropout(objective)
    check(whole, params, [lambda params: sum(f(params) for f in functions)])


@every_setting
def test_the_mode_of_the_objective_and_its_batches_do_not_matter(setting):
    model, loss, data = setting
    params = params_of(model)
    found = [
        tacit.regularizers.explicit_dropout(tacit.Objective(model.train(), loss, data, **options))
        for options in ({}, {"batch_size": 2}, {"training": True, "draws": 3, "batch_size": 5})
    ]
    for measure in (lambda r: r.value(params), lambda r: gradient(r, params)):
        for regularizer in found[1:]:
            expected = measure(found[0])
            torch.testing.assert_close(measure(regularizer), expected, rtol=1e-12, atol=1e-14)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_count_as_copies_of_examples():
    model, loss, (X, y) = SETTINGS["cross_entropy"]
    times = torch.tensor([1, 0, 2, 3, 1, 0, 1])
    params, twice = params_of(model), (X.repeat_interleave(times, 0), y.repeat_interleave(times))
    weighted, copied = (
        tacit.regularizers.explicit_dropout(objective)
        for objective in (
            tacit.Objective(model, loss, (X, y), weights=times, batch_size=4),
            tacit.Objective(model, loss, twice),
        )
    )
    torch.testing.assert_close(weighted.value(params), copied.value(params), rtol=1e-12, atol=0)
    for name, slope in copied.gradient(params)[copied.name].items():
        found = weighted.gradient(params)[weighted.name][name]
        torch.testing.assert_close(found, slope, rtol=1e-11, atol=1e-14)


# All masks of a small network.


def all_masks(model):
    """Every joint mask of the dropout layers, scaled as torch scales, and its probability."""
    widths = [model[i - 2].out_features for i, m in enumerate(model) if isinstance(m, nn.Dropout)]
    rate = next(m.p for m in model if isinstance(m, nn.Dropout))
    kept = torch.tensor(list(product([0.0, 1.0], repeat=sum(widths))), dtype=torch.float64)
    chance = (kept * (1 - rate) + (1 - kept) * rate).prod(1)
    return (kept / (1 - rate)).split(widths, dim=1), chance


def over_all_masks(model, loss, data):
    """The objective with dropout, its expectation taken exactly."""
    masks, chance = all_masks(model)

    def losses(model, batch):
        x, y = batch
        rest = iter(masks)
        for layer in model:
            x = x * next(rest)[:, None] if isinstance(layer, nn.Dropout) else layer(x)
        return chance @ torch.func.vmap(loss, in_dims=(0, None))(x, y)

    return tacit.Objective.from_batch_loss(model, losses, data)


def squares(output, target):
    return (output - target).square().mean(1)


def marginal(model, loss, each, data, *, by_layer=False):
    plain = tacit.Objective(model, loss, data)
    column = tacit.regularizers.explicit_dropout(plain, by_layer=by_layer)
    return tacit.fit(tacit.difference_equations(over_all_masks(model, each, data), plain, [column]))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_on_the_last_hidden_layer_under_squared_loss_is_it_exactly(rate):
    model = network(3, (4, 6, 2), rate)
    found = marginal(model, F.mse_loss, squares, random_data(3, count=12, inputs=4, outputs=2))
    assert found.strengths["explicit_dropout"] == pytest.approx(rate / (1 - rate), rel=1e-10)
    assert found.explained == pytest.approx(1, abs=1e-10)


def each_cross_entropy(output, target):
    return F.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dropout_of_units_that_matter_little_adds_it_with_its_law(seed):
    model, rate, (X, y) = network(seed, rate=0.02), 0.02, class_data(seed, count=200)
    found = marginal(model, F.cross_entropy, each_cross_entropy, (0.3 * X, y))
    assert found.strengths["explicit_dropout"] == pytest.approx(rate / (1 - rate), rel=0.03)
    assert found.explained > 0.98


def test_what_it_leaves_out_is_the_curvature_behind_the_layers():
    """With all of ∇²_h of the loss, not JᵀHJ alone, little is left where units matter more."""
    model, rate, data = network(0, rate=0.02), 0.02, class_data(0, count=20)
    functions = naive(halves(model), F.cross_entropy, data, matrix=whole_hessian)
    whole = tacit.regularizer("whole", lambda params: sum(f(params) for f in functions))
    plain = tacit.Objective(model, F.cross_entropy, data)
    noisy = over_all_masks(model, each_cross_entropy, data)
    both = [tacit.regularizers.explicit_dropout(plain), whole]
    explicit, full = (tacit.fit(tacit.difference_equations(noisy, plain, [r])) for r in both)
    assert explicit.explained < 0.95
    assert full.explained > 0.99
    assert full.strengths["whole"] == pytest.approx(rate / (1 - rate), rel=0.03)


# Sampling.


@every_setting
def test_samples_average_to_the_exact_value_and_gradient(setting):
    model, loss, data = setting
    objective, params = tacit.Objective(model, loss, data, batch_size=4), params_of(model)
    whole = tacit.regularizers.explicit_dropout(objective)
    found = [
        tacit.regularizers.explicit_dropout(objective, samples=10, seed=seed) for seed in range(12)
    ]
    for measure in (lambda r: r.value(params), lambda r: gradient(r, params)):
        several = torch.stack([measure(r) for r in found])
        error = several.std(0).norm() / len(found) ** 0.5
        assert float((several.mean(0) - measure(whole)).norm()) < 3 * float(error)
        assert float(error) < 0.2 * float(measure(whole).norm())


def test_samples_depend_on_their_seed_alone():
    model, loss, data = SETTINGS["cross_entropy"]
    objective, params = tacit.Objective(model, loss, data), params_of(model)
    values = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 100)
        values.append(
            gradient(tacit.regularizers.explicit_dropout(objective, samples=2, seed=seed), params)
        )
    assert torch.equal(values[0], values[1])
    assert not torch.allclose(values[0], values[2])


def test_equal_weights_change_no_sample():
    model, loss, data = SETTINGS["cross_entropy"]
    found = [
        tacit.regularizers.explicit_dropout(
            tacit.Objective(model, loss, data, weights=weights), samples=2
        )
        for weights in (None, torch.full((7,), 2.5))
    ]
    first, second = (gradient(regularizer, params_of(model)) for regularizer in found)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-15)


def test_many_outputs_are_sampled_and_few_are_not():
    for outputs, same in ((32, True), (33, False)):
        model = network(4, (4, 5, outputs))
        objective = tacit.Objective(model, F.cross_entropy, class_data(4, classes=outputs))
        params = params_of(model)
        first, second = (
            tacit.regularizers.explicit_dropout(objective, seed=s).value(params) for s in (0, 1)
        )
        assert torch.equal(first, second) == same


def test_samples_by_layer_agree_with_the_exact_values():
    model, loss, data = SETTINGS["cross_entropy"]
    objective, params = tacit.Objective(model, loss, data), params_of(model)
    layers = tacit.regularizers.explicit_dropout(objective, samples=200, by_layer=True)
    assert layers.bind(params).names == ("explicit_dropout[2]", "explicit_dropout[5]")
    exact = tacit.regularizers.explicit_dropout(objective, by_layer=True).value(params)
    torch.testing.assert_close(layers.value(params), exact, rtol=0.1, atol=0)


def test_it_can_be_retrained_with():
    model, loss, data = SETTINGS["cross_entropy"]
    objective = tacit.Objective(model, loss, data)
    added = tacit.validation.penalty(
        [tacit.regularizers.explicit_dropout(objective)], {"explicit_dropout": 0.25}
    )
    leaves = {n: p.requires_grad_() for n, p in params_of(model).items()}
    added(leaves).backward()
    slope = tacit.regularizers.explicit_dropout(objective).gradient(leaves)["explicit_dropout"]
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, 0.25 * slope[name], rtol=1e-12, atol=0)
