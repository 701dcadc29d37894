"""The size of activations, plain and weighted, against loops over layers written out."""

from copy import deepcopy

import pytest
import torch
from support.models import image_data, loss_of, params_of, random_data, small_cnn, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tacit import InputError, Objective, reference
from tacit.regularizers import activation_norm


def assert_is_mean(penalty, model, data, naive, **options):
    """Compare value and column with naive(model, x) for all examples together."""
    params = params_of(model)
    mean = loss_of(naive, lambda total, _: total / len(data[0]), data)
    named = {f"model.{n}": p for n, p in params.items()}
    torch.testing.assert_close(penalty.value(params)[0], mean(named), **options)
    column = reference.flat(penalty.gradient(params)["activation_norm"])
    torch.testing.assert_close(column, reference.gradient(mean, named), **options)


class Naive(nn.Module):
    """A module that returns total(model, x) of another one."""

    def __init__(self, model, total):
        super().__init__()
        self.model, self.total = deepcopy(model), total

    def forward(self, x):
        return self.total(self.model, x)


def test_by_default_the_outputs_of_all_activation_modules_count():
    model, data = tanh_mlp(0, sizes=(5, 4, 3, 1)), random_data(0)

    def total(model, x):
        return sum(model[:i](x).square().sum() for i in (2, 4))

    penalty = activation_norm(Objective(model, F.mse_loss, data, batch_size=10))
    assert_is_mean(penalty, model, data, Naive(model, total))
    assert penalty.cost == "pass"


class Recurrent(nn.Module):
    """One block that runs three times, under two names, and works in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)).double()
        self.second = self.first
        self.head = nn.Linear(5, 1).double()

    def forward(self, x):
        return self.head(self.second(self.first(self.first(x))))


@pytest.mark.parametrize("layers", [None, "first.1", "second.1", ["second.*1"], "second"])
def test_shared_modules_count_once_per_call(layers):
    model, data = Recurrent(), random_data(0)

    def total(model, x):
        sizes = 0
        for _ in range(3):
            x = torch.relu(F.linear(x, model.first[0].weight, model.first[0].bias))
            sizes = sizes + x.square().sum()
        return sizes

    penalty = activation_norm(Objective(model, F.mse_loss, data), layers=layers)
    assert_is_mean(penalty, model, data, Naive(model, total))


def test_a_layer_before_one_that_works_in_place_has_its_own_outputs():
    model, data = Recurrent(), random_data(0)

    def total(model, x):
        sizes = 0
        for _ in range(3):
            h = F.linear(x, model.first[0].weight, model.first[0].bias)
            sizes, x = sizes + h.square().sum(), torch.relu(h)
        return sizes

    penalty = activation_norm(Objective(model, F.mse_loss, data), layers="first.0")
    assert_is_mean(penalty, model, data, Naive(model, total))


def test_sums_are_over_positions_and_batch_norm_is_that_of_the_objective():
    model, data = small_cnn(0), image_data(0, count=12)

    def total(model, x):
        return model[:3](x).square().sum()

    running = Objective(model, F.cross_entropy, data, batch_norm="running")
    assert_is_mean(activation_norm(running), model, data, Naive(model, total))
    batch = Objective(model, F.cross_entropy, data, batch_norm="batch", batch_size=12)
    norm, params = activation_norm(batch, layers="1"), params_of(model)
    h = model[0](data[0])
    normalised = (h - h.mean((0, 2, 3), keepdim=True)) / (
        h.var((0, 2, 3), unbiased=False, keepdim=True) + model[1].eps
    ).sqrt()
    expected = (normalised * model[1].weight[:, None, None] + model[1].bias[:, None, None]) ** 2
    torch.testing.assert_close(norm.value(params)[0], expected.sum().detach() / 12)


CONVOLUTIONS = {
    "1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "2d in groups": (nn.Conv2d(2, 4, 3, groups=2, dilation=2, padding=2), (2, 5, 5)),
    "2d circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "3d": (nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "linear over positions": (nn.Linear(4, 3), (5, 4)),
    "spectral norm": (parametrizations.spectral_norm(nn.Linear(4, 3)), (4,)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_weighted_norms_are_the_variance_of_outputs_under_noise_on_every_weight(name):
    """Σ_o Σ_jk W_jk² h_k² is Σ_o Var f_o for independent noise of variance h_k² W_jk²."""
    layer, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), layer, nn.Flatten()).double()
    X = torch.randn(4, *shape).double()
    objective = Objective(model, F.mse_loss, (X, torch.zeros_like(model(X)).detach()))
    penalty = activation_norm(objective, layers="1", weighted=True)
    model.eval()
    total = 0
    for x in X:  # the Jacobian of every output by every single input entry is a sum of weights
        h = torch.tanh(x)
        jacobian = torch.func.jacrev(lambda h: model[1](h[None])[0])(h)
        jacobian = jacobian.reshape(-1, h.numel())
        total = total + (jacobian.square() @ h.flatten().square()).sum()
    torch.testing.assert_close(penalty.value(params_of(model))[0], (total / 4).detach())


def test_weighted_columns_are_differentiated_through_weights_and_activations():
    model, data = tanh_mlp(0, sizes=(5, 4, 3, 1)), random_data(0)

    def total(model, x):
        h = model[:2](x)
        return sum(
            (F.linear(inputs.square(), model[i].weight.square())).sum()
            for i, inputs in ((2, h), (4, model[2:4](h)))
        )

    objective = Objective(model, F.mse_loss, data, batch_size=10)
    penalty = activation_norm(objective, layers=["2", "4"], weighted=True)
    assert_is_mean(penalty, model, data, Naive(model, total))


class ReadsWeights(nn.Module):
    """A layer whose weights are read without calling it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        return self.head(torch.tanh(F.linear(x, self.hidden.weight, self.hidden.bias)))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(torch.tanh(self.step(x.transpose(0, 1))).mean(0))


class WithoutGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = tanh_mlp(0, sizes=(5, 4, 4)), nn.Linear(4, 1).double()

    def forward(self, x):
        with torch.no_grad():
            h = self.body(x)
        return self.head(h)


def objective_of(model, data=None):
    return Objective(model, F.mse_loss, data or random_data(0))


def time_first():
    X = torch.randn(6, 7, 2, generator=torch.Generator().manual_seed(0)).double()
    return objective_of(TimeFirst(), (X, torch.zeros(6, 1).double()))


def batch_loss():
    return Objective.from_batch_loss(tanh_mlp(0), lambda m, b: m(b[0])[:, 0], random_data(0))


MLP = objective_of(tanh_mlp(0))
REFUSED = {
    "no activation modules": (
        lambda: activation_norm(objective_of(ReadsWeights())),
        "hidden, head",
    ),
    "weights read elsewhere": (
        lambda: activation_norm(objective_of(ReadsWeights()), layers="*", weighted=True),
        "does not run through hidden",
    ),
    "no layers to weigh": (lambda: activation_norm(MLP, weighted=True), "There are: 0, 2"),
    "an activation to weigh": (
        lambda: activation_norm(MLP, layers=["2", "1"], weighted=True),
        "'1' matches no nn.Linear",
    ),
    "an unknown layer": (lambda: activation_norm(MLP, layers="body"), "There are: 0, 1, 2"),
    "a number": (lambda: activation_norm(MLP, layers=[1]), "an entry of layers is 1"),
    "time first": (lambda: activation_norm(time_first(), layers="step"), "batch_first=True"),
    "no_grad": (
        lambda: activation_norm(objective_of(WithoutGradients()), layers="body.1"),
        "under no_grad",
    ),
    "a batch loss": (lambda: activation_norm(batch_loss()), "to mean_of"),
    "a model": (lambda: activation_norm(tanh_mlp(0)), "pass the tacit.Objective"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_such_activations_are_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        call()


def test_hooks_of_the_user_stay_and_ours_are_removed():
    model, data = tanh_mlp(0), random_data(0)
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    penalty = activation_norm(Objective(model, F.mse_loss, data))
    expected = (2 * torch.tanh(model[0](data[0]))).square().sum() / 64
    torch.testing.assert_close(penalty.value(params_of(model))[0], expected.detach())
    assert len(model[1]._forward_hooks) == 1
