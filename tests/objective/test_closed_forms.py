"""Closed forms of second derivatives: against torch's own, and finite differences."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tacit import Objective
from tacit.objective import closed_forms, forward_rules
from tacit.objective.closed_forms import ClosedForms
from tacit.objective.derivatives import math_attention


@pytest.fixture(autouse=True)
def few_classes(monkeypatch):
    monkeypatch.setattr(closed_forms, "MIN_CLASSES", 2)
    monkeypatch.setattr(closed_forms, "CHUNK", 20)
    monkeypatch.setattr(forward_rules, "CHUNK", 20)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


PROBABILITIES = normal(6, 5, seed=9).softmax(1)
LABELS = torch.tensor([0, 3, -100, 4, 1, 1])
CROSS_ENTROPIES = {
    "mean": lambda z: F.cross_entropy(z, LABELS),
    "sum": lambda z: F.cross_entropy(z, LABELS, reduction="sum"),
    "none": lambda z: F.cross_entropy(z, LABELS, reduction="none"),
    "ignored": lambda z: F.cross_entropy(z[3:], LABELS[3:], ignore_index=1),
    "all ignored but one": lambda z: F.cross_entropy(z[:2], LABELS[1:3]),
    "positions": lambda z: F.cross_entropy(z.view(2, 3, 5).mT, LABELS.view(2, 3)),
    "images": lambda z: F.cross_entropy(
        z.view(1, 2, 3, 5).movedim(-1, 1), LABELS.view(1, 2, 3), reduction="none"
    ),
    "one": lambda z: F.cross_entropy(z[0], LABELS[0]),
    "module": lambda z: nn.CrossEntropyLoss()(z, LABELS),
    "class weights": lambda z: F.cross_entropy(z, LABELS, weight=torch.arange(1.0, 6).double()),
    "smoothing": lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1),
    "probabilities": lambda z: F.cross_entropy(z, PROBABILITIES),
}
LAYER_NORMS = {
    "affine": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "large epsilon": lambda x, w, b: F.layer_norm(x, (4,), w, b, eps=0.5),
    "two dimensions": lambda x, w, b: F.layer_norm(x, (3, 4), w.expand(3, 4) + 0, b.expand(3, 4)),
    "one row": lambda x, w, b: F.layer_norm(x[0, 0], (4,), w, b),
    "no bias": lambda x, w, b: F.layer_norm(x, (4,), w) + b,
    "no parameters": lambda x, w, b: F.layer_norm(x, (4,)) * w + b,
    "transposed": lambda x, w, b: F.layer_norm(x.transpose(0, 1), (4,), w, b),
}
CASES = {f"cross-entropy, {n}": (f, (normal(6, 5),)) for n, f in CROSS_ENTROPIES.items()} | {
    f"layer norm, {n}": (f, (normal(2, 3, 4), 1 + 0.3 * normal(4, seed=1), normal(4, seed=2)))
    for n, f in LAYER_NORMS.items()
}

FLAT = {
    "cross-entropy, positions": lambda z: F.cross_entropy(z, LABELS),
    "cross-entropy, images": lambda z: F.cross_entropy(z, LABELS, reduction="none").view(1, 2, 3),
}
"""The same, where torch has no second derivative of losses of several positions."""


def derivatives(function, inputs, order):
    """Value, gradient and higher derivatives of a random combination, along random directions."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    # Inputs that are used in a nonlinear way, so that all second derivatives are reached.
    value = function(*(x + 0.1 * x**2 for x in inputs))
    results, here = [value], (value.square() * normal(*value.shape, seed=3)).sum()
    for number in range(order):
        gradients = torch.autograd.grad(here, inputs, create_graph=number < order - 1)
        results += gradients
        directions = [normal(*x.shape, seed=10 * number + i) for i, x in enumerate(inputs)]
        here = sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))
    return results


