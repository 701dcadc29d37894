"""Every batch of an epoch has the same weight, whatever momentum and schedule are."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.systems import draw
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import average_epochs
from tacit.equations.scale_free import find_scale_free
from tacit.regularizers.weight_decay import adam_metric

BATCHES = 16


def averaged_epoch(seed, *, falling):
    """The fit of one epoch, in which the step size falls to zero or stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    X, noise = torch.randn(2, 128, 6, generator=generator, dtype=torch.float64)
    y = X.sum(1, keepdim=True) + noise[:, :1]
    model = nn.Linear(6, 1, bias=False).double()
    normal = X.T @ X / 128 + 0.02 * torch.eye(6).double()
    model.weight.data = torch.linalg.solve(normal, X.T @ y / 128).T
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.04)
    averages = tacit.average_epochs(model, optimizer)
    for number, rows in enumerate(torch.randperm(128, generator=generator).split(8)):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - number / BATCHES if falling else 1)
        optimizer.zero_grad()
        F.mse_loss(model(X[rows]), y[rows]).backward()
        optimizer.step()
    averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    return tacit.fit(averages.equations(objective, tacit.l2()))


@pytest.mark.parametrize("falling", [True, False])
def test_a_schedule_within_an_epoch_leaves_nothing_unexplained(falling):
    for seed in range(5):
        fit = averaged_epoch(seed, falling=falling)
        assert fit.strengths["l2"] == pytest.approx(0.02, rel=0.15)
        assert fit.explained > 0.9  # 10 to 70 % with the weights of the schedule


RULES = {
    "SGD": (torch.optim.SGD, {}),
    "decay": (torch.optim.SGD, {"weight_decay": 0.3}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.3}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "nesterov, foreach": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "dampening": (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.3}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.3}),
    "amsgrad": (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True, "betas": (0.8, 0.9)}),
}
"""Update rules of torch, with their options."""


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_every_batch_of_an_epoch_has_the_same_weight(rule, epoch):
    """Whatever momentum and schedule are, from the first update on: the target is, by autograd,

    the mean over the updates of gradient plus decay, minus the gradient at the mean point.
    """
    make, options = RULES[rule]
    X, y = random_data(1, count=48)
    model = tanh_mlp(0)
    optimizer = make(model.parameters(), lr=1e-5, **options)
    names = [n for n, _ in model.named_parameters()]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 + t % 6)
    averages = average_epochs(model, optimizer)
    for _ in range(epoch + 1):
        points, forces = [], []
        for rows in torch.randperm(48).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            points.append([p.detach().clone() for p in model.parameters()])
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            schedule.step()
            decays = [options.get("weight_decay", 0.0)] * len(names)
            if rule in ("AdamW", "amsgrad"):
                metric = adam_metric(optimizer, model)
                decays = [metric[n] * decay for n, decay in zip(names, decays, strict=True)]
            both = zip(gradients, decays, points[-1], strict=True)
            forces.append([g + decay * p for g, decay, p in both])
        averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    (point,) = averages.target(objective).points
    mean = {
        n: torch.stack(part).mean(0)
        for n, part in zip(names, zip(*points, strict=True), strict=True)
    }
    force = {
        n: torch.stack(part).mean(0)
        for n, part in zip(names, zip(*forces, strict=True), strict=True)
    }
    gradient = objective.gradient(mean)
    scale = max(float(f.abs().max()) for f in force.values())
    # Adam's metric is that of the end of the epoch, and was another one before.
    tolerance = 1e-6 if make is torch.optim.SGD else (0.03 if epoch else 0.2)
    for name in names:
        torch.testing.assert_close(point.params[name], mean[name], rtol=1e-9, atol=1e-12)
        expected, target = force[name] - gradient[name], point.vectors[0][name]
        torch.testing.assert_close(target, expected, rtol=0, atol=tolerance * scale)


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(6, affine=False, eps=1e-12),
    "layer norm": lambda: nn.LayerNorm(6, elementwise_affine=False, eps=1e-12),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rule", ["momentum", "AdamW"])
def test_the_noise_of_steps_does_not_hide_the_decay_of_normalised_weights(rule, norm):
    """Steps across θ lengthen it as fast as decay shortens it: 15 to 37 % of the decay was left."""
    torch.manual_seed(1)
    X, y = random_data(2, count=256)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), NORMS[norm](), nn.Tanh(), nn.Linear(6, 1))
    model = model.double()
    make, options = RULES[rule]
    optimizer = make(model.parameters(), lr=0.02, **{**options, "weight_decay": 0.2})
    averages = average_epochs(model, optimizer, epochs=8)
    for _ in range(40):
        for rows in torch.randperm(256).split(16):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
        averages.end_epoch()
    options = {"batch_norm": "batch", "batch_size": 16, "draws": 16}
    options = options if norm == "batch norm" else {}
    objective = tacit.Objective(model, F.mse_loss, (X, y), **options)
    penalty = next(iter(tacit.optimizer_penalties(optimizer, model)))
    equations = averages.equations(objective, penalty, rows="0.weight")
    fit = tacit.fit(equations)
    assert fit.strengths["weight_decay"] == pytest.approx(0.1, rel=0.05)


def test_weights_that_a_norm_layer_rescales_have_the_same_loss():
    X, y = random_data(2)
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)]
    model = nn.Sequential(*layers).double()
    options = {"batch_norm": "batch", "batch_size": 16}
    objective = tacit.Objective(model, F.mse_loss, (X, y), **options)
    point = objective.point()
    rows = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)[:, None]
    loss = objective.loss_of_few(point)
    moved = {**point, "0.weight": rows * point["0.weight"]}
    assert objective.loss_of_few(moved) == pytest.approx(loss, rel=1e-3)
    moved = {**point, "3.weight": 2 * point["3.weight"]}
    assert objective.loss_of_few(moved) != pytest.approx(loss, rel=0.05)
    across = {name: torch.zeros_like(p) for name, p in point.items()}  # orthogonal to everything
    length_matters = set()
    scale_free = find_scale_free(objective, point, across, length_matters)
    assert (scale_free, length_matters) == ({"0.weight": True}, {"3.weight"})
    assert find_scale_free(objective, point, across, {"0.weight", "3.weight"}) == {}


def test_layer_norm_ignores_the_length_of_a_matrix_and_not_of_its_rows():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)]
    objective = tacit.Objective(nn.Sequential(*layers).double(), F.mse_loss, random_data(2))
    point = objective.point()
    across = {name: torch.zeros_like(p) for name, p in point.items()}
    assert find_scale_free(objective, point, across, set()) == {"0.weight": False}


def test_a_loss_that_is_the_same_at_twice_the_length_by_chance_depends_on_it():
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[1.0, 0.5]]).double()
    X = draw(5, 30, 2)
    y = 1.5 * model(X).detach()  # an error of half the output, at once and twice the length
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    across = {"weight": torch.tensor([[0.5, -1.0]]).double()}
    length_matters = set()
    assert find_scale_free(objective, dict(objective.params), across, length_matters) == {}
    assert length_matters == {"weight"}
