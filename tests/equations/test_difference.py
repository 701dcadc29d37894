"""What a technique adds at any weights: label smoothing exactly, random techniques on average."""

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.noise import (
    half_squared_errors,
    noise_objective,
    noiseless,
    noisy_inputs,
    noisy_weights,
    without_mirrors,
)
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import tacit
from tacit import reference


def class_data(seed, count=50, inputs=6, classes=4):
    X, _ = random_data(seed, count=count, inputs=inputs)
    return X, torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def smoothing_penalty(model, data):
    """R = mean[−mean_k log p_k + log p_y], whose strength under smoothing ε is ε."""
    X, y = data

    def penalty(params):
        log_p = F.log_softmax(functional_call(model, params, (X,)), 1)
        return (-log_p.mean(1) + log_p.gather(1, y[:, None])[:, 0]).mean()

    return tacit.regularizer("smoothing", penalty)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.4])
@pytest.mark.parametrize("seed", [0, 1])
def test_label_smoothing_is_recovered_at_any_weights(epsilon, seed):
    torch.manual_seed(seed)
    model, data = nn.Linear(6, 4).double(), class_data(seed)
    smoothed = tacit.Objective(model, nn.CrossEntropyLoss(label_smoothing=epsilon), data)
    plain = tacit.Objective(model, F.cross_entropy, data)
    fit = tacit.fit(
        tacit.difference_equations(smoothed, plain, [smoothing_penalty(model, data), tacit.l2()])
    )
    assert fit.strengths["smoothing"] == pytest.approx(epsilon, rel=1e-8)
    assert fit.strengths["l2"] == pytest.approx(0, abs=1e-10)
    assert fit.explained == pytest.approx(1, abs=1e-10)
    assert not fit.problems


def test_equations_equal_the_dense_difference():
    torch.manual_seed(2)
    model, data = nn.Linear(6, 4).double(), class_data(2)
    smoothed_loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    params = params_of(model)
    equations = tacit.difference_equations(
        tacit.Objective(model, smoothed_loss, data),
        tacit.Objective(model, F.cross_entropy, data),
        [tacit.l2(), tacit.smooth_l1(0.1)],
    )
    design = reference.design([tacit.l2(), tacit.smooth_l1(0.1)], params)
    target = reference.difference_target(
        loss_of(model, smoothed_loss, data), loss_of(model, F.cross_entropy, data), params
    )
    rows = torch.cat([design, target[:, None]], dim=1)
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, rows.T @ rows, rtol=1e-12, atol=1e-14)


DROPOUT = 0.2


def linear_data():
    return random_data(4, count=40, inputs=6)


def dropout_objectives(draws, seed=0):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(6, 1, bias=False)).double()
    data = linear_data()
    technique = tacit.Objective(model, F.mse_loss, data, training=True, draws=draws, seed=seed)
    return technique, tacit.Objective(model, F.mse_loss, data)


def test_dropout_on_the_inputs_of_a_linear_model_is_weighted_ridge():
    technique, plain = dropout_objectives(draws=400)
    second_moments = (linear_data()[0] ** 2).mean(0)

    def weighted_ridge(params):
        return (second_moments * params["1.weight"][0] ** 2).sum()

    equations = tacit.difference_equations(
        technique, plain, [tacit.regularizer("weighted", weighted_ridge)]
    )
    fit = tacit.fit(equations)
    assert equations.targets == 8
    # Mean squared error has no half here, so the law q/(1−q) is for the penalty without a half.
    assert fit.strengths["weighted"] == pytest.approx(DROPOUT / (1 - DROPOUT), rel=0.05)
    assert fit.explained == pytest.approx(1, abs=0.02)


