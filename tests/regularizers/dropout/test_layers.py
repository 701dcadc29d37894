"""Explicit dropout in models of many kinds, and the models that it refuses."""

import pytest
import torch
from support.dense_dropout import (
    assert_equal_to_dense,
    class_data,
    dense_penalties,
    dropout_mlp,
    flat_gradient,
    split_at_dropout,
)
from support.models import params_of, random_data
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tacit
from tacit import reference
from tacit.regularizers import explicit_dropout


class Attentive(nn.Module):
    """Attention and layer norm behind a dropout layer that has a skip connection around it."""

    def __init__(self, *, fused):
        super().__init__()
        self.embed, self.drop = nn.Linear(2, 4), nn.Dropout(0.1)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.fused = fused

    def front(self, x):
        return self.embed(x).tanh()

    def back(self, h, skipped):
        attended = (
            F.scaled_dot_product_attention(h, 2 * h, h.sin())
            if self.fused
            else self.attend(h, h, h, need_weights=False)[0]
        )
        return self.head(self.norm(attended + skipped)).mean(1)

    def forward(self, x):
        h = self.front(x)
        return self.back(self.drop(h), h)


class MethodCall(nn.Module):
    """A module whose forward is a method of another module."""

    def __init__(self, model, method):
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *inputs):
        return self.method(*inputs)


def functional_method(model, name):
    """A method of a module as a function of (params, *inputs)."""
    call = MethodCall(model, getattr(model, name))
    return lambda params, *inputs: functional_call(
        call, {f"model.{n}": p for n, p in params.items()}, inputs
    )


@pytest.fixture(params=[True, False], ids=["fused", "multihead"])
def attentive(request):
    torch.manual_seed(5)
    model = Attentive(fused=request.param).double().eval()
    with torch.no_grad():
        model.norm.weight.normal_()
    data = torch.randn(2, 3, 2).double(), torch.tensor([0, 2])
    return model, data, tacit.Objective(model, F.cross_entropy, data)


def test_attention_and_layer_norm_equal_the_dense_oracle(attentive):
    model, data, objective = attentive
    front, back = functional_method(model, "front"), functional_method(model, "back")
    sides = [(front, lambda params, h, x: back(params, h, front(params, x)))]
    functions = dense_penalties(sides, F.cross_entropy, data)
    with sdpa_kernel(SDPBackend.MATH):
        assert_equal_to_dense(explicit_dropout(objective), params_of(model), functions)


@pytest.mark.parametrize("samples", [None, 3])
def test_through_layer_norm_the_gradient_is_the_derivative_of_the_value(attentive, samples):
    """Third derivatives by autograd, and forward mode, are wrong through a fused layer norm."""
    model, _, objective = attentive
    penalty, params = explicit_dropout(objective, samples=samples), params_of(model)
    torch.manual_seed(6)
    direction, step = {n: torch.randn_like(p) for n, p in params.items()}, 1e-5
    ahead, behind = (
        penalty.value({n: p + h * direction[n] for n, p in params.items()}) for h in (step, -step)
    )
    derivative = flat_gradient(penalty, params) @ reference.flat(direction)
    assert float(derivative) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-6)


def test_attention_settings_of_the_user_are_restored(attentive):
    model, _, objective = attentive
    fast_path = torch.backends.mha.get_fastpath_enabled()
    fused = torch.backends.cuda.flash_sdp_enabled()
    explicit_dropout(objective).gradient(params_of(model))
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert torch.backends.cuda.flash_sdp_enabled() == fused


def test_convolutions_equal_the_dense_oracle():
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Dropout(0.2), nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2),
        nn.Softplus(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3),
    ).double()  # fmt: skip
    with torch.no_grad():
        model[4].running_var.uniform_(0.5, 2)
    data = torch.randn(3, 1, 5, 5).double(), torch.tensor([0, 2, 1])
    options = {"batch_size": 2, "batch_norm": "running"}
    objective = tacit.Objective(model, F.cross_entropy, data, **options)
    functions = dense_penalties(split_at_dropout(model), F.cross_entropy, data)
    assert_equal_to_dense(explicit_dropout(objective, by_layer=True), params_of(model), functions)


def test_a_layer_called_twice_counts_twice_and_one_on_the_inputs_counts():
    torch.manual_seed(8)
    drop = nn.Dropout(0.1)
    shared = nn.Sequential(
        drop, nn.Linear(4, 4), nn.Tanh(), drop, nn.ReLU(inplace=True), nn.Linear(4, 2)
    ).double()
    data = random_data(8, count=5, inputs=4, outputs=2)
    penalty = explicit_dropout(tacit.Objective(shared, F.mse_loss, data), by_layer=True)
    assert penalty.bind(params_of(shared)).names == ("explicit_dropout[0]",)
    layers = list(shared)
    layers[3], layers[4] = nn.Dropout(0.1), nn.ReLU()
    functions = dense_penalties(split_at_dropout(nn.Sequential(*layers)), F.mse_loss, data)
    both_calls = [lambda params: sum(f(params) for f in functions)]
    assert_equal_to_dense(penalty, params_of(shared), both_calls)


