"""The outputs of all members at once are those of each module."""

import functools
import types

import pytest
import torch
from support.ensembles import ensemble_and_data, sequential, train_briefly
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return self.scale * x


class LinearThenDropout(nn.Module):
    """Has dropout, but is not an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(5, 1), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.layer(x))


def shared_activation():
    relu = nn.ReLU()
    return sequential(nn.Linear(5, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 1))


def shared_dropout():
    dropout = nn.Dropout(0.5)
    return sequential(
        nn.Linear(5, 4), nn.Tanh(), dropout, nn.Linear(4, 4), dropout, nn.Linear(4, 1)
    )


def with_hook():
    model = sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    return model


def with_unused_parameter():
    model = sequential(nn.Linear(5, 1))
    model[0].register_parameter("extra", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    return model


def shared_layers():
    layer = nn.Linear(5, 5)
    return sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 1))


def with_patched_forward():
    model = sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    model.forward = types.MethodType(lambda self, x: self[2](self[0](x).sigmoid()) * 2, model)
    return model


def with_patched_layer():
    model = sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    model[1].forward = functools.partial(lambda layer, x: layer(x).tanh(), model[0])
    return model


@pytest.mark.parametrize(
    "build",
    [
        shared_activation,
        shared_dropout,
        with_hook,
        with_unused_parameter,
        shared_layers,
        with_patched_forward,
        with_patched_layer,
    ],
)
def test_unusual_models_give_the_equations_of_each_module(build):
    X, y = random_data(0)
    ensemble = ensembles.initialise(build, [0, 1])
    equations = ensembles.endpoint_equations(ensemble, F.mse_loss, (X, y), tacit.l2())
    for m in range(2):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, (X, y))
        expected = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
        assert tacit.fit(equations[m]).strengths == pytest.approx(expected.strengths, rel=1e-9)


@pytest.mark.parametrize("build", [shared_layers, with_patched_forward, with_patched_layer])
def test_outputs_are_those_of_the_users_modules_and_the_template_is_untouched(build):
    X, _ = random_data(0)
    torch.manual_seed(0)
    models = [build() for _ in range(3)]
    ensemble = ensembles.from_models(models)
    parameters = dict(ensemble.model.named_parameters(remove_duplicate=False))
    outputs = ensemble.forward(ensemble.params, X.expand(3, *X.shape), None)
    for output, model in zip(outputs, models, strict=True):
        torch.testing.assert_close(output, model(X), rtol=1e-13, atol=1e-15)
    after = dict(ensemble.model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert all(isinstance(parameter, nn.Parameter) for parameter in after.values())
    trained = ensemble.module(1)
    trained(X).sum().backward()
    torch.testing.assert_close(trained(X), models[1](X), rtol=1e-13, atol=1e-15)
    assert all(parameter.grad is not None for parameter in trained.parameters())


def hook_on_the_original():
    model = sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    model[2].register_forward_hook(lambda module, inputs, output: output + model[2].bias)
    return model


def method_around_the_original():
    model = sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    original = model.forward
    model.forward = types.MethodType(lambda self, x: 2 * original(x), model)
    return model


@pytest.mark.parametrize("build", [hook_on_the_original, method_around_the_original])
def test_a_copy_that_runs_the_original_is_refused(build):
    X, _ = random_data(0)
    ensemble = ensembles.initialise(build, [0, 1])
    with pytest.raises(tacit.InputError, match="parameters outside of its modules"):
        ensemble.forward(ensemble.params, X.expand(2, *X.shape), None)


def hooked(register):
    torch.manual_seed(0)
    model = sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    register(model)
    return model


BACKWARD_HOOKS = {
    "parameter": lambda model: model[0].weight.register_hook(lambda g: g.clamp(-1, 1)),
    "module": lambda model: model[0].register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("register", BACKWARD_HOOKS.values(), ids=BACKWARD_HOOKS)
def test_backward_hooks_are_refused(register):
    with pytest.raises(tacit.InputError, match="has a backward hook"):
        ensembles.from_models([hooked(register), hooked(register)])


def test_members_with_different_hooks_are_refused():
    def doubled(model):
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)

    def halved(model):
        model[0].register_forward_hook(lambda module, inputs, output: output / 2)

    with pytest.raises(tacit.InputError, match="another architecture"):
        ensembles.from_models([hooked(doubled), hooked(halved)])


def test_attention_is_differentiated():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.readout = nn.Linear(4, 1)

        def forward(self, x):
            x = x.view(len(x), -1, 4)
            return self.readout(self.attention(x, x, x, need_weights=False)[0].mean(1))

    models = [Attention().double() for _ in range(2)]
    X, y = random_data(0, inputs=12)
    _, gradients = ensembles.gradients(ensembles.from_models(models), F.mse_loss, (X, y))
    expected = tacit.Objective(models[1], F.mse_loss, (X, y)).gradient()
    for name, tensor in expected.items():
        torch.testing.assert_close(gradients[name][1], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dims", [(1, -1), (-2, -1), (2, 3), (2, -1), (1, 2)])
def test_flatten_counts_dimensions_as_the_module_does(dims):
    X = torch.randn(6, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = ensembles.initialise(
        lambda: sequential(nn.Flatten(*dims), nn.Identity(), Scale()), [0, 1]
    )
    outputs = ensemble.forward(ensemble.params, X.expand(2, *X.shape), None)
    assert torch.equal(outputs[1], ensemble.module(1)(X))


def test_dropout_outside_a_chain_of_layers_is_refused():
    _, data, _ = ensemble_and_data()
    ensemble = ensembles.initialise(lambda: LinearThenDropout().double(), range(5))
    with pytest.raises(tacit.InputError, match="not a chain of linear layers"):
        train_briefly(ensemble, data)
