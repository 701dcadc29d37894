"""Hessian products through attention and linear losses, and derivatives in every grad mode."""

import pytest
import torch
from support.columns import random_params
from support.hard_to_differentiate import Custom, DetachedSquare, OnceSquare
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.objectives import assert_close
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tacit
from tacit import InputError, Objective, reference
from tacit.objective.derivatives import math_attention


def test_the_hessian_of_a_loss_that_is_linear_in_the_parameters_is_zero():
    model = nn.Linear(5, 1).double()
    objective = Objective.from_batch_loss(model, lambda m, b: m(b[0])[:, 0], random_data(0))
    product = objective.hvp(random_params(params_of(model), seed=1))
    assert not any(tensor.any() for tensor in product.values())


class Attention(nn.Module):
    """Attention by torch's function, or by torch's module."""

    def __init__(self, module):
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True) if module else None
        self.project, self.out = nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x):
        q, k, v = self.project(x).split(4, dim=-1)
        if self.heads is None:
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        else:
            mixed = self.heads(q, k, v, need_weights=False)[0]
        return self.out(mixed.mean(1))


@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_hessian_products_go_through_attention(module):
    torch.manual_seed(0)
    model = Attention(module).double()
    X = torch.randn(12, 3, 4, dtype=torch.float64)
    data = X, torch.sin(X.sum((1, 2)))[:, None]
    direction = random_params(params_of(model), seed=1)
    with sdpa_kernel(SDPBackend.MATH):
        H = reference.hessian(loss_of(model, F.mse_loss, data), params_of(model))
    product = Objective(model, F.mse_loss, data, batch_size=5).hvp(direction)
    assert_close(product, H @ reference.flat(direction), tolerance=1e-10)


def test_fused_attention_is_refused_with_the_math_backend_as_remedy():
    def flash_attention(model, batch):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q = model(batch)[:, None]
            return F.scaled_dot_product_attention(q, q, q).square().mean((1, 2, 3))

    torch.manual_seed(0)
    tokens = torch.randn(6, 3, 8)
    objective = Objective.from_batch_loss(nn.Linear(8, 8), flash_attention, [tokens])
    with pytest.raises(InputError, match=r"double backward.*math backend"):
        tacit.endpoint_equations(objective, tacit.regularizers.gradient_norm(objective))


def attention_settings():
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


@pytest.mark.parametrize("fast_path", [False, True])
def test_math_attention_restores_the_settings_even_after_an_error(fast_path):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        settings = attention_settings()
        with math_attention():
            assert attention_settings() == (False, False, False, True)
        assert attention_settings() == settings
        with pytest.raises(RuntimeError, match="failed"), math_attention():
            raise RuntimeError("failed")
        assert attention_settings() == settings
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_derivatives_are_the_same_under_no_grad_and_inference_mode(mode):
    objective = Objective(tanh_mlp(0), F.mse_loss, random_data(1))
    calls = [objective.gradient, lambda: objective.hvp(objective.params)]
    for call in calls:
        expected = call()
        with mode():
            derivative = call()
        assert torch.equal(reference.flat(derivative), reference.flat(expected))


class Square(torch.autograd.Function):
    """x², which can be differentiated as often as one likes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [DetachedSquare, OnceSquare])
def test_second_derivatives_that_torch_gets_wrong_are_refused_with_the_layers_name(function, dtype):
    torch.manual_seed(0)
    model, data = Custom(function).to(dtype), tuple(t.to(dtype) for t in random_data(2))
    objective = Objective(nn.Sequential(model), F.mse_loss, data)
    with pytest.raises(InputError, match=r"second derivatives of the loss are wrong in 0\.a"):
        tacit.regularizers.gradient_norm(objective).bind(objective.params)
    with pytest.raises(InputError, match="wrong"):  # again
        objective.hvp(objective.params)
    model.function = Square
    product = objective.hvp(objective.params)
    model, data = objective.model.double(), tuple(t.double() for t in data)
    H = reference.hessian(loss_of(model, F.mse_loss, data), params_of(model))
    expected = H @ reference.flat(params_of(model))
    assert_close(product, expected, tolerance=1e-10 if dtype == torch.float64 else 1e-4)


MODELS = {
    "relu": lambda: nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                  nn.Linear(16 * 25, 64), nn.ReLU(), nn.Linear(64, 1)),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8), nn.GELU(),
                                        nn.Linear(8, 1)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(),
                                        nn.Flatten(), nn.Linear(400, 1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_second_derivatives_that_are_right_are_not_refused(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    data = torch.randn(64, 1, 12, 12).to(dtype), torch.randn(64, 1).to(dtype)
    objective = Objective(model, F.mse_loss, data)
    assert objective.hvp(objective.params)


def test_second_derivatives_under_autocast_are_not_judged():
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (model(batch[0])[:, 0] - batch[1][:, 0]).square()

    torch.manual_seed(0)
    data = torch.randn(64, 5), torch.randn(64, 1)
    objective = Objective.from_batch_loss(tanh_mlp(0).float(), loss, data)
    assert objective.hvp(objective.params)
