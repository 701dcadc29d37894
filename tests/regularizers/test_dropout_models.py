"""Dropout's own regularizer in models of many kinds, and those that it refuses."""

import pytest
import torch
from support.dense_dropout import check, class_data, gradient, halves, naive, network
from support.problems import params_of, random_data
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import tacit
from tacit import reference


class Attentive(nn.Module):
    """Attention and layer norm behind a dropout layer that is also passed by."""

    def __init__(self, *, fused):
        super().__init__()
        self.embed, self.drop = nn.Linear(2, 4), nn.Dropout(0.1)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.fused = fused

    def front(self, x):
        return self.embed(x).tanh()

    def back(self, h, passed):
        seen = (
            F.scaled_dot_product_attention(h, 2 * h, h.sin())
            if self.fused
            else self.attend(h, h, h, need_weights=False)[0]
        )
        return self.head(self.norm(seen + passed)).mean(1)

    def forward(self, x):
        h = self.front(x)
        return self.back(self.drop(h), h)


class Call(nn.Module):
    def __init__(self, model, method):
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *inputs):
        return self.method(*inputs)


def method(model, name):
    """A method of a module as a function of (params, …)."""
    call = Call(model, getattr(model, name))
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
    front, back = method(model, "front"), method(model, "back")
    sides = [(front, lambda params, h, x: back(params, h, front(params, x)))]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check(
            tacit.regularizers.explicit_dropout(objective), params_of(model),
            naive(sides, F.cross_entropy, data),
        )  # fmt: skip


@pytest.mark.parametrize("samples", [None, 3])
def test_through_layer_norm_the_gradient_is_the_slope_of_the_value(attentive, samples):
    """Third derivatives by autograd, and forward mode, are wrong through a fused layer norm."""
    model, _, objective = attentive
    family, params = (
        tacit.regularizers.explicit_dropout(objective, samples=samples),
        params_of(model),
    )
    torch.manual_seed(6)
    along, step = {n: torch.randn_like(p) for n, p in params.items()}, 1e-5
    ahead, behind = (
        family.value({n: p + h * along[n] for n, p in params.items()}) for h in (step, -step)
    )
    slope = gradient(family, params) @ reference.flat(along)
    assert float(slope) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-6)


def test_images_equal_the_dense_oracle():
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Dropout(0.2), nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2),
        nn.Softplus(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3),
    ).double()  # fmt: skip
    with torch.no_grad():
        model[4].running_var.uniform_(0.5, 2)
    data = torch.randn(3, 1, 5, 5).double(), torch.tensor([0, 2, 1])
    objective = tacit.Objective(model, F.cross_entropy, data, batch_size=2)
    functions = naive(halves(model), F.cross_entropy, data)
    check(
        tacit.regularizers.explicit_dropout(objective, by_layer=True), params_of(model), functions
    )


def test_a_layer_used_twice_counts_twice_and_one_on_the_inputs_counts():
    torch.manual_seed(8)
    drop = nn.Dropout(0.1)
    shared = nn.Sequential(
        drop, nn.Linear(4, 4), nn.Tanh(), drop, nn.ReLU(inplace=True), nn.Linear(4, 2)
    ).double()
    data = random_data(8, count=5, inputs=4, outputs=2)
    found = tacit.regularizers.explicit_dropout(
        tacit.Objective(shared, F.mse_loss, data), by_layer=True
    )
    assert found.bind(params_of(shared)).names == ("explicit_dropout[0]",)
    layers = list(shared)
    layers[3], layers[4] = nn.Dropout(0.1), nn.ReLU()
    functions = naive(halves(nn.Sequential(*layers)), F.mse_loss, data)
    check(found, params_of(shared), [lambda params: sum(f(params) for f in functions)])


def test_layers_that_do_not_drop_are_left_out():
    model = network(0)
    model[2].p = 0
    objective = tacit.Objective(model, F.cross_entropy, class_data())
    names = (
        tacit.regularizers.explicit_dropout(objective, by_layer=True).bind(params_of(model)).names
    )
    assert names == ("explicit_dropout[5]",)


def test_an_encoder_layer_of_torch_is_seen_even_where_it_is_frozen():
    torch.manual_seed(9)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    encoder.self_attn.dropout = 0.0
    model = nn.Sequential(encoder.requires_grad_(False), nn.Flatten(), nn.Linear(12, 2)).double()
    data = torch.randn(4, 3, 4).double(), torch.tensor([0, 1, 1, 0])
    family = tacit.regularizers.explicit_dropout(
        tacit.Objective(model, F.cross_entropy, data), by_layer=True
    )
    values = family.value(params_of(model))
    assert len(values) == 3
    assert (values > 0).all()