@pytest.mark.parametrize("case", CASES)
def test_derivatives_up_to_the_third_are_those_of_torch(case):
    function, inputs = CASES[case]
    order = 2 if "layer norm" in case else 3  # torch's third derivative of layer norm is wrong
    expected = derivatives(FLAT.get(case, function), inputs, order)
    with ClosedForms():
        computed = derivatives(function, inputs, order)
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "case", [c for c in CASES if not any(word in c for word in ("no ", "weights", "one row"))]
)
def test_third_derivatives_are_finite_differences_of_second_ones(case):
    function, inputs = CASES[case]

    def second(*point):
        value = function(*point)
        mixed = (value.square() * normal(*value.shape, seed=3)).sum()
        gradients = torch.autograd.grad(mixed, point, create_graph=True)
        along = sum((g * normal(*g.shape, seed=4)).sum() for g in gradients)
        return torch.autograd.grad(along, point, create_graph=True)

    with ClosedForms():
        point = [x.clone().requires_grad_() for x in inputs]
        assert torch.autograd.gradcheck(second, point, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_forward_mode_and_vmap(case):
    function, inputs = CASES[case]
    tangents = tuple(normal(3, *x.shape, seed=i) for i, x in enumerate(inputs))

    def directional(*direction):
        return torch.func.jvp(function, inputs, direction)[1]

    def gradient(*direction):
        point = tuple(x + v for x, v in zip(inputs, direction, strict=True))
        every = tuple(range(len(inputs)))
        return torch.func.grad(lambda *p: function(*p).square().sum(), argnums=every)(*point)

    for transformed in (directional, gradient):
        expected = torch.func.vmap(transformed)(*tangents)
        with ClosedForms():
            computed = torch.func.vmap(transformed)(*tangents)
        torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        expected = torch.func.vmap(directional)(*tangents)
        with ClosedForms(forward=True):
            computed = torch.func.vmap(directional)(*tangents)
        torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-12)


ATTENTION = {
    "all": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3, "is_causal": True},
    "more keys": {"is_causal": True, "queries": 2},
    "mask": {"attn_mask": normal(5, 5, seed=8)},
    "mask of each example": {"attn_mask": normal(3, 1, 1, 5, seed=8)},
    "boolean mask": {"attn_mask": normal(5, 5, seed=8) > 0},
    "nothing to attend to": {"attn_mask": torch.arange(5)[:, None] > torch.arange(5)},
    "shared heads": {"enable_gqa": True, "heads": 1},
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_in_forward_mode_is_that_of_torch(case, monkeypatch):
    options = dict(ATTENTION[case])
    queries, heads = options.pop("queries", 5), options.pop("heads", 2)
    inputs = (normal(3, 2, queries, 4), normal(3, heads, 5, 4, seed=1), normal(3, heads, 5, 4))
    tangents = tuple(normal(7, *x.shape, seed=i) for i, x in enumerate(inputs))

    def along(*direction):
        return torch.func.jvp(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), inputs, direction
        )

    with torch.no_grad(), math_attention():
        expected = torch.func.vmap(along)(*tangents)
        with ClosedForms(forward=True):
            computed = torch.func.vmap(along)(*tangents)
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("outputs", [8, 5])
@pytest.mark.parametrize("moving", ["input", "weight", "both"])
def test_wide_linear_layers_in_forward_mode_are_those_of_torch(outputs, moving, monkeypatch):
    monkeypatch.setattr(forward_rules, "MANY_OUTPUTS", 3)
    x, w = normal(2, 3, 4), normal(outputs, 4, seed=1)
    tangents = {"x": normal(7, 2, 3, 4, seed=2), "w": normal(7, outputs, 4, seed=3)}
    names = {"input": ["x"], "weight": ["w"], "both": ["x", "w"]}[moving]

    def along(direction):
        def layer(moved):
            return F.linear(moved.get("x", x), moved.get("w", w))

        return torch.func.jvp(layer, ({n: {"x": x, "w": w}[n] for n in direction},), (direction,))

    chosen = {n: tangents[n] for n in names}
    with torch.no_grad():
        expected = torch.func.vmap(along)(chosen)
        with ClosedForms(forward=True):
            computed = torch.func.vmap(along)(chosen)
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_attention_with_a_mask_that_moves_is_that_of_torch():
    inputs = (*(normal(3, 2, 5, 4, seed=i) for i in range(3)), normal(5, 5, seed=3))
    tangents = tuple(normal(*x.shape, seed=i) for i, x in enumerate(inputs))

    def along():
        return torch.func.jvp(F.scaled_dot_product_attention, inputs, tangents)

    with torch.no_grad(), math_attention():
        expected = along()
        with ClosedForms(forward=True):
            torch.testing.assert_close(along(), expected, rtol=1e-12, atol=1e-13)


