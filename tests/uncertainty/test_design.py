"""Scores where the design is itself a mean over the examples: derivatives by example weights."""

import pytest
import torch
from support.problems import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import Objective, fit
from tacit.uncertainty.scores import score_examples


def dropping(seed, *, norm=False, outputs=1):
    torch.manual_seed(seed)
    middle = [nn.LayerNorm(7)] if norm else []
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), *middle, nn.Linear(7, 6), nn.GELU(),
        nn.Dropout(0.2), nn.Linear(6, outputs),
    ).double()  # fmt: skip


def strengths(found):
    return torch.tensor(list(found.strengths.values()), dtype=torch.float64)


FAMILIES = {
    "gradient_norm": lambda o: [tacit.l2(), tacit.regularizers.gradient_norm(o)],
    "gradient_norm in scope": lambda o: [
        tacit.l2(),
        tacit.regularizers.gradient_norm(o, scope="*.weight"),
    ],
    "explicit_dropout": lambda o: [tacit.l2(), tacit.regularizers.explicit_dropout(o)],
    "by layer": lambda o: [
        tacit.regularizers.explicit_dropout(o, by_layer=True, scope="*.weight"),
        tacit.l2(),
    ],
    "sampled": lambda o: [tacit.l2(), tacit.regularizers.explicit_dropout(o, samples=2)],
    "both": lambda o: [
        tacit.regularizers.gradient_norm(o),
        tacit.regularizers.explicit_dropout(o),
        tacit.smooth_l1(0.1),
    ],
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_derivatives_by_the_weights_of_examples(name, norm, known):
    model, data = dropping(0, norm=norm), random_data(0, count=12)
    generator = torch.Generator().manual_seed(1)
    weights = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)

    def solve(weights):
        objective = Objective(model, F.mse_loss, data, weights=weights, batch_size=5)
        families = FAMILIES[name](objective)
        also = {tacit.regularizers.gradient_norm(objective, name="known"): 0.05} if known else None
        equations = tacit.endpoint_equations(objective, families, known=also)
        return fit(equations), objective, families, also

    found, objective, families, also = solve(weights)
    scores = score_examples(found, objective, families, known=also)
    assert scores.notes == ()
    for i in (0, 7):
        step = 1e-4
        ahead, behind = (
            strengths(solve(weights + s * step * torch.eye(12, dtype=torch.float64)[i])[0])
            for s in (1, -1)
        )
        slope = (ahead - behind) / (2 * step)
        expected = scores.values[i] / weights.sum()
        scale = scores.values.abs().max(0).values / weights.sum()
        assert ((slope - expected).abs() / scale).max() < 1e-6


@pytest.mark.parametrize("name", ["gradient_norm", "explicit_dropout"])
def test_leaving_one_out_agrees_with_refits_to_one_part_in_n(name):
    apart = []
    for count in (40, 320):
        model, (X, y) = dropping(1), random_data(1, count=count)
        objective = Objective(model, F.mse_loss, (X, y))
        families = FAMILIES[name](objective)
        found = fit(tacit.endpoint_equations(objective, families))
        scores = score_examples(found, objective, families)
        moves, refits = scores.leave_one_out() - strengths(found), []
        for i in range(10):
            kept = torch.arange(count) != i
            part = Objective(model, F.mse_loss, (X[kept], y[kept]))
            equations = tacit.endpoint_equations(part, FAMILIES[name](part))
            refits.append(strengths(fit(equations)) - strengths(found))
        apart.append(float((moves[:10] - torch.stack(refits)).norm() / moves[:10].norm()))
    assert apart[0] < 0.3
    assert apart[1] < apart[0] / 4


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_difference_equations_and_several_outputs(loss):
    model, data = dropping(2, outputs=3), random_data(2, count=10, outputs=3)

    def solve(weights):
        technique = Objective(
            model, loss, data, weights=weights, training=True, draws=4, batch_size=4
        )
        plain = Objective(model, loss, data, weights=weights, batch_size=4)
        families = [tacit.regularizers.explicit_dropout(plain), tacit.l2()]
        equations = tacit.difference_equations(technique, plain, families, groups=2)
        return fit(equations), technique, plain, families

    weights = torch.linspace(0.5, 1.5, 10).double()
    found, technique, plain, families = solve(weights)
    scores = score_examples(found, technique, families, plain=plain)
    step = 1e-4 * torch.eye(10, dtype=torch.float64)[3]
    slope = (strengths(solve(weights + step)[0]) - strengths(solve(weights - step)[0])) / 2e-4
    scale = scores.values.abs().max(0).values / weights.sum()
    assert ((slope - scores.values[3] / weights.sum()).abs() / scale).max() < 1e-6


def test_other_data_and_lost_rank_hold_the_design_fixed_and_say_so():
    model, (X, y) = dropping(3), random_data(3, count=30)
    objective, other = (Objective(model, F.mse_loss, (X[:n], y[:n])) for n in (30, 20))
    families = [tacit.l2(), tacit.regularizers.gradient_norm(other)]
    found = fit(tacit.endpoint_equations(objective, families))
    scores = score_examples(found, objective, families)
    assert "columns of gradient_norm held fixed" in scores.error_bars().basis
    part = Objective(model, F.mse_loss, (X[:12], y[:12]))
    expected = strengths(fit(tacit.endpoint_equations(part, families)))
    torch.testing.assert_close(strengths(found) + scores.values[:12].mean(0), expected)
    families = [
        tacit.regularizers.gradient_norm(objective),
        tacit.regularizers.gradient_norm(objective, name="again"),
    ]
    found = fit(tacit.endpoint_equations(objective, families))
    assert len(score_examples(found, objective, families).notes) == 2


def test_the_same_tensors_in_another_objective_are_the_same_data():
    model, (X, y) = tanh_mlp(4), random_data(4, count=30)
    objective, again = (Objective(model, F.mse_loss, (X, y)) for _ in range(2))
    found, values = [], []
    for read in (objective, again):
        families = [tacit.l2(), tacit.regularizers.gradient_norm(read)]
        found.append(fit(tacit.endpoint_equations(objective, families)))
        values.append(score_examples(found[-1], objective, families).values)
    torch.testing.assert_close(*values)


def test_passes_over_a_shuffling_loader_are_paired():
    model, data = tanh_mlp(5), random_data(5, count=30)
    loader = DataLoader(TensorDataset(*data), batch_size=8, shuffle=True)
    shuffled, plain = (Objective(model, F.mse_loss, given) for given in (loader, data))
    covariances = []
    for objective in (shuffled, plain):
        families = [tacit.l2(), tacit.regularizers.gradient_norm(objective)]
        found = fit(tacit.endpoint_equations(objective, families))
        scores = score_examples(found, objective, families)
        covariances.append(scores.error_bars().covariance)
    torch.testing.assert_close(*covariances, rtol=1e-8, atol=0)

    class Restless:
        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            order = torch.randperm(30, generator=torch.Generator().manual_seed(self.passes))
            return iter([tuple(t[order] for t in data)])

    restless = Objective(model, F.mse_loss, Restless())
    families = [tacit.l2(), tacit.regularizers.gradient_norm(restless)]
    found = fit(tacit.endpoint_equations(restless, families))
    with pytest.raises(tacit.InputError, match="another order at every pass"):
        score_examples(found, restless, families)
