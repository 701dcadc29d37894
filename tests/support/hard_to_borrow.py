"""Models whose parameters are reached in unusual ways; each takes (n, 4) and gives (n, 4)."""

import functools
import types
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class FromFunction(nn.Module):
    """A module of parts, whose forward is a function of them and of the input."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def linear():
    return nn.Linear(4, 4)


def shared_in_sequential():
    layer = linear()
    return nn.Sequential(layer, nn.Tanh(), layer)


def shared_blocks():
    blocks = nn.ModuleList([nn.Sequential(linear(), nn.Tanh())] * 3)
    return FromFunction(
        lambda m, x: functools.reduce(lambda h, b: b(h), m.blocks, x), blocks=blocks
    )


def siamese():
    tower = nn.Sequential(linear(), nn.Tanh(), linear())
    return FromFunction(lambda m, x: m.left(x) - m.right(x.flip(1)) ** 2, left=tower, right=tower)


def shared_container_and_part():
    inner = linear()
    return nn.Sequential(nn.Sequential(inner, nn.Tanh()), inner, nn.Sequential(linear(), inner))


def tied_parameter():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[2].weight = model[0].weight
    return model


def tied_embedding():
    model = FromFunction(
        lambda m, x: m.head(torch.tanh(m.embedding((x > 0).long()).mean(1))),
        embedding=nn.Embedding(4, 4),
        head=linear(),
    )
    model.head.weight = model.embedding.weight
    return model


def parameter_in_a_list():
    model = FromFunction(lambda m, x: m.layer(x).tanh() @ m.weights[0], layer=linear())
    model.weights = [model.layer.weight]
    return model


def parameter_as_plain_attribute():
    model = FromFunction(lambda m, x: m.layer(x).tanh() @ m.weight, layer=linear())
    model.__dict__["weight"] = model.layer.weight
    return model


def parametrised(parametrization):
    return nn.Sequential(parametrization(linear()), nn.Tanh(), parametrization(linear()))


def shared_parametrised():
    layer = parametrizations.weight_norm(linear())
    return nn.Sequential(layer, nn.Tanh(), layer)


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(linear()), nn.Tanh(), linear())


def old_spectral_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.spectral_norm(linear()), nn.Tanh(), linear())


def hooked():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[0].register_forward_hook(lambda module, inputs, output: output * module.weight.sum())
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + module.bias,))
    model[2].register_full_backward_hook(lambda module, before, after: (before[0] / 2,))
    return model


def gradient_hook():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    mask = (torch.arange(16) % 3 > 0).view(4, 4).double()
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    return model


def lazy_cache():
    """Computes its matrix at the first use, and stores it in a dictionary."""

    def forward(m, x):
        if "matrix" not in m.cache:
            m.cache["matrix"] = m.layer.weight @ m.layer.weight.T
        m.calls, m.last = m.calls + 1, x
        return m.layer(x).tanh() @ m.cache["matrix"]

    model = FromFunction(forward, layer=linear())
    model.cache, model.calls = {}, 0
    return model


def recurrent(kind):
    return FromFunction(
        lambda m, x: m.core(x.view(-1, 2, 2))[0][:, -1],
        core=kind(2, 4, num_layers=2, batch_first=True),
    )


def shared_lstm():
    core = nn.LSTM(4, 4, batch_first=True)
    return FromFunction(lambda m, x: m.b(m.a(x[:, None])[0])[0][:, 0], a=core, b=core)


def attention():
    return FromFunction(
        lambda m, x: m.core(*[x[:, :, None] * torch.ones(4).to(x)] * 3)[0].mean(1),
        core=nn.MultiheadAttention(4, 2, batch_first=True),
    )


def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return FromFunction(
        lambda m, x: m.core(x[:, :, None] * torch.ones(4).to(x)).mean(1),
        core=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    )


def checkpointed():
    def forward(m, x):
        return m.layer(checkpoint(lambda h: m.layer(h).tanh(), x, use_reentrant=False))

    return FromFunction(forward, layer=linear())


def patched_method():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model.forward = types.MethodType(lambda self, x: self[2](self[0](x).sigmoid()) * 2, model)
    return model


def patched_partial():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[1].forward = functools.partial(lambda layer, x: layer(x).tanh(), model[0])
    return model


def patched_closure():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    original = model.forward
    model.forward = lambda x: original(x) + model[0](x)
    return model


def nested_wrappers():
    inner = shared_in_sequential()
    outer = FromFunction(lambda m, x: m.inner(x), inner=inner)
    return FromFunction(lambda m, x: m.outer(x) + m.inner(x), outer=outer, inner=inner)


def tied_in_forward():
    def forward(m, x):
        m.decoder.weight = m.encoder.weight
        return m.decoder(m.encoder(x).tanh())

    model = FromFunction(forward, encoder=linear(), decoder=linear())
    model.decoder.weight = model.encoder.weight
    return model


def asks_for_parameters():
    def forward(m, x):
        parameters = [p for p in m.layer._parameters.values() if isinstance(p, nn.Parameter)]
        return m.layer(x) + sum(p.sum() for p in parameters)

    return FromFunction(forward, layer=linear())


def broadcast_gradient():
    other = nn.Linear(4, 4, bias=False)
    return FromFunction(lambda m, x: m.layer(x) + m.other.weight.sum(), layer=linear(), other=other)


def nested_log():
    def forward(m, x):
        m.log["calls"].append(1)
        m.count += 1
        return m.layer(x)

    model = FromFunction(forward, layer=linear())
    model.log, model.count = {"calls": []}, torch.zeros(1)
    model.words = {str(number): number for number in range(10000)}
    return model


MODELS = {
    "asks for parameters": asks_for_parameters,
    "gradient that is expanded": broadcast_gradient,
    "nested log and counter": nested_log,
    "[l, tanh, l]": shared_in_sequential,
    "ModuleList([b]*3)": shared_blocks,
    "siamese": siamese,
    "a container and its part": shared_container_and_part,
    "tied parameter": tied_parameter,
    "tied embedding": tied_embedding,
    "parameter in a list": parameter_in_a_list,
    "parameter as plain attribute": parameter_as_plain_attribute,
    "weight_norm": lambda: parametrised(parametrizations.weight_norm),
    "spectral_norm": lambda: parametrised(parametrizations.spectral_norm),
    "orthogonal": lambda: parametrised(parametrizations.orthogonal),
    "shared weight_norm": shared_parametrised,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": old_spectral_norm,
    "hooks": hooked,
    "gradient hook": gradient_hook,
    "lazy cache": lazy_cache,
    "RNN": lambda: recurrent(nn.RNN),
    "LSTM": lambda: recurrent(nn.LSTM),
    "shared LSTM": shared_lstm,
    "attention": attention,
    "transformer": transformer,
    "checkpointed": checkpointed,
    "patched with a method": patched_method,
    "patched with partial": patched_partial,
    "patched with a closure": patched_closure,
    "nested wrappers": nested_wrappers,
}


def build(name):
    """A model by its name, in float64, in training mode, with gradients in place."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    return model
