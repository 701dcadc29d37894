"""Derivatives from local products, against the gradient of each example, model by model."""

import pytest
import torch
from support.models import image_data, params_of, small_cnn, tanh_mlp
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tacit import Objective
from tacit.objective import graph_places, local_derivatives, local_products, per_example

DOUBLE = {"dtype": torch.float64}


class Apply(nn.Module):
    """A model of parameters by name and a function of (model, inputs)."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, tuple):
                member = nn.Parameter(
                    torch.randn(member, generator=torch.Generator().manual_seed(3))
                )
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


class Encoder(nn.Module):
    """Tokens, learned positions, perhaps a class token, an encoder layer, a linear output."""

    def __init__(self, *, tokens=5, class_token=False, **options):
        super().__init__()
        self.batch_first = options.get("batch_first", True)
        self.embed = nn.Embedding(7, 8, padding_idx=0)
        self.position = nn.Embedding(tokens, 8)
        self.start = nn.Parameter(torch.randn(1, 1, 8)) if class_token else None
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        h = self.embed(x) + self.position(torch.arange(x.shape[1]))
        if self.start is not None:
            h = torch.cat([self.start.expand(len(x), -1, -1), h], 1)
        h = self.layer(h if self.batch_first else h.transpose(0, 1))
        h = h if self.batch_first else h.transpose(0, 1)
        return self.out(h.mean(1) if self.start is None else h[:, 0])


class Twice(torch.autograd.Function):
    """x·w, as a function of one's own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