NORMS = {
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b, eps=1e-3),
    "group": lambda x, w, b: F.group_norm(x.mT, 2, weight=w, bias=b),
    "root mean square": lambda x, w, b: F.rms_norm(x, (4,), weight=w) + b,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_norm_layers_of_low_precision_are_in_float32_in_forward_mode(name, autocast):
    wide = (normal(5, 3, 4), 1 + normal(4, seed=1) / 4, normal(4, seed=2))
    inputs = tuple(x.bfloat16() for x in wide)
    tangents = tuple(normal(*x.shape, seed=i).bfloat16() for i, x in enumerate(inputs))
    expected = torch.func.jvp(
        NORMS[name], tuple(x.double() for x in inputs), tuple(x.double() for x in tangents)
    )
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ClosedForms(forward=True),
    ):
        value, tangent = torch.func.jvp(NORMS[name], inputs, tangents)
    assert value.dtype == tangent.dtype
    assert autocast or value.dtype == torch.bfloat16  # as without forward mode
    for computed, exact in zip((value, tangent), expected, strict=True):
        torch.testing.assert_close(computed.double(), exact, rtol=0.02, atol=0.03)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_hessian_products_at_many_classes_take_a_few_times_the_logits_memory():
    logits = torch.randn(64, 20_000, requires_grad=True)
    labels, direction = torch.arange(64), torch.randn(64, 20_000)
    sizes: dict[str, int] = {}

    def product(name):
        in_use, most = 0, 0
        with torch.profiler.profile(profile_memory=True) as profiled:
            mean = F.cross_entropy(logits, labels)
            (gradient,) = torch.autograd.grad(mean, logits, create_graph=True)
            (result,) = torch.autograd.grad(gradient, logits, direction)
        for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                in_use += event.nbytes()
                most = max(most, in_use)
        sizes[name] = most
        return result

    expected = product("torch")
    with ClosedForms():
        computed = product("closed form")
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-9)
    logits_size = logits.numel() * 4
    assert sizes["closed form"] < 4 * logits_size < sizes["torch"]


class Checkpointed(nn.Module):
    """Layer norm and cross-entropy of many classes; perhaps run again in the backward pass."""

    def __init__(self, *, checkpointed):
        super().__init__()
        self.first, self.checkpointed = nn.Linear(4, 5), checkpointed
        self.inside = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1100))

    def losses(self, x, y):
        return F.cross_entropy(self.inside(self.first(x)), y, reduction="none")

    def forward(self, x, y):
        if not self.checkpointed:
            return self.losses(x, y)
        return checkpoint(self.losses, x, y, use_reentrant=False)


def test_activation_checkpointing_changes_no_derivative():
    """A part that runs again in the backward pass calls the same functions both times."""
    data = normal(6, 4, seed=1), torch.arange(6) * 100
    derivatives = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(checkpointed=checkpointed).double()
        objective = Objective.from_batch_loss(model, lambda m, b: m(*b), data, batch_size=4)
        direction = {n: normal(*p.shape, seed=2) for n, p in objective.params.items()}
        product = objective.hvp(direction)
        third = objective.curvature_gradient([direction])
        scores = objective.directional_derivatives([direction], signs=torch.ones(6))
        derivatives.append((product, third, scores.values, scores.signed_sum))
    torch.testing.assert_close(*derivatives, rtol=1e-5, atol=1e-7)  # thirds are differences
    for part in (0, 2, 3):
        torch.testing.assert_close(*(d[part] for d in derivatives), rtol=1e-10, atol=1e-12)
