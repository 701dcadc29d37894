"""Regularizers from a function of the parameters."""

import pytest
import torch
from support.hard_to_differentiate import Custom, DetachedSquare
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import tacit

PARAMS = {
    "a": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "b": torch.tensor([3.0], dtype=torch.float64),
}


def product(params):
    return params["a"].square().sum() * params["b"].sum()


def test_parameters_outside_the_scope_are_constants():
    penalty = tacit.regularizer("product", product, scope="a")
    gradient = penalty.gradient(PARAMS)["product"]
    assert gradient["a"].tolist() == [6.0, 12.0]
    assert gradient["b"].tolist() == [0.0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_columns_are_computed_even_where_gradients_are_switched_off(context):
    with context():
        gradient = tacit.regularizer("product", product).gradient(PARAMS)["product"]
    assert gradient["b"].tolist() == [5.0]


class Normalised(nn.Module):
    """A network with layer norm, fused "by a module" or "natively", or in elementary operations."""

    def __init__(self, fused):
        super().__init__()
        self.fused, self.a, self.norm, self.b = (
            fused,
            nn.Linear(5, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 1),
        )

    def forward(self, x):
        h = self.a(x)
        if self.fused == "by a module":
            h = self.norm(h)
        elif self.fused == "natively":
            shape = self.norm.normalized_shape
            h = torch.native_layer_norm(h, shape, self.norm.weight, self.norm.bias, 1e-5)[0]
        else:
            deviation, variance = (
                h - h.mean(1, keepdim=True),
                h.var(1, unbiased=False, keepdim=True),
            )
            h = deviation / (variance + self.norm.eps).sqrt() * self.norm.weight + self.norm.bias
        return self.b(torch.tanh(h))


def curvature(model, data):
    """zᵀ H z of the loss for fixed z, whose gradient takes three derivatives."""

    def value(params):
        loss = F.mse_loss(functional_call(model, params, (data[0],)), data[1])
        tensors, generator = list(params.values()), torch.Generator().manual_seed(0)
        z = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in tensors]
        gradients = torch.autograd.grad(loss, tensors, create_graph=True)
        along = sum((g * v).sum() for g, v in zip(gradients, z, strict=True))
        products = torch.autograd.grad(along, tensors, create_graph=True)
        return sum((h * v).sum() for h, v in zip(products, z, strict=True))

    return value


def gradient_of(model, data):
    return tacit.regularizer("curvature", curvature(model, data)).gradient(
        dict(model.named_parameters())
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_third_derivatives_through_a_fused_norm_are_right_or_refused_with_the_layers_name(dtype):
    torch.manual_seed(0)
    model = Normalised(fused="").to(dtype)
    data = torch.randn(20, 5, dtype=dtype), torch.randn(20, 1, dtype=dtype)
    expected = gradient_of(model, data)["curvature"]["a.weight"]
    model.fused = "by a module"
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    ours = gradient_of(model, data)["curvature"]["a.weight"]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    model.fused = "natively"
    params = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    value = curvature(model, data)(params)
    torch_gives = torch.autograd.grad(value, params["a.weight"])[0].double()
    if torch.allclose(torch_gives, expected, rtol=1e-2, atol=1e-2):
        pytest.skip("this version of torch is right")
    with pytest.raises(
        tacit.InputError, match="gradient of regularizer 'curvature' is wrong in a:"
    ):
        gradient_of(model, data)


def test_two_derivatives_through_a_function_that_has_one_are_refused():
    torch.manual_seed(0)
    model = Custom(DetachedSquare).double()
    data = torch.randn(20, 5).double(), torch.randn(20, 1).double()

    def squared_gradient(params):
        loss = F.mse_loss(functional_call(model, params, (data[0],)), data[1])
        gradients = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        return sum(g.square().sum() for g in gradients)

    penalty = tacit.regularizer("squared_gradient", squared_gradient)
    with pytest.raises(tacit.InputError, match="is wrong in a, b"):
        penalty.bind(dict(model.named_parameters()))


def test_a_part_that_is_held_constant_is_refused():
    def adaptive(params):
        return (params["a"].detach().abs() * params["a"].square()).sum() + params["b"].sum()

    with pytest.raises(tacit.InputError, match=r"constant \(\.detach"):
        tacit.regularizer("adaptive", adaptive).bind(PARAMS)


ACCEPTED = {
    "kinks": lambda p: p["a"].abs().sum() + F.relu(p["zero"]).sum() + p["zero"].abs().sum(),
    "a minimum": lambda p: (p["a"] - p["a"].detach()).square().sum() + p["zero"].square().sum(),
    "noise": lambda p: (torch.randn(2, dtype=torch.float64) * p["a"]).sum() ** 2,
    "a large constant": lambda p: 1e9 + p["a"].square().sum(),
    "float32 inside": lambda p: p["a"].float().square().sum(),
    "low precision inside": lambda p: p["a"].bfloat16().square().sum(),
    "a norm at zero": lambda p: p["zero"].norm() + p["a"].norm(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_gradients_that_differences_cannot_judge_are_accepted(name):
    params = PARAMS | {"zero": torch.zeros(3, dtype=torch.float64)}
    state = torch.get_rng_state()
    columns = tacit.regularizer("penalty", ACCEPTED[name]).bind(params)
    assert columns.names == ("penalty",)
    if name != "noise":
        assert torch.equal(torch.get_rng_state(), state)


def test_the_gradient_is_compared_only_once():
    calls = []

    def counted(params):
        calls.append(1)
        return params["a"].square().sum()

    penalty = tacit.regularizer("counted", counted)
    penalty.bind(PARAMS)
    first = len(calls)
    penalty.bind(PARAMS)
    assert len(calls) == first + 1


def test_penalties_may_differentiate_through_attention():
    torch.manual_seed(0)
    X, layer = torch.randn(4, 5, 8).double(), nn.MultiheadAttention(8, 2).double()

    def input_gradient(params):
        inputs = X.clone().requires_grad_()
        output, _ = functional_call(
            layer, params, (inputs, inputs, inputs), {"need_weights": False}
        )
        (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return gradient.square().sum()

    penalty = tacit.regularizer("input_gradient", input_gradient)
    params = {n: p.detach() for n, p in layer.named_parameters()}
    gradient = penalty.gradient(params)["input_gradient"]
    step, name = 1e-6, "out_proj.weight"
    moved = {**params, name: params[name] + step * gradient[name]}
    change = penalty.value(moved) - penalty.value(params)
    assert float(change.detach()) / step == pytest.approx(
        float(gradient[name].square().sum()), rel=1e-3
    )