def features(count=11, shape=(5,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, *shape, generator=generator, **DOUBLE)
    return X, torch.randint(0, 3, (count,), generator=generator)


def words(count=11, tokens=5):
    generator = torch.Generator().manual_seed(1)
    X = torch.randint(0, 7, (count, tokens), generator=generator)
    return X, torch.randint(0, 3, (count,), generator=generator)


def sequential(*layers):
    return nn.Sequential(*layers)


def sorted_inputs(model, x):
    order = x[:, 0].argsort()
    return model.b(torch.tanh(model.a(x[order])))[order.argsort()]


def scaled_by_shared(model, x):
    h = x * model.w - model.b * 2
    h = torch.sub(h, model.b, alpha=3) + (model.s * model.s) * x
    return torch.add(model.out(h), model.c, alpha=0.5)


def repeated(model, x):
    return model.out(torch.tanh(model.inside(torch.tanh(model.inside(x)))))


IMAGES = (2, 6, 6)
MODELS = {
    "one linear layer": lambda: (nn.Linear(5, 3), features()),
    "no bias": lambda: (nn.Linear(5, 3, bias=False), features()),
    "MLP": lambda: (tanh_mlp(0, (5, 6, 3)), features()),
    "linear over tokens": lambda: (
        sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6), nn.Flatten(), nn.Linear(240, 3)),
        features(shape=(40, 4)),
    ),
    "addmm": lambda: (
        Apply(lambda m, x: torch.addmm(m.b, x, m.w, alpha=1, beta=2), w=(5, 3), b=(3,)),
        features(),
    ),
    "addmm with alpha": lambda: (
        Apply(lambda m, x: torch.addmm(m.b, x, m.w, alpha=2), w=(5, 3), b=(3,)), features()
    ),
    "weights on the left": lambda: (
        Apply(lambda m, x: (m.w @ x.T).T + m.b, w=(3, 5), b=(1,)), features()
    ),
    "einsum": lambda: (
        Apply(lambda m, x: torch.einsum("nti,tio->no", x, m.w), w=(4, 5, 3)),
        features(shape=(4, 5)),
    ),
    "matrix per token": lambda: (
        Apply(lambda m, x: (x.transpose(0, 1) @ m.w).sum(0), w=(4, 5, 3)), features(shape=(4, 5))
    ),
    "elementwise": lambda: (
        Apply(scaled_by_shared, w=(5,), b=(1,), s=(), c=(1, 3), out=nn.Linear(5, 3)), features()
    ),
    "layer used twice": lambda: (
        Apply(repeated, inside=nn.Linear(5, 5), out=nn.Linear(5, 3)), features()
    ),
    "bilinear": lambda: (Apply(lambda m, x: m.b(x, x), b=nn.Bilinear(5, 5, 3)), features()),
    "PReLU": lambda: (sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, 3)), features()),
    "weight norm": lambda: (
        sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        features(),
    ),
    "orthogonal": lambda: (
        sequential(parametrizations.orthogonal(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        features(),
    ),
    "batch norm": lambda: (small_cnn(0), image_data(0, count=11)),
    "convolutions": lambda: (
        sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.SiLU(),
            nn.Conv2d(4, 4, 2, groups=2, dilation=2), nn.Flatten(), nn.Linear(4, 3),
        ),
        features(shape=IMAGES),
    ),
    "transposed convolution": lambda: (
        sequential(
            nn.ConvTranspose2d(2, 3, 2, stride=2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(),
            nn.Conv2d(3, 3, 12, bias=False), nn.Flatten(),
        ),
        features(shape=IMAGES),
    ),
    "frames in one batch": lambda: (
        Apply(
            lambda m, x: m.out(m.conv(x.flatten(0, 1)).flatten(1).unflatten(0, (len(x), 3)).sum(1)),
            conv=nn.Conv1d(2, 3, 2), out=nn.Linear(9, 3),
        ),
        features(shape=(3, 2, 4)),
    ),
    "norms": lambda: (
        sequential(
            nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.RMSNorm(4), nn.LayerNorm(4, bias=False),
            nn.Linear(4, 3),
        ),
        features(),
    ),
    "encoder, norm first": lambda: (Encoder(batch_first=True, norm_first=True), words()),
    "encoder, tokens first": lambda: (Encoder(batch_first=False), words()),
    "class token": lambda: (Encoder(batch_first=True, class_token=True), words()),
    "class token, tokens first": lambda: (Encoder(batch_first=False, class_token=True), words()),
    "class token of seven, tokens first": lambda: (
        Encoder(batch_first=False, class_token=True, tokens=6), words(tokens=6)
    ),
    "GRU": lambda: (
        Apply(lambda m, x: m.out(m.cell(x)[0][:, -1]), cell=nn.GRU(3, 4, batch_first=True),
              out=nn.Linear(4, 3)),
        features(shape=(4, 3)),
    ),
    "embedding bag": lambda: (
        sequential(nn.EmbeddingBag(7, 4, padding_idx=2), nn.Tanh(), nn.Linear(4, 3)), words()
    ),
    "distances": lambda: (
        Apply(lambda m, x: m.out(torch.exp(-torch.cdist(x, m.w))), w=(4, 5), out=nn.Linear(4, 3)),
        features(),
    ),
    "examples by index": lambda: (
        Apply(lambda m, x: m.out(x)[torch.arange(len(x)), 1], out=nn.Linear(5, 3)),
        features(shape=(2, 5)),
    ),
}  # fmt: skip


def loop_over_examples(model, data, params):
    """The gradient of each example's loss, by name."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    for x, y in zip(*data, strict=True):
        loss = F.cross_entropy(functional_call(model, leaves, (x[None],)), y[None])
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        yield {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(leaves.items(), gradients, strict=True)
        }


def random_directions(params, count=3):
    generator = torch.Generator().manual_seed(1)
    return [
        {n: torch.randn(p.shape, generator=generator, **DOUBLE) for n, p in params.items()}
        for _ in range(count)
    ]


class Count:
    """How many batches took each way."""

    def __init__(self, monkeypatch):
        self.local = self.other = 0
        cls = per_example._FirstOrder
        by_products, by_reverse, by_forward = (
            cls._by_local_products, cls.by_reverse_mode, cls._by_forward_mode
        )  # fmt: skip

        def products(*args):
            values = by_products(*args)
            self.local += values is not None
            return values

        def others(method):
            def call(*args):
                self.other += 1
                return method(*args)

            return call

        monkeypatch.setattr(cls, "_by_local_products", products)
        monkeypatch.setattr(cls, "by_reverse_mode", others(by_reverse))
        monkeypatch.setattr(cls, "_by_forward_mode", others(by_forward))


def compare(model, data, *, batch_size=4, directions=3, **options):
    """Derivatives, and the signed sum, against a loop over the examples."""
    model = model.double().eval()
    objective = Objective(model, F.cross_entropy, data, batch_size=batch_size, **options)
    vs = random_directions(objective.params, directions)
    gradients = list(loop_over_examples(model, data, objective.params))
    expected = torch.tensor(
        [[sum(float((g[n] * v[n]).sum()) for n in v) for v in vs] for g in gradients], **DOUBLE
    )
    signs = torch.randn(len(gradients), generator=torch.Generator().manual_seed(2), **DOUBLE)
    plain = objective.directional_derivatives(vs)
    signed = objective.directional_derivatives(vs, signs=signs)
    assert signed.signed_sum is not None
    for result in (plain, signed):
        torch.testing.assert_close(result.values, expected, rtol=1e-8, atol=1e-10)
    weights = torch.ones(len(gradients)) if signed.weights is None else signed.weights
    for name, total in signed.signed_sum.items():
        sums = sum(s * w * g[name] for s, w, g in zip(signs, weights, gradients, strict=True))
        torch.testing.assert_close(total, sums, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_are_those_of_a_loop_over_examples(name, monkeypatch):
    torch.manual_seed(0)
    model, data = MODELS[name]()
    count = Count(monkeypatch)
    options = {"batch_norm": "running"} if name == "batch norm" else {}
    compare(model, data, **options)
    assert (count.local, count.other) == (6, 0)


@pytest.mark.parametrize("cost", [0, 10**9])
@pytest.mark.parametrize("block", [1, 30, 2**18])
def test_linear_layers_by_matrices_or_by_directions(cost, block, monkeypatch):
    monkeypatch.setattr(local_products, "GRADIENT_COST", cost)
    monkeypatch.setattr(local_products, "BLOCK_ENTRIES", block)
    for name in ("linear over tokens", "addmm", "encoder, norm first", "encoder, tokens first"):
        torch.manual_seed(0)
        compare(*MODELS[name]())


def test_weights_frozen_and_unused_parameters_and_draws_of_dropout(monkeypatch):
    count = Count(monkeypatch)
    X, y = features(12)
    torch.manual_seed(0)
    model = Apply(
        lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(5, 4), b=nn.Linear(4, 3), unused=(2,)
    )
    model.a.bias.requires_grad_(False)
    compare(model, (X, y), weights=torch.linspace(0.5, 2, 12, **DOUBLE))
    dropout = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 3)).double()
    options = {"training": True, "draws": 3, "batch_size": 5}
    objective = Objective(dropout, F.cross_entropy, (X, y), **options)
    directions, gradient = random_directions(objective.params), objective.gradient()
    expected = [sum(float((gradient[n] * v[n]).sum()) for n in v) for v in directions]
    mean = objective.directional_derivatives(directions).values.mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected, **DOUBLE))
    assert count.other == 0


def test_directions_may_leave_out_names_or_be_made_on_demand():
    model, data = tanh_mlp(0, (5, 6, 3)), features()
    objective = Objective(model, F.cross_entropy, data, batch_size=4)
    directions = random_directions(objective.params)
    partial = [{n: v[n] for n in ("0.weight", "2.bias")} for v in directions]
    zeros = {n: torch.zeros_like(p) for n, p in objective.params.items()}
    signs = torch.ones(11, **DOUBLE)
    expected = objective.directional_derivatives([zeros | v for v in partial], signs=signs)

    class OnDemand(list):
        pass

    class Made:
        def __len__(self):
            return len(partial)

        def __getitem__(self, index):
            return partial[index]

    for sequence in (OnDemand(partial), Made()):
        result = objective.directional_derivatives(sequence, signs=signs)
        torch.testing.assert_close(result.values, expected.values)
        for name, total in result.signed_sum.items():
            torch.testing.assert_close(total, expected.signed_sum[name])


def hooked():
    model = tanh_mlp(0, (5, 6, 3))
    model[0].weight.register_hook(lambda gradient: gradient * 1)
    return model


OTHERS = {
    "sorted examples": lambda: (
        Apply(sorted_inputs, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), features()
    ),
    "custom function": lambda: (
        Apply(lambda m, x: m.out(Twice.apply(x, m.w)), w=(5,), out=nn.Linear(5, 3)), features()
    ),
    "checkpoint": lambda: (
        Apply(
            lambda m, x: m.out(checkpoint(m.a, x, use_reentrant=False)),
            a=tanh_mlp(0, (5, 5, 4)), out=nn.Linear(4, 3),
        ),
        features(),
    ),
    "hook": lambda: (hooked(), features()),
    "two examples": lambda: (tanh_mlp(0, (5, 6, 3)), features(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_take_the_way_through_the_whole_network(name, monkeypatch):
    count = Count(monkeypatch)
    torch.manual_seed(0)
    model, data = OTHERS[name]()
    compare(model, data)
    assert count.other
    assert not count.local or name == "sorted examples"


def test_batches_of_other_shapes_and_losses_of_tokens(monkeypatch):
    count = Count(monkeypatch)
    torch.manual_seed(0)
    model = Encoder(batch_first=True).double().eval()
    X, y = words(12)
    batches = [(X[:6], y[:6]), (X[6:, :3], y[6:])]
    objective = Objective(model, F.cross_entropy, batches)
    directions = random_directions(objective.params)
    result = objective.directional_derivatives(directions).values
    assert (count.local, count.other) == (1, 1)
    for rows, batch in zip(result.split(6), batches, strict=True):
        part = Objective(model, F.cross_entropy, batch)
        torch.testing.assert_close(rows, part.directional_derivatives(directions).values)

    def token_losses(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")

    tokens = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    count.local = 0
    objective = Objective.from_batch_loss(tokens, token_losses, (X, X))
    objective.directional_derivatives(random_directions(objective.params))
    assert not count.local


def test_a_wrong_rule_is_noticed(monkeypatch):
    """A rule with the wrong sign is not used, for example for a new kind of operation."""
    count = Count(monkeypatch)
    rule = local_products.RULES["AddmmBackward0", 0]

    def wrong(*args):
        columns, cotangent = rule(*args)
        return local_products.Product(-columns, cotangent)

    monkeypatch.setitem(local_products.RULES, ("AddmmBackward0", 0), wrong)
    compare(tanh_mlp(0, (5, 6, 3)), features())
    assert not count.local


def test_a_batch_that_differs_from_the_first_examples_is_noticed(monkeypatch):
    """Rows of tokens taken for those of examples: the products of a whole batch disagree."""
    count = Count(monkeypatch)

    def first_possible(place, gradients):
        return place, False

    monkeypatch.setattr(local_derivatives, "place_rows", first_possible)
    monkeypatch.setattr(local_derivatives.LocalDerivatives, "check_examples", lambda *_: None)
    torch.manual_seed(0)
    compare(Encoder(batch_first=False), words())
    assert not count.local


def test_interacting_examples_are_refused():
    X, _ = features()
    model = Apply(lambda m, x: m.a(x) + m.a(x).flip(0), a=nn.Linear(5, 3)).double()
    leaves = {n: p.requires_grad_() for n, p in params_of(model).items()}

    def graph(count):
        return graph_places.graph_of([functional_call(model, leaves, (X[:count],))], leaves)

    places = graph_places.find_places(graph(2), graph(3))
    gradient = torch.ones(3, 3)
    with pytest.raises(local_products.NoLocalProductError, match="interact"):
        graph_places.place_rows(places[0], [gradient] * 3)


def test_single_precision_agrees_to_rounding(monkeypatch):
    count = Count(monkeypatch)
    torch.manual_seed(0)
    model, data = Encoder(batch_first=True, norm_first=True).double().eval(), words()
    exact = Objective(model, F.cross_entropy, data)
    directions = random_directions(exact.params)
    expected = exact.directional_derivatives(directions).values
    single = Objective(model.float(), F.cross_entropy, data)
    values = single.directional_derivatives(directions).values
    assert float((values - expected).norm()) < 1e-5 * float(expected.norm())
    assert count.other == 0
