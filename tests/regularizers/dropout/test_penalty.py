"""The explicit regularizer of dropout against dense Jacobians, and against an exact expectation."""

from itertools import product

import pytest
import torch
from support.dense_dropout import (
    assert_equal_to_dense,
    class_data,
    dense_penalties,
    dropout_mlp,
    flat_gradient,
    full_hessian,
    split_at_dropout,
)
from support.models import params_of, random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import explicit_dropout


def quartic(output, target):
    """A loss whose Hessian is neither constant nor diagonal."""
    return ((output - target).sum(1) ** 4 + (output - target).cosh().prod(1)).mean()


SETTINGS = {
    "cross_entropy": (dropout_mlp(), F.cross_entropy, class_data()),
    "mse": (dropout_mlp(1, (4, 6, 5, 2)), F.mse_loss, random_data(1, count=7, inputs=4, outputs=2)),
    "custom": (dropout_mlp(2, (4, 5, 2)), quartic, random_data(2, count=5, inputs=4, outputs=2)),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


@every_setting
def test_values_and_gradients_equal_those_of_dense_jacobians(setting):
    model, loss, data = setting
    functions = dense_penalties(split_at_dropout(model), loss, data)
    objective, params = tacit.Objective(model, loss, data, batch_size=3), params_of(model)
    assert_equal_to_dense(explicit_dropout(objective, by_layer=True), params, functions)
    all_layers = [lambda params: sum(f(params) for f in functions)]
    assert_equal_to_dense(explicit_dropout(objective), params, all_layers)


@every_setting
def test_the_mode_and_the_batch_size_of_the_objective_do_not_matter(setting):
    model, loss, data = setting
    params = params_of(model)
    penalties = [
        explicit_dropout(tacit.Objective(model.train(), loss, data, **options))
        for options in ({}, {"batch_size": 2}, {"training": True, "draws": 3, "batch_size": 5})
    ]
    for measure in (lambda r: r.value(params), lambda r: flat_gradient(r, params)):
        for penalty in penalties[1:]:
            expected = measure(penalties[0])
            torch.testing.assert_close(measure(penalty), expected, rtol=1e-12, atol=1e-14)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_count_as_copies_of_examples():
    model, loss, (X, y) = SETTINGS["cross_entropy"]
    counts, params = torch.tensor([1, 0, 2, 3, 1, 0, 1]), params_of(model)
    copies = X.repeat_interleave(counts, 0), y.repeat_interleave(counts)
    weighted = explicit_dropout(tacit.Objective(model, loss, (X, y), weights=counts, batch_size=4))
    copied = explicit_dropout(tacit.Objective(model, loss, copies))
    torch.testing.assert_close(weighted.value(params), copied.value(params), rtol=1e-12, atol=0)
    gradient = weighted.gradient(params)[weighted.name]
    for name, expected in copied.gradient(params)[copied.name].items():
        torch.testing.assert_close(gradient[name], expected, rtol=1e-11, atol=1e-14)


def test_the_penalty_can_be_retrained_with():
    model, loss, data = SETTINGS["cross_entropy"]
    objective = tacit.Objective(model, loss, data)
    penalty = tacit.validation.penalty([explicit_dropout(objective)], {"explicit_dropout": 0.25})
    leaves = {n: p.requires_grad_() for n, p in params_of(model).items()}
    penalty(leaves).backward()
    gradient = explicit_dropout(objective).gradient(leaves)["explicit_dropout"]
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, 0.25 * gradient[name], rtol=1e-12, atol=0)


# The expectation over dropout masks, computed exactly by listing all masks of a small network.


def all_masks(model):
    """Every joint mask of the dropout layers, scaled as torch does, and its probability."""
    widths = [model[i - 2].out_features for i, m in enumerate(model) if isinstance(m, nn.Dropout)]
    rate = next(m.p for m in model if isinstance(m, nn.Dropout))
    masks = torch.tensor(list(product([0.0, 1.0], repeat=sum(widths))), dtype=torch.float64)
    probabilities = (masks * (1 - rate) + (1 - masks) * rate).prod(1)
    return (masks / (1 - rate)).split(widths, dim=1), probabilities


def exact_dropout_objective(model, example_losses, data):
    """The objective with dropout, its expectation over masks taken exactly."""
    masks, probabilities = all_masks(model)

    def expected_losses(model, batch):
        x, y = batch
        remaining = iter(masks)
        for layer in model:
            x = x * next(remaining)[:, None] if isinstance(layer, nn.Dropout) else layer(x)
        return probabilities @ torch.func.vmap(example_losses, in_dims=(0, None))(x, y)

    return tacit.Objective.from_batch_loss(model, expected_losses, data)


def squared_errors(output, target):
    return (output - target).square().mean(1)


def cross_entropies(output, target):
    return F.cross_entropy(output, target, reduction="none")