def test_groups_split_the_draws_and_average_to_the_whole():
    technique, plain = dropout_objectives(draws=6, seed=1)
    two_groups = tacit.difference_equations(technique, plain, [tacit.l2()], groups=2)
    one_group = tacit.difference_equations(technique, plain, [tacit.l2()], groups=1)
    assert (two_groups.targets, one_group.targets) == (2, 1)
    mean = two_groups.factor()[:, 1:].mean(1, keepdim=True)
    torch.testing.assert_close(
        two_groups.factor()[:, :1].T @ mean,
        one_group.factor()[:, :1].T @ one_group.factor()[:, 1:],
        rtol=1e-12,
        atol=1e-14,
    )


def test_swapping_the_objectives_flips_the_sign_of_the_target():
    technique, plain = dropout_objectives(draws=6, seed=1)
    factor = tacit.difference_equations(technique, plain, [tacit.l2()], groups=3).factor()
    swapped = tacit.difference_equations(plain, technique, [tacit.l2()], groups=3).factor()
    torch.testing.assert_close(
        swapped[:, :1].T @ swapped[:, 1:], -factor[:, :1].T @ factor[:, 1:], rtol=1e-12, atol=1e-14
    )


def test_targets_of_pure_noise_are_reported():
    unreported = 0
    for seed in range(20):
        technique, _ = dropout_objectives(draws=2, seed=100 + seed)
        other, _ = dropout_objectives(draws=2, seed=200 + seed)
        fit = tacit.fit(tacit.difference_equations(technique, other, [tacit.l2()]))
        unreported += not {problem.kind for problem in fit.problems} & {"no signal", "noisy"}
    assert unreported <= 1


def test_few_draws_are_reported_as_noisy_and_many_are_not():
    kinds = {}
    for draws in (8, 400):
        technique, plain = dropout_objectives(draws=draws, seed=7)
        fit = tacit.fit(tacit.difference_equations(technique, plain, [tacit.l2()]))
        kinds[draws] = {problem.kind for problem in fit.problems}
    assert kinds[8] & {"noisy", "no signal"}
    assert not kinds[400] & {"noisy", "no signal"}


def test_a_deterministic_technique_needs_no_draws():
    torch.manual_seed(5)
    model, data = nn.Linear(6, 4).double(), class_data(5)
    plain = tacit.Objective(model, F.cross_entropy, data)
    equations = tacit.difference_equations(plain, plain, [tacit.l2()])
    assert equations.targets == 1
    assert [problem.kind for problem in tacit.fit(equations).problems] == ["no signal"]


def test_a_mirrored_pair_of_signs_is_exactly_ridge():
    """One input, x ± σ: the mean over a pair is L + σ²/2 · w², for any signs."""
    sigma, (X, y) = 0.3, random_data(0, inputs=1)
    model = nn.Linear(1, 1, bias=False).double()

    def batch_loss(model, batch, noise):
        X, y = batch
        return half_squared_errors(model(X + sigma * noise.signs(X)), y)

    technique = noise_objective(model, batch_loss, (X, y), training=True, draws=4, batch_size=17)
    equations = tacit.difference_equations(
        technique, noise_objective(model, noiseless, (X, y)), [tacit.l2()]
    )
    fit = tacit.fit(equations)
    assert equations.targets == 2
    assert fit.strengths["l2"] == pytest.approx(sigma**2 / 2, rel=1e-12)


def test_noise_of_the_inputs_is_ridge_in_linear_regression():
    """The coefficient of ½‖w‖² is σ²."""
    sigma, data = 0.1, random_data(1, count=200)
    torch.manual_seed(1)
    model = nn.Linear(5, 1).double()
    technique = noise_objective(model, noisy_inputs(sigma), data, training=True, draws=200)
    equations = tacit.difference_equations(
        technique, noise_objective(model, noiseless, data), [tacit.l2(scope="weight")]
    )
    fit = tacit.fit(equations)
    (strength,) = fit.strengths.values()
    ((low, high),) = fit.intervals(0.999)["draws"].values()
    assert low < sigma**2 / 2 < high
    assert strength == pytest.approx(sigma**2 / 2, rel=0.02)
    assert equations.targets == 8