def test_a_loss_without_curvature_has_none_of_it():
    model, data = network(0), class_data()
    objective = tacit.Objective(model, lambda z, y: z.gather(1, y[:, None]).mean(), data)
    for samples in (None, 2):
        family = tacit.regularizers.explicit_dropout(objective, samples=samples)
        assert float(family.value(params_of(model))) == 0
        assert not gradient(family, params_of(model)).any()


# What is refused.


class Wrapped(nn.Module):
    def __init__(self, function, **layers):
        super().__init__()
        self.inner, self.function = network(0), function
        for name, layer in layers.items():
            self.add_module(name, layer.double())

    def forward(self, x):
        return self.function(self, x)


def refused(model, pattern, *, loss=F.cross_entropy, data=None):
    objective = tacit.Objective(model, loss, data or class_data())
    with pytest.raises(tacit.InputError, match=pattern):
        tacit.regularizers.explicit_dropout(objective)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


def test_models_without_dropout_layers_are_refused():
    model = nn.Sequential(nn.Linear(4, 3)).double()
    refused(model, r"Sequential runs through no dropout layer.*nn\.Dropout with p > 0")
    refused(Wrapped(lambda self, x: self.inner[0](x)), "no dropout layer")


@pytest.mark.parametrize("kind", [nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_other_kinds_of_dropout_are_refused(kind):
    model = network(0)
    model.append(nn.Unflatten(1, (1, 3, 1))).append(kind(0.1)).append(nn.Flatten())
    refused(model, rf"8 \({kind.__name__}\)")
    model[-2].p = 0.0
    tacit.regularizers.explicit_dropout(tacit.Objective(model, F.cross_entropy, class_data()))


class Noise(nn.Dropout):
    """A dropout layer in name alone."""

    def forward(self, x):
        return x + self.p * torch.randn_like(x) if self.training else x


def test_subclasses_with_another_law_are_refused():
    refused(network(0).append(Noise(0.1)), r"\(Noise\)")


def test_layers_that_only_training_runs_are_refused():
    def forward(self, x):
        hidden = self.inner(x)
        return self.late(hidden) if self.training else hidden

    refused(Wrapped(forward, late=nn.Dropout(0.1)), "another number of times in training")


def test_randomness_that_no_layer_shows_is_refused():
    functional = Wrapped(lambda self, x: F.dropout(self.inner(x), training=self.training))
    refused(functional, "random even with its nn.Dropout layers off")
    attend = nn.MultiheadAttention(3, 1, dropout=0.3, batch_first=True)

    def forward(self, x):
        z = self.inner(x)[:, None].repeat(1, 4, 1).cumsum(1)
        return self.attend(z, z, z, need_weights=False)[0][:, 0]

    refused(Wrapped(forward, attend=attend), "dropout inside attention")


def test_shapes_without_a_row_an_example_are_refused():
    pair = Wrapped(lambda self, x: (self.inner(x), x))
    refused(pair, "gave .*tuple.* one tensor", loss=lambda z, y: F.cross_entropy(z[0], y))

    def sideways(self, x):
        return self.inner(self.drop(x.T).T)

    refused(Wrapped(sideways, drop=nn.Dropout(0.1)), r"'drop' is entered by shape \(4, \d\)")
    square = class_data(count=4)
    refused(Wrapped(sideways, drop=nn.Dropout(0.1)), r"entered by shape \(4, 2\)", data=square)


def test_a_layer_under_no_grad_is_refused():
    def forward(self, x):
        with torch.no_grad():
            x = self.drop(x)
        return self.inner(x)

    refused(Wrapped(forward, drop=nn.Dropout(0.1)), "'drop' runs under no_grad")


def test_objectives_of_other_forms_and_wrong_options_are_refused():
    model, data = network(0), class_data()
    units = tacit.Objective.from_batch_loss(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        data,
    )
    plain = tacit.Objective(model, F.cross_entropy, data)
    cases = [
        (
            lambda: tacit.regularizers.explicit_dropout(model),
            "given a Sequential: pass the tacit.Objective",
        ),
        (
            lambda: tacit.regularizers.explicit_dropout(units),
            r"from_batch_loss: make it as Objective\(model",
        ),
        (lambda: tacit.regularizers.explicit_dropout(plain, samples=0), "samples is 0"),
        (lambda: tacit.regularizers.explicit_dropout(plain, samples=True), "samples is True"),
        (lambda: tacit.regularizers.explicit_dropout(plain, seed=-1), "seed is -1"),
        (lambda: tacit.regularizers.explicit_dropout(plain, by_layer=1), "by_layer is 1"),
        (lambda: tacit.regularizers.explicit_dropout(plain, name=""), "name"),
    ]
    for call, pattern in cases:
        with pytest.raises(tacit.InputError, match=pattern):
            call()
