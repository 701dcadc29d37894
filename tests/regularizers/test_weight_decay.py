"""The weight decay of optimizers as penalties, against the points where plain training rests."""

import copy

import pytest
import torch
from support.models import random_data
from torch import nn, optim
from torch.nn import functional as F

import tacit
from tacit.regularizers import metric_ridge

DECAY = 0.05


class Wrapped(optim.Optimizer):
    """As Accelerate's: an optimizer that holds the one that steps, without hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


class OwnAdamW(optim.AdamW):
    """A subclass that inherits its step."""


class OwnStep(optim.SGD):
    """A subclass that decays in a way of its own."""

    def step(self, closure=None):
        return super().step(closure)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 1).double()


def take_step(model, optimizer, X, y):
    optimizer.zero_grad()
    F.mse_loss(model(X), y).backward()
    optimizer.step()


def decayed(model, *, matrices=DECAY, biases=0.0):
    """Parameter groups by dimension, as usual in training scripts."""
    groups = ((2, matrices), (1, biases))
    return [
        {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in groups
    ]


def train(model, optimizer, data, steps, *, lr=None):
    """Full-batch training; with `lr`, the rate falls from there to zero."""
    for step in range(steps):
        for group in optimizer.param_groups if lr else ():
            group["lr"] = lr * (1 - step / steps) ** 2
        take_step(model, optimizer, *data)


def strengths(model, data, penalties):
    objective = tacit.Objective(model, F.mse_loss, data)
    fit = tacit.fit(tacit.endpoint_equations(objective, list(penalties)))
    return {r: fit.strengths[r.name] for r in penalties}


COUPLED = {
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adam": lambda groups: optim.Adam(groups, lr=0.1),
    "amsgrad": lambda groups: optim.Adam(groups, lr=0.3, amsgrad=True),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.1),
    "RAdam": lambda groups: optim.RAdam(groups, lr=0.1, betas=(0.9, 0.99)),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.03),
    "ASGD": lambda groups: optim.ASGD(groups, lr=0.1, lambd=0.03),
}


@pytest.mark.parametrize("name", COUPLED)
def test_decay_that_is_added_to_the_gradient_is_ridge_of_half_its_strength(name):
    """In a linear model with a bias that is exempt, which comes to rest exactly."""
    data, model = random_data(1), linear()
    optimizer = COUPLED[name](decayed(model, biases=0.0 if name != "ASGD" else DECAY))
    train(model, optimizer, data, 600, lr=None if name == "ASGD" else optimizer.defaults["lr"])
    penalties = tacit.optimizer_penalties(optimizer, model)
    expected = (DECAY + 0.03) / 2 if name == "ASGD" else DECAY / 2
    assert list(penalties.values()) == pytest.approx([expected])
    assert [r.name for r in penalties] == ["weight_decay"]
    assert strengths(model, data, penalties) == pytest.approx(penalties, rel=2e-3)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [optim.AdamW, OwnAdamW])
def test_decoupled_decay_is_ridge_in_the_metric_where_plain_ridge_is_wrong(kind, amsgrad):
    """Full batches: at rest ∇L + w(√v̂ + ε)θ = 0 with √v̂ = |∇L|, unless it was larger before."""
    data, model = random_data(1), linear()
    optimizer = kind(decayed(model), betas=(0.9, 0.95), eps=0.1, amsgrad=amsgrad)
    train(model, optimizer, data, 600, lr=0.1)
    penalties = tacit.optimizer_penalties(optimizer, model)
    objective = tacit.Objective(model, F.mse_loss, data)
    fit = tacit.fit(tacit.endpoint_equations(objective, list(penalties)))
    assert list(penalties.values()) == [DECAY / 2]
    assert fit.strengths["weight_decay"] == pytest.approx(DECAY / 2, rel=1e-2)
    assert fit.explained > 0.99
    assert not fit.problems
    ridge = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
    assert abs(ridge.strengths["l2"] / (DECAY / 2) - 1) > 0.5
    rest = tacit.fit(tacit.endpoint_equations(objective, tacit.l2(), known=penalties))
    assert abs(rest.strengths["l2"]) < 0.02 * ridge.strengths["l2"]


def test_groups_of_equal_decay_are_one_penalty_and_others_their_own():
    model = network()
    model[0].bias.requires_grad_(False)
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:1], "weight_decay": 0.1, "lr": 0.3},
        {"params": parameters[1:2], "weight_decay": 0.4},  # frozen
        {"params": parameters[2:3], "weight_decay": 0.1},
        {"params": [*nn.Linear(2, 2).parameters()], "weight_decay": 0.7},  # of another model
    ]
    optimizer = optim.SGD(groups, lr=0.1)  # 2.bias is in no group
    (penalty, strength), *others = tacit.optimizer_penalties(optimizer, model).items()
    assert not others
    assert strength == 0.05
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    gradient = penalty.gradient(params)["weight_decay"]
    assert torch.equal(gradient["0.weight"], 2 * params["0.weight"])
    assert torch.equal(gradient["2.weight"], 2 * params["2.weight"])
    assert not gradient["2.bias"].any()

    optimizer.add_param_group({"params": parameters[3:], "weight_decay": 0.2})
    penalties = tacit.optimizer_penalties(optimizer, model)
    assert {r.name: s for r, s in penalties.items()} == {
        "weight_decay[0]": 0.05,
        "weight_decay[1]": 0.1,
    }


def test_tied_parameters_and_wrapped_models_and_optimizers_have_the_names_of_the_objective():
    data, model = random_data(1, outputs=5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model = model.double()
    model[1].weight = model[0].weight
    optimizer = optim.AdamW(decayed(model), lr=1e-2)
    wrapped_model = nn.DataParallel(model) if not torch.cuda.is_available() else model
    for _ in range(3):
        take_step(model, optimizer, *data)
    for wrapped in (optimizer, Wrapped(optimizer), Wrapped(Wrapped(optimizer))):
        (penalty,) = tacit.optimizer_penalties(wrapped, wrapped_model)
        objective = tacit.Objective(wrapped_model, F.mse_loss, data)
        assert set(penalty.bind(objective.params).active) == {
            n for n in objective.params if n.endswith("0.weight")
        }
        tacit.endpoint_equations(objective, penalty)


def test_a_parameter_without_gradients_is_not_decayed_by_adamw():
    data, model = random_data(1), nn.ModuleDict({"used": network(), "unused": nn.Linear(2, 2)})
    optimizer = optim.AdamW(model.parameters(), weight_decay=DECAY)
    take_step(model["used"], optimizer, *data)
    (penalty,) = tacit.optimizer_penalties(optimizer, model)
    covered = penalty.bind(dict(model.named_parameters())).active
    assert list(covered) == [f"used.{n}" for n, _ in model["used"].named_parameters()]


def test_the_metric_is_a_copy_and_can_be_split_by_layer():
    data, model = random_data(1), network()
    optimizer = optim.AdamW(model.parameters(), weight_decay=DECAY)
    take_step(model, optimizer, *data)
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    ridge = metric_ridge(optimizer, model)
    before = ridge.gradient(params)["metric_ridge"]["0.weight"]
    # After one step √v̂ is |∇L|.
    expected = 2 * (model[0].weight.grad.abs() + 1e-8) * params["0.weight"]
    assert torch.allclose(before, expected, rtol=1e-6)
    take_step(model, optimizer, *data)
    assert torch.equal(before, ridge.gradient(params)["metric_ridge"]["0.weight"])
    assert list(tacit.layerwise(ridge).gradient(params)) == ["metric_ridge[0]", "metric_ridge[2]"]


def test_no_decay_is_no_penalty():
    model = network()
    assert tacit.optimizer_penalties(optim.SGD(model.parameters(), lr=0.1), model) == {}
    assert tacit.optimizer_penalties(optim.LBFGS(model.parameters()), model) == {}


def test_before_the_first_step_only_equations_with_a_metric_can_be_written():
    data, model = random_data(1), network()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=DECAY)
    (early,) = tacit.optimizer_penalties(optimizer, model)
    objective = tacit.Objective(model, F.mse_loss, data)
    with pytest.raises(
        tacit.InputError, match=r"before the optimizer's first step.*after training"
    ):
        tacit.endpoint_equations(objective, [early])
    averages = tacit.average_epochs(model, optimizer)
    take_step(model, optimizer, *data)
    averages.end_epoch()
    (late,) = tacit.optimizer_penalties(optimizer, model)
    target = averages.target(objective)
    factors = [target.equations([penalty]).factor() for penalty in (early, late)]
    assert torch.equal(*factors)


def test_a_step_that_was_skipped_gives_no_metric():
    """A fused step that a GradScaler skips makes the state of Adam, at step zero."""
    data, model = random_data(1), network()
    optimizer = optim.AdamW(model.parameters(), weight_decay=DECAY, fused=True)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.grad_scale = torch.tensor(1.0)
    take_step(model, optimizer, *data)
    with pytest.raises(tacit.InputError, match="has trained it"):
        tacit.optimizer_penalties(optimizer, model)


MODEL = network()


@pytest.mark.parametrize(
    ("optimizer", "model", "words"),
    [
        (optim.SGD(MODEL.parameters(), lr=0.1), copy.deepcopy(MODEL), "trains no.*not a copy"),
        (
            OwnStep(MODEL.parameters(), lr=0.1, weight_decay=0.1),
            MODEL,
            "OwnStep.*not known.*known=",
        ),
        (
            optim.NAdam(MODEL.parameters(), weight_decay=0.1, decoupled_weight_decay=True),
            MODEL,
            "NAdam has decoupled weight_decay=0.1.*not known",
        ),
        (
            optim.RAdam(MODEL.parameters(), weight_decay=0.1, decoupled_weight_decay=True),
            MODEL,
            "RAdam has decoupled",
        ),
        (
            optim.Adafactor(MODEL.parameters(), weight_decay=0.1),
            MODEL,
            "Adafactor.*not known.*metric_ridge",
        ),
        (
            optim.SGD(MODEL.parameters(), lr=0.1, weight_decay=0.1, maximize=True),
            MODEL,
            "maximize=True.*sign",
        ),
        ("AdamW", MODEL, "optimizer is 'AdamW'"),
        (optim.SGD(MODEL.parameters(), lr=0.1), "model", "model is 'model'"),
    ],
)
def test_what_cannot_be_said_is_refused(optimizer, model, words):
    with pytest.raises(tacit.InputError, match=words):
        tacit.optimizer_penalties(optimizer, model)


def test_the_metric_of_another_model_is_refused():
    data, model, other = random_data(1), network(), nn.Sequential(nn.Linear(3, 2)).double()
    optimizer = optim.AdamW(model.parameters())
    take_step(model, optimizer, *data)
    with pytest.raises(tacit.InputError, match=r"'0.weight' has shape \(2, 3\)"):
        metric_ridge(optimizer, model).gradient(dict(other.named_parameters()))