def test_layers_with_rate_zero_are_left_out():
    model = dropout_mlp(0)
    model[2].p = 0
    objective = tacit.Objective(model, F.cross_entropy, class_data())
    penalty = explicit_dropout(objective, by_layer=True)
    assert penalty.bind(params_of(model)).names == ("explicit_dropout[5]",)


def test_the_layers_of_a_frozen_torch_encoder_are_recorded():
    torch.manual_seed(9)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    encoder.self_attn.dropout = 0.0
    model = nn.Sequential(encoder.requires_grad_(False), nn.Flatten(), nn.Linear(12, 2)).double()
    data = torch.randn(4, 3, 4).double(), torch.tensor([0, 1, 1, 0])
    penalty = explicit_dropout(tacit.Objective(model, F.cross_entropy, data), by_layer=True)
    values = penalty.value(params_of(model))
    assert len(values) == 3
    assert (values > 0).all()


# Models that are refused.


class Wrapped(nn.Module):
    """A network with dropout in `inner`, more layers by name, and a forward that is passed in."""

    def __init__(self, function, **layers):
        super().__init__()
        self.inner, self.function = dropout_mlp(0), function
        for name, layer in layers.items():
            self.add_module(name, layer.double())

    def forward(self, x):
        return self.function(self, x)


def assert_refused(model, pattern, *, loss=F.cross_entropy, data=None):
    """The model is refused with these words, and left as it was."""
    objective = tacit.Objective(model, loss, data or class_data())
    with pytest.raises(tacit.InputError, match=pattern):
        explicit_dropout(objective)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


def test_models_without_dropout_layers_are_refused():
    model = nn.Sequential(nn.Linear(4, 3)).double()
    assert_refused(model, r"Sequential runs through no dropout layer.*nn\.Dropout with p > 0")
    assert_refused(Wrapped(lambda self, x: self.inner[0](x)), "no dropout layer")


@pytest.mark.parametrize("kind", [nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_other_kinds_of_dropout_are_refused(kind):
    model = dropout_mlp(0)
    model.append(nn.Unflatten(1, (1, 3, 1))).append(kind(0.1)).append(nn.Flatten())
    assert_refused(model, rf"8 \({kind.__name__}\)")
    model[-2].p = 0.0
    explicit_dropout(tacit.Objective(model, F.cross_entropy, class_data()))


class Noise(nn.Dropout):
    """A subclass of nn.Dropout that adds noise instead of dropping entries."""

    def forward(self, x):
        return x + self.p * torch.randn_like(x) if self.training else x


def test_subclasses_of_dropout_with_another_forward_are_refused():
    assert_refused(dropout_mlp(0).append(Noise(0.1)), r"\(Noise\)")


def test_layers_that_run_only_in_training_are_refused():
    def forward(self, x):
        hidden = self.inner(x)
        return self.late(hidden) if self.training else hidden

    assert_refused(Wrapped(forward, late=nn.Dropout(0.1)), "different number of times in training")


def test_randomness_outside_dropout_layers_is_refused():
    functional = Wrapped(lambda self, x: F.dropout(self.inner(x), training=self.training))
    assert_refused(functional, "random even with its nn.Dropout layers off")
    attend = nn.MultiheadAttention(3, 1, dropout=0.3, batch_first=True)

    def forward(self, x):
        z = self.inner(x)[:, None].repeat(1, 4, 1).cumsum(1)
        return self.attend(z, z, z, need_weights=False)[0][:, 0]

    assert_refused(Wrapped(forward, attend=attend), "dropout inside attention")


def test_shapes_without_one_row_per_example_are_refused():
    pair = Wrapped(lambda self, x: (self.inner(x), x))

    def loss_of_pair(z, y):
        return F.cross_entropy(z[0], y)

    assert_refused(pair, r"tuple.* one tensor with one row per example", loss=loss_of_pair)

    def transposed(self, x):
        return self.inner(self.drop(x.T).T)

    model = Wrapped(transposed, drop=nn.Dropout(0.1))
    assert_refused(model, r"'drop' has an input of shape \(4, \d\)")
    as_many_examples_as_inputs = class_data(count=4)
    assert_refused(model, r"input of shape \(4, 2\)", data=as_many_examples_as_inputs)


def test_a_layer_under_no_grad_is_refused():
    def forward(self, x):
        with torch.no_grad():
            x = self.drop(x)
        return self.inner(x)

    assert_refused(Wrapped(forward, drop=nn.Dropout(0.1)), "'drop' runs under no_grad")
