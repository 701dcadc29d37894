"""Which models are chains, and how the others are refused."""

import pytest
import torch
from support.dense_dropout import class_data, flat_gradient
from support.masks import dropout_chain
from support.models import params_of
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import dropout_moments
from tacit.regularizers.dropout import batch_penalty


class Custom(nn.Module):
    """A network whose forward is passed in."""

    def __init__(self, function, *, order=("one", "drop", "two"), **extra):
        super().__init__()
        torch.manual_seed(0)
        layers = {"one": nn.Linear(4, 5), "drop": nn.Dropout(0.3), "two": nn.Linear(5, 3)} | extra
        for name in (*order, *extra):
            self.add_module(name, layers[name].double())
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def plain(self, x):
    return self.two(self.drop(self.one(x)))


def penalty_of(model, data=None, loss=F.cross_entropy):
    return dropout_moments(tacit.Objective(model, loss, data or class_data()))


def test_nested_and_custom_chains_are_those_of_the_flat_one():
    flat = dropout_chain((4, 6, 5, 3), nn.ReLU, 0.3)
    nested = nn.Sequential(
        nn.Flatten(), nn.Sequential(flat[0], nn.ReLU(inplace=True), flat[2]), nn.Identity(),
        nn.ModuleDict({"rest": nn.Sequential(*flat[3:])})["rest"],
    )  # fmt: skip
    X, y = class_data()
    images = X.reshape(len(X), 2, 2), y
    expected = flat_gradient(penalty_of(flat), params_of(flat))
    torch.testing.assert_close(
        flat_gradient(penalty_of(nested, images), params_of(nested)), expected
    )
    in_code = Custom(plain)
    sequential = nn.Sequential(in_code.one, in_code.drop, in_code.two)
    torch.testing.assert_close(
        flat_gradient(penalty_of(in_code), params_of(in_code)),
        flat_gradient(penalty_of(sequential), params_of(sequential)),
    )


def test_frozen_shared_and_unmasked_layers_are_part_of_the_chain():
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    layers = [shared, nn.Tanh(), nn.Dropout(0.2), shared, nn.Tanh(), nn.Dropout(0), nn.Linear(4, 3)]
    model = nn.Sequential(*layers).double()
    X, y = class_data()
    penalty = penalty_of(model)
    tied = params_of(model)
    copies = nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    copies.load_state_dict(
        {
            f"{i}.{n}": t
            for i, j in ((0, 0), (3, 0), (5, 6))
            for n, t in model[j].state_dict().items()
        }
    )
    torch.testing.assert_close(penalty.value(tied), penalty_of(copies).value(params_of(copies)))
    expected = penalty.gradient(tied)["dropout_moments"]
    model[6].requires_grad_(False)
    objective = tacit.Objective(model, F.cross_entropy, (X, y))
    frozen = dropout_moments(objective).gradient(objective.params)["dropout_moments"]
    for name in frozen:
        torch.testing.assert_close(frozen[name], expected[name])


REFUSED = {
    "a convolution": (
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Flatten(), nn.Dropout(), nn.Linear(4, 3)),
        r"Unflatten\)\. Use explicit_dropout",
    ),
    "layer norm": (
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Dropout()), r"1 \(LayerNorm\)"
    ),
    "another dropout": (
        nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.1)), r"1 \(AlphaDropout\)"
    ),
    "no dropout": (nn.Sequential(nn.Linear(4, 3)), r"no nn\.Dropout with p > 0"),
    "p = 0": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)), r"no nn\.Dropout with p > 0"),
    "p = 1": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(1.0)), r"'1' drops everything \(p = 1"),
    "no linear layer": (
        Custom(lambda self, x: self.drop(x)[:, :3] + 0 * self.shift, order=("drop",)),
        r"no nn\.Linear",
    ),
    "two activations": (
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.ReLU(), nn.Tanh(), nn.Linear(3, 3)),
        r"'3' \(Tanh\) follows another activation",
    ),
    "a function": (
        Custom(lambda self, x: self.two(F.relu(self.drop(self.one(x))))), "does more than its mod"
    ),
    "a skip connection": (
        Custom(lambda self, x: plain(self, x) + self.one(x)[:, :3]), "does not call its modules"
    ),
    "F.dropout": (
        Custom(lambda self, x: F.dropout(plain(self, x), 0.2, self.training)),
        r"F\.dropout, dropout inside attention",
    ),
    "another order": (
        Custom(plain, order=("drop", "one", "two")), "does not call its modules once each"
    ),
    "an unused layer": (
        Custom(plain, spare=nn.Linear(2, 2)), "does not call its modules once each"
    ),
    "dropout only in training": (
        Custom(lambda self, x: self.two(self.drop(self.one(x)) if self.training else self.one(x))),
        "(a different number of times|no dropout layer)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_other_models_are_refused(case):
    model, pattern = case
    if isinstance(model, Custom) and "one" not in dict(model.named_children()):
        model.register_parameter("shift", nn.Parameter(torch.zeros(3)))
    model.double()
    objective = tacit.Objective(model, F.cross_entropy, class_data())
    with pytest.raises(tacit.InputError, match=pattern):
        dropout_moments(objective)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_other_objectives_and_losses_are_refused():
    model, data = dropout_chain((4, 5, 3), nn.ReLU, 0.3), class_data()
    by_batch = tacit.Objective.from_batch_loss(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), data
    )
    noisy = tacit.techniques.input_noise(tacit.Objective(model, F.cross_entropy, data), 0.1)
    tokens = torch.randn(6, 2, 4).double(), torch.randn(6, 2, 3).double()

    def of_numbers(outputs, target):
        scale = 1.0 if float(outputs.detach().abs().sum()) > 0 else 2.0
        return scale * F.cross_entropy(outputs, target)

    refused = {
        r"Sequential: pass the tacit\.Objective": lambda: dropout_moments(model),
        r"from_batch_loss: make it as Objective\(model": lambda: dropout_moments(by_batch),
        "technique": lambda: dropout_moments(noisy),
        r"shape \(6, 2, 4\).*nn\.Flatten": lambda: penalty_of(model, tokens, F.mse_loss),
        r"torch\.func\.vmap can map": lambda: penalty_of(model, loss=of_numbers),
        "the model of batch_penalty": lambda: batch_penalty(F.relu, F.mse_loss),
    }
    for pattern, call in refused.items():
        with pytest.raises(tacit.InputError, match=pattern):
            call()
