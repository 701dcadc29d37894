"""Scores where columns of the design are means over the examples: derivatives by their weights."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.scoring import fit_and_score, fit_endpoint, strengths_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import InputError, Objective, score_examples
from tacit.regularizers import (
    activation_norm,
    explicit_dropout,
    gradient_l1,
    gradient_norm,
    gradient_variance,
    input_jacobian,
    input_laplacian,
    mean_of,
)


def dropout_network(seed, *, norm=False, outputs=1):
    torch.manual_seed(seed)
    middle = [nn.LayerNorm(7)] if norm else []
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), *middle, nn.Linear(7, 6), nn.GELU(),
        nn.Dropout(0.2), nn.Linear(6, outputs),
    ).double()  # fmt: skip


def assert_scores_are_derivatives(fit_with_weights, scores, weights, examples, *, step, tolerance):
    """Compare ψ_i/Σw with central differences of λ̂ by the weight of example i."""
    scale = scores.values.abs().max(0).values / weights.sum()
    for i in examples:
        change = torch.zeros_like(weights)
        change[i] = step
        ahead = strengths_of(fit_with_weights(weights + change))
        behind = strengths_of(fit_with_weights(weights - change))
        derivative = (ahead - behind) / (2 * step)
        error = (derivative - scores.values[i] / weights.sum()).abs() / scale
        assert error.max() < tolerance


REGULARIZERS = {
    "gradient_norm": lambda o: [tacit.l2(), gradient_norm(o)],
    "gradient_norm in scope": lambda o: [tacit.l2(), gradient_norm(o, scope="*.weight")],
    "explicit_dropout": lambda o: [tacit.l2(), explicit_dropout(o)],
    "by layer": lambda o: [explicit_dropout(o, by_layer=True, scope="*.weight"), tacit.l2()],
    "sampled": lambda o: [tacit.l2(), explicit_dropout(o, samples=2)],
    "both": lambda o: [gradient_norm(o), explicit_dropout(o), tacit.smooth_l1(0.1)],
}


@pytest.mark.parametrize("has_known", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_scores_are_derivatives_by_the_weights_of_examples(name, norm, has_known):
    model, data = dropout_network(0, norm=norm), random_data(0, count=12)
    generator = torch.Generator().manual_seed(1)
    weights = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)

    def setting(weights):
        objective = Objective(model, F.mse_loss, data, weights=weights, batch_size=5)
        known = {gradient_norm(objective, name="known"): 0.05} if has_known else None
        return objective, REGULARIZERS[name](objective), known

    def fit_with_weights(weights):
        objective, regularizers, known = setting(weights)
        return fit_endpoint(objective, regularizers, known=known)

    objective, regularizers, known = setting(weights)
    _, scores = fit_and_score(objective, regularizers, known=known)
    assert scores.notes == ()
    assert scores.design_varies
    assert_scores_are_derivatives(
        fit_with_weights, scores, weights, (0, 7), step=1e-4, tolerance=1e-6
    )


def fourth_powers(objective):
    """The mean fourth power of the outputs, over the examples of another objective."""

    def penalties(model, batch):
        return model(batch[0])[:, 0] ** 4

    options = {"weights": objective.weights, "batch_size": 5}
    return mean_of(Objective.from_batch_loss(objective.model, penalties, objective.data, **options))


OTHERS = {
    "mean_of": fourth_powers,
    "gradient_norm of power 1": lambda o: gradient_norm(o, power=1),
    "gradient_norm of a layer": lambda o: gradient_norm(o, of="3", scope="*.weight"),
    "gradient_l1": lambda o: gradient_l1(o, eps=0.01),
    "input_jacobian": input_jacobian,
    "input_laplacian": lambda o: input_laplacian(o, scope="0"),
    "activation_norm": activation_norm,
    "weighted activation_norm": lambda o: activation_norm(o, layers="*", weighted=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_influence_of_examples_on_columns_from_data_is_followed(name):
    model, data = dropout_network(0), random_data(0, count=12)
    generator = torch.Generator().manual_seed(1)
    weights = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)

    def setting(weights):
        objective = Objective(model, F.mse_loss, data, weights=weights, batch_size=5)
        return objective, [tacit.l2(), OTHERS[name](objective)]

    _, scores = fit_and_score(*setting(weights))
    assert scores.notes == ()
    assert_scores_are_derivatives(
        lambda weights: fit_endpoint(*setting(weights)),
        scores, weights, [7], step=1e-4, tolerance=1e-6,
    )  # fmt: skip


def test_a_mean_over_other_examples_or_with_weights_of_its_own_is_treated_as_fixed():
    model, (X, y) = tanh_mlp(4), random_data(4, count=30)
    objective = Objective(model, F.mse_loss, (X, y))

    def squares(model, batch):
        return model(batch[0]).square().squeeze(1)

    def weighted_squares(model, batch):
        return squares(model, batch), batch[0][:, 0].abs()

    for losses, data in ((squares, (X[:20], y[:20])), (weighted_squares, (X, y))):
        penalty = mean_of(Objective.from_batch_loss(model, losses, data))
        _, scores = fit_and_score(objective, [tacit.l2(), penalty])
        assert scores.notes == ("columns of mean_of treated as fixed",)


def test_columns_that_do_not_tell_their_influence_are_named():
    model, data = tanh_mlp(4), random_data(4, count=30)
    objective = Objective(model, F.mse_loss, data, batch_size=10)
    _, scores = fit_and_score(objective, [tacit.l2(), gradient_variance(objective)])
    assert scores.notes == ("columns of gradient_variance treated as fixed",)


@pytest.mark.parametrize("name", ["gradient_norm", "explicit_dropout"])
def test_leaving_one_out_agrees_with_refits_to_first_order_in_one_over_n(name):
    errors = []
    for count in (40, 320):
        model, (X, y) = dropout_network(1), random_data(1, count=count)
        objective = Objective(model, F.mse_loss, (X, y))
        fit, scores = fit_and_score(objective, REGULARIZERS[name](objective))
        changes, refitted = scores.leave_one_out() - strengths_of(fit), []
        for i in range(10):
            others = torch.arange(count) != i
            part = Objective(model, F.mse_loss, (X[others], y[others]))
            refit = fit_endpoint(part, REGULARIZERS[name](part))
            refitted.append(strengths_of(refit) - strengths_of(fit))
        error = (changes[:10] - torch.stack(refitted)).norm() / changes[:10].norm()
        errors.append(float(error))
    assert errors[0] < 0.3
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_difference_equations_with_several_outputs_are_scored(loss):
    model, data = dropout_network(2, outputs=3), random_data(2, count=10, outputs=3)

    def setting(weights):
        options = {"weights": weights, "batch_size": 4}
        technique = Objective(model, loss, data, training=True, draws=4, **options)
        plain = Objective(model, loss, data, **options)
        return technique, plain, [explicit_dropout(plain), tacit.l2()]

    def fit_with_weights(weights):
        return tacit.fit(tacit.difference_equations(*setting(weights), groups=2))

    weights = torch.linspace(0.5, 1.5, 10).double()
    scores = score_examples(fit_with_weights(weights))
    assert_scores_are_derivatives(fit_with_weights, scores, weights, [3], step=1e-4, tolerance=1e-6)


def test_unequal_groups_of_draws_score_the_target_that_was_fitted():
    data = random_data(5, count=12, outputs=2)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 2)).double()

    def setting(weights):
        plain = Objective(model, F.mse_loss, data, weights=weights)
        options = {"training": True, "draws": 9, "seed": 1, "weights": weights}
        technique = Objective(model, F.mse_loss, data, **options)
        return technique, plain, [tacit.l2(), explicit_dropout(plain)]

    def fit_with_weights(weights):
        return tacit.fit(tacit.difference_equations(*setting(weights)))

    ones = torch.ones(12).double()
    scores = score_examples(fit_with_weights(ones))
    step = 1e-5
    for i in (0, 7):
        change = step * torch.eye(12, dtype=torch.float64)[i]
        ahead, behind = fit_with_weights(ones + change), fit_with_weights(ones - change)
        derivative = (strengths_of(ahead) - strengths_of(behind)) / (2 * step)
        torch.testing.assert_close(scores.values[i] / 12, derivative, rtol=1e-4, atol=1e-8)


def test_columns_of_other_data_and_undetermined_strengths_are_treated_as_fixed_with_a_note():
    model, (X, y) = dropout_network(3), random_data(3, count=30)
    objective, other = (Objective(model, F.mse_loss, (X[:n], y[:n])) for n in (30, 20))
    regularizers = [tacit.l2(), gradient_norm(other)]
    fit, scores = fit_and_score(objective, regularizers)
    assert "columns of gradient_norm treated as fixed" in scores.error_bars().basis
    assert not scores.design_varies
    part = Objective(model, F.mse_loss, (X[:12], y[:12]))
    expected = strengths_of(fit_endpoint(part, regularizers))
    torch.testing.assert_close(strengths_of(fit) + scores.values[:12].mean(0), expected)
    twice = [gradient_norm(objective), gradient_norm(objective, name="again")]
    _, scores = fit_and_score(objective, twice)
    assert len(scores.notes) == 2


def test_the_same_tensors_in_another_objective_are_the_same_data():
    model, (X, y) = tanh_mlp(4), random_data(4, count=30)
    objective, again = (Objective(model, F.mse_loss, (X, y)) for _ in range(2))
    values = [
        fit_and_score(objective, [tacit.l2(), gradient_norm(source)])[1].values
        for source in (objective, again)
    ]
    torch.testing.assert_close(*values)


def test_several_passes_over_a_shuffling_loader_see_examples_in_the_same_order():
    model, data = tanh_mlp(5), random_data(5, count=30)
    loader = DataLoader(TensorDataset(*data), batch_size=8, shuffle=True)
    covariances = []
    for source in (loader, data):
        objective = Objective(model, F.mse_loss, source)
        _, scores = fit_and_score(objective, [tacit.l2(), gradient_norm(objective)])
        covariances.append(scores.error_bars().covariance)
    torch.testing.assert_close(*covariances, rtol=1e-8, atol=0)


def test_data_in_another_order_in_every_pass_is_refused():
    model, data = tanh_mlp(5), random_data(5, count=30)

    class Reordered:
        passes = 0

        def __iter__(self):
            self.passes += 1
            order = torch.randperm(30, generator=torch.Generator().manual_seed(self.passes))
            return iter([tuple(t[order] for t in data)])

    objective = Objective(model, F.mse_loss, Reordered())
    with pytest.raises(InputError, match="does not shuffle"):
        fit_and_score(objective, [tacit.l2(), gradient_norm(objective)])
