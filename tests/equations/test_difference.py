"""What a technique adds, at any weights: label smoothing exactly, dropout on average."""

import pytest
import torch
from support.models import loss_of, params_of, random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference


def classes(seed, count=50, inputs=6, kinds=4):
    X, _ = random_data(seed, count=count, inputs=inputs)
    return X, torch.randint(0, kinds, (count,), generator=torch.Generator().manual_seed(seed))


def smoothing_penalty(model, data):
    """R = mean[−mean_k log p_k + log p_y], whose strength under smoothing ε is ε."""

    def penalty(log_p, target):
        return (-log_p.mean(1) + log_p.gather(1, target[:, None])[:, 0]).mean()

    X, y = data

    def function(params):
        return penalty(F.log_softmax(torch.func.functional_call(model, params, (X,)), 1), y)

    return tacit.regularizer("smoothing", function)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.4])
@pytest.mark.parametrize("seed", [0, 1])
def test_label_smoothing_is_its_own_penalty_at_any_weights(epsilon, seed):
    torch.manual_seed(seed)
    model, data = nn.Linear(6, 4).double(), classes(seed)
    smoothed = tacit.Objective(model, nn.CrossEntropyLoss(label_smoothing=epsilon), data)
    plain = tacit.Objective(model, F.cross_entropy, data)
    found = tacit.fit(
        tacit.difference_equations(smoothed, plain, [smoothing_penalty(model, data), tacit.l2()])
    )
    assert found.strengths["smoothing"] == pytest.approx(epsilon, rel=1e-8)
    assert found.strengths["l2"] == pytest.approx(0, abs=1e-10)
    assert found.explained == pytest.approx(1, abs=1e-10)
    assert not found.problems


def test_the_target_is_the_dense_difference():
    torch.manual_seed(2)
    model, data = nn.Linear(6, 4).double(), classes(2)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.2)
    params = params_of(model)
    equations = tacit.difference_equations(
        tacit.Objective(model, smooth, data),
        tacit.Objective(model, F.cross_entropy, data),
        [tacit.l2(), tacit.smooth_l1(0.1)],
    )
    design = reference.design([tacit.l2(), tacit.smooth_l1(0.1)], params)
    target = reference.difference_target(
        loss_of(model, smooth, data), loss_of(model, F.cross_entropy, data), params
    )
    dense = torch.cat([design, target[:, None]], dim=1)
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, dense.T @ dense, rtol=1e-12, atol=1e-14)


def dropout_pair(draws, seed=0):
    torch.manual_seed(3)
    q = 0.2
    model = nn.Sequential(nn.Dropout(q), nn.Linear(6, 1, bias=False)).double()
    data = random_data(4, count=40, inputs=6)
    noisy = tacit.Objective(model, F.mse_loss, data, training=True, draws=draws, seed=seed)
    return model, data, noisy, tacit.Objective(model, F.mse_loss, data), q


def test_dropout_on_the_inputs_of_a_linear_model_is_weighted_ridge():
    _model, (X, _), noisy, plain, q = dropout_pair(draws=400)
    second = (X**2).mean(0)

    def weighted(params):
        return (second * params["1.weight"][0] ** 2).sum()

    equations = tacit.difference_equations(noisy, plain, [tacit.regularizer("weighted", weighted)])
    found = tacit.fit(equations)
    assert equations.targets == 8
    # Mean squared error has no half here, so the law q/(1−q) is for the penalty without a half.
    assert found.strengths["weighted"] == pytest.approx(q / (1 - q), rel=0.05)
    assert found.explained == pytest.approx(1, abs=0.02)


def test_groups_split_the_draws_and_average_to_the_whole():
    _, _, noisy, plain, _ = dropout_pair(draws=6, seed=1)
    two = tacit.difference_equations(noisy, plain, [tacit.l2()], groups=2)
    one = tacit.difference_equations(noisy, plain, [tacit.l2()], groups=1)
    assert (two.targets, one.targets) == (2, 1)
    mean = two.factor()[:, 1:].mean(1, keepdim=True)
    torch.testing.assert_close(
        two.factor()[:, :1].T @ mean,
        one.factor()[:, :1].T @ one.factor()[:, 1:],
        rtol=1e-12,
        atol=1e-14,
    )


def test_noise_on_the_plain_side_gives_the_same_with_the_other_sign():
    _, _, noisy, plain, _ = dropout_pair(draws=6, seed=1)
    ahead = tacit.difference_equations(noisy, plain, [tacit.l2()], groups=3).factor()
    back = tacit.difference_equations(plain, noisy, [tacit.l2()], groups=3).factor()
    torch.testing.assert_close(
        back[:, :1].T @ back[:, 1:], -ahead[:, :1].T @ ahead[:, 1:], rtol=1e-12, atol=1e-14
    )


def test_targets_of_pure_noise_are_no_signal():
    silent = 0
    for seed in range(20):
        _, _, noisy, _, _ = dropout_pair(draws=2, seed=100 + seed)
        _, _, other, _, _ = dropout_pair(draws=2, seed=200 + seed)
        found = tacit.fit(tacit.difference_equations(noisy, other, [tacit.l2()]))
        silent += not {problem.kind for problem in found.problems} & {"no signal", "noisy"}
    assert silent <= 1


def test_few_draws_are_called_noisy_and_many_are_not():
    kinds = {}
    for draws in (8, 400):
        _, _, noisy, plain, _ = dropout_pair(draws=draws, seed=7)
        found = tacit.fit(tacit.difference_equations(noisy, plain, [tacit.l2()]))
        kinds[draws] = {problem.kind for problem in found.problems}
    assert kinds[8] & {"noisy", "no signal"}
    assert not kinds[400] & {"noisy", "no signal"}


def test_a_deterministic_technique_needs_no_draws():
    torch.manual_seed(5)
    model, data = nn.Linear(6, 4).double(), classes(5)
    plain = tacit.Objective(model, F.cross_entropy, data)
    equations = tacit.difference_equations(plain, plain, [tacit.l2()])
    assert equations.targets == 1
    assert [problem.kind for problem in tacit.fit(equations).problems] == ["no signal"]