def trace_of_the_hessian(model, data):
    X, y = data
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def mean_loss(flat):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        params = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        return half_squared_errors(functional_call(model, params, (X,)), y).mean()

    def trace(params):
        flat = torch.cat([params[n].flatten() for n in shapes])
        return torch.func.jacrev(torch.func.grad(mean_loss))(flat).trace()

    return tacit.regularizer("trace", trace)


def test_noise_of_the_weights_is_the_trace_of_the_hessian():
    sigma, data, model = 0.03, random_data(2), tanh_mlp(2, (5, 4, 1))
    technique = noise_objective(model, noisy_weights(sigma), data, training=True, draws=600)
    equations = tacit.difference_equations(
        technique, noise_objective(model, noiseless, data), [trace_of_the_hessian(model, data)]
    )
    fit = tacit.fit(equations)
    assert fit.strengths["trace"] == pytest.approx(sigma**2 / 2, rel=0.1)
    assert fit.explained == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_mirrored_draws_have_a_tenth_of_the_error_for_small_noise():
    """Standard deviations over seeds, for equally many draws: 12 and 18 times smaller."""
    data, model = random_data(3), tanh_mlp(3, (5, 4, 1))
    plain, ratios = noise_objective(model, noiseless, data), {}
    for name, technique in {"inputs": noisy_inputs(0.1), "weights": noisy_weights(0.03)}.items():
        deviations = []
        for batch_loss in (technique, without_mirrors(technique)):
            strengths = [
                tacit.fit(
                    tacit.difference_equations(
                        noise_objective(model, batch_loss, data, training=True, draws=8, seed=seed),
                        plain,
                        [tacit.l2()],
                    )
                ).strengths["l2"]
                for seed in range(20)
            ]
            deviations.append(float(torch.tensor(strengths).std()))
        ratios[name] = deviations[1] / deviations[0]
    assert ratios["inputs"] > 8
    assert ratios["weights"] > 12


def test_mirrored_pairs_of_draws_stay_in_one_group():
    data, model = random_data(4), tanh_mlp(4, (5, 4, 1))
    technique = noise_objective(model, noisy_inputs(0.2), data, training=True, draws=10)
    plain, params = noise_objective(model, noiseless, data), params_of(model)
    equations = tacit.difference_equations(technique, plain, [tacit.l2()], groups=2)
    expected = []
    for draws in ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7]):
        _, gradient = technique.value_and_gradient(params, draws=draws)
        expected.append(
            sum(((gradient[n] - g) * params[n]).sum() for n, g in plain.gradient().items())
        )
    factor = equations.factor()
    inner = factor[:, 0] @ factor[:, 1:] / 2
    torch.testing.assert_close(inner, torch.stack(expected), rtol=1e-10, atol=1e-14)
    assert tacit.difference_equations(technique, plain, [tacit.l2()]).targets == 5


def test_fewer_mirrored_pairs_than_groups_are_refused():
    model, data = tanh_mlp(6), random_data(6)
    plain = noise_objective(model, noiseless, data)
    technique = noise_objective(model, noisy_inputs(0.1), data, training=True, draws=4)
    with pytest.raises(
        tacit.InputError, match=r"4 draws cannot make 3 groups of mirrored.*draws=6"
    ):
        tacit.difference_equations(technique, plain, [tacit.l2()], groups=3)
    single = noise_objective(model, without_mirrors(noisy_inputs(0.1)), data, training=True)
    with pytest.raises(tacit.InputError, match=r"1 draws cannot make 2 groups"):
        tacit.difference_equations(single, plain, [tacit.l2()])


@pytest.mark.parametrize("frozen", ["technique", "plain"])
def test_objectives_that_train_different_parameters_are_refused(frozen):
    pair = {}
    for name in ("technique", "plain"):
        model = tanh_mlp(0)
        model[0].weight.requires_grad_(name != frozen)
        pair[name] = tacit.Objective(model, F.mse_loss, random_data(1))
    with pytest.raises(tacit.InputError, match=r"trains 0\.weight, and the .* does not"):
        tacit.difference_target(pair["technique"], pair["plain"])