def fit_effect_of_dropout(model, loss, example_losses, data):
    """Explain the marginal effect of dropout on the gradient by its explicit regularizer."""
    plain = tacit.Objective(model, loss, data)
    with_dropout = exact_dropout_objective(model, example_losses, data)
    return tacit.fit(tacit.difference_equations(with_dropout, plain, [explicit_dropout(plain)]))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_it_is_exact_for_dropout_on_the_last_hidden_layer_under_squared_loss(rate):
    model, data = dropout_mlp(3, (4, 6, 2), rate), random_data(3, count=12, inputs=4, outputs=2)
    effect = fit_effect_of_dropout(model, F.mse_loss, squared_errors, data)
    assert effect.strengths["explicit_dropout"] == pytest.approx(rate / (1 - rate), rel=1e-10)
    assert effect.explained == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_strength_is_q_over_one_minus_q_if_no_single_unit_matters_much(seed):
    model, rate, (X, y) = dropout_mlp(seed, rate=0.02), 0.02, class_data(seed, count=200)
    effect = fit_effect_of_dropout(model, F.cross_entropy, cross_entropies, (0.3 * X, y))
    assert effect.strengths["explicit_dropout"] == pytest.approx(rate / (1 - rate), rel=0.03)
    assert effect.explained > 0.98


def test_what_it_leaves_out_is_the_curvature_behind_the_layers():
    """With the full ∇²_h of the loss instead of JᵀHJ, little remains unexplained."""
    model, rate, data = dropout_mlp(0, rate=0.02), 0.02, class_data(0, count=20)
    sides = split_at_dropout(model)
    functions = dense_penalties(sides, F.cross_entropy, data, matrix=full_hessian)
    full = tacit.regularizer("full", lambda params: sum(f(params) for f in functions))
    plain = tacit.Objective(model, F.cross_entropy, data)
    with_dropout = exact_dropout_objective(model, cross_entropies, data)
    by_explicit, by_full = (
        tacit.fit(tacit.difference_equations(with_dropout, plain, [penalty]))
        for penalty in (explicit_dropout(plain), full)
    )
    assert by_explicit.explained < 0.95
    assert by_full.explained > 0.99
    assert by_full.strengths["full"] == pytest.approx(rate / (1 - rate), rel=0.03)


# Random signs.


@every_setting
def test_samples_average_to_the_exact_value_and_gradient(setting):
    model, loss, data = setting
    objective, params = tacit.Objective(model, loss, data, batch_size=4), params_of(model)
    exact = explicit_dropout(objective)
    sampled = [explicit_dropout(objective, samples=10, seed=seed) for seed in range(12)]
    for measure in (lambda r: r.value(params), lambda r: flat_gradient(r, params)):
        estimates = torch.stack([measure(penalty) for penalty in sampled])
        standard_error = estimates.std(0).norm() / len(sampled) ** 0.5
        error = (estimates.mean(0) - measure(exact)).norm()
        assert float(error) < 3 * float(standard_error)
        assert float(standard_error) < 0.2 * float(measure(exact).norm())


def test_samples_depend_only_on_their_seed():
    model, loss, data = SETTINGS["cross_entropy"]
    objective, params = tacit.Objective(model, loss, data), params_of(model)
    gradients = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 100)
        gradients.append(flat_gradient(explicit_dropout(objective, samples=2, seed=seed), params))
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])


def test_equal_weights_do_not_change_samples():
    model, loss, data = SETTINGS["cross_entropy"]
    unweighted, weighted = (
        explicit_dropout(tacit.Objective(model, loss, data, weights=weights), samples=2)
        for weights in (None, torch.full((7,), 2.5))
    )
    gradients = (flat_gradient(penalty, params_of(model)) for penalty in (unweighted, weighted))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("outputs", "exact"), [(32, True), (33, False)])
def test_the_default_is_exact_up_to_32_outputs_and_sampled_beyond(outputs, exact):
    model = dropout_mlp(4, (4, 5, outputs))
    objective = tacit.Objective(model, F.cross_entropy, class_data(4, classes=outputs))
    first, second = (
        explicit_dropout(objective, seed=seed).value(params_of(model)) for seed in (0, 1)
    )
    assert torch.equal(first, second) == exact


def test_samples_by_layer_agree_with_the_exact_values():
    model, loss, data = SETTINGS["cross_entropy"]
    objective, params = tacit.Objective(model, loss, data), params_of(model)
    sampled = explicit_dropout(objective, samples=200, by_layer=True)
    assert sampled.bind(params).names == ("explicit_dropout[2]", "explicit_dropout[5]")
    exact = explicit_dropout(objective, by_layer=True)
    torch.testing.assert_close(sampled.value(params), exact.value(params), rtol=0.1, atol=0)


# Options.


def test_objectives_of_other_forms_and_wrong_options_are_refused():
    model, data = dropout_mlp(0), class_data()
    plain = tacit.Objective(model, F.cross_entropy, data)
    by_batch_loss = tacit.Objective.from_batch_loss(
        model, lambda model, batch: cross_entropies(model(batch[0]), batch[1]), data
    )
    for call, pattern in [
        (lambda: explicit_dropout(model), r"Sequential: pass the tacit\.Objective"),
        (lambda: explicit_dropout(by_batch_loss), r"from_batch_loss: make it as Objective\(model"),
        (lambda: explicit_dropout(plain, samples=0), "samples is 0"),
        (lambda: explicit_dropout(plain, samples=True), "samples is True"),
        (lambda: explicit_dropout(plain, seed=-1), "seed is -1"),
        (lambda: explicit_dropout(plain, by_layer=1), "by_layer is 1: pass True or False"),
        (lambda: explicit_dropout(plain, name=""), "name"),
    ]:
        with pytest.raises(tacit.InputError, match=pattern):
            call()
