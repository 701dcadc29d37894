"""The squared Jacobian and the Laplacian by the inputs, against torch.func on single examples."""

import pytest
import torch
from support.hard_to_differentiate import NativeLayerNorm
from support.models import image_data, params_of, random_data, small_cnn, tanh_mlp
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from tacit import InputError, Objective, reference
from tacit.regularizers import input_jacobian, input_laplacian


def naive_terms(model, loss, params, x, target):
    """Both terms of one example (of batch 1), by dense derivatives."""

    def outputs(x):
        return functional_call(model, params, (x,)).flatten()

    def loss_of_outputs(f):
        return loss(f.reshape(functional_call(model, params, (x,)).shape), target)

    f = outputs(x)
    jacobian = jacrev(outputs)(x).reshape(len(f), -1)
    hessians = jacrev(jacrev(outputs))(x).reshape(len(f), x.numel(), x.numel())
    curvature, slope = jacrev(jacrev(loss_of_outputs))(f), jacrev(loss_of_outputs)(f)
    laplacian = hessians.diagonal(dim1=1, dim2=2).sum(1)
    return (jacobian * (curvature @ jacobian)).sum(), slope @ laplacian


def naive(model, loss, data, weights=None):
    """Both penalties as functions of the parameters."""
    X, y = data
    weights = torch.ones(len(X)).double() if weights is None else weights

    def means(params):
        terms = [
            naive_terms(model, loss, params, X[i : i + 1], y[i : i + 1]) for i in range(len(X))
        ]
        return weights @ torch.stack([torch.stack(t) for t in terms]) / weights.sum()

    return means


def tanh_cnn():
    torch.manual_seed(0)
    conv, head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 3)
    return nn.Sequential(conv, nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), head).double()


def images(count=5):
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return X, torch.arange(count) % 3


CASES = {
    "squared error": (tanh_mlp(0, sizes=(3, 4, 2)), F.mse_loss, random_data(1, 6, 3, 2)),
    "cross-entropy": (
        tanh_mlp(0, sizes=(3, 4, 3)),
        F.cross_entropy,
        (random_data(1, 6, 3)[0], torch.arange(6) % 3),
    ),
    "a loss with other curvature": (
        tanh_mlp(1, sizes=(3, 4, 1)),
        lambda f, y: torch.log(1 + (f - y).square()).mean(),
        random_data(2, 6, 3),
    ),
    "images": (tanh_cnn(), F.cross_entropy, images()),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_columns_are_those_of_dense_derivatives(name):
    model, loss, data = CASES[name]
    weights = torch.linspace(0.5, 2, len(data[0])).double()
    objective, params = (
        Objective(model, loss, data, weights=weights, batch_size=4),
        params_of(model),
    )
    means = naive(model, loss, data, weights)
    for k, make in enumerate((input_jacobian, input_laplacian)):
        penalty = make(objective)
        torch.testing.assert_close(penalty.value(params)[0], means(params)[k])
        column = reference.flat(penalty.gradient(params)[penalty.name])
        expected = reference.gradient(lambda p, k=k: means(p)[k], params)
        torch.testing.assert_close(column, expected, rtol=1e-8, atol=1e-10)


def test_for_half_squared_error_they_are_bishops_formulas():
    model, (X, y) = tanh_mlp(0, sizes=(3, 4, 2)), random_data(1, 6, 3, 2)

    def half(output, target):
        return (output - target).square().sum(1).mean() / 2

    objective, params = Objective(model, half, (X, y)), params_of(model)
    weighted, plain = (input_jacobian(objective, weighted=w) for w in (True, False))
    jacobians = torch.stack([jacrev(model)(x) for x in X])
    hessians = torch.stack([jacrev(jacrev(model))(x) for x in X])
    expected = jacobians.square().sum() / 6
    for penalty in (weighted, plain):
        torch.testing.assert_close(penalty.value(params)[0], expected.detach())
    laplacians = hessians.diagonal(dim1=2, dim2=3).sum(2)
    expected = ((model(X) - y) * laplacians).sum() / 6
    torch.testing.assert_close(input_laplacian(objective).value(params)[0], expected.detach())


def test_running_batch_norm_is_followed_and_batch_statistics_are_refused():
    model, data = small_cnn(0), image_data(0, count=6)
    objective = Objective(model, F.cross_entropy, data, batch_norm="running")
    penalty, params = input_jacobian(objective, weighted=False), params_of(model)
    jacobians = [jacrev(lambda x: model(x[None])[0])(x) for x in data[0]]
    expected = sum(j.square().sum() for j in jacobians) / 6
    torch.testing.assert_close(penalty.value(params)[0], expected.detach())
    batch = Objective(model, F.cross_entropy, data, batch_norm="batch", batch_size=3)
    with pytest.raises(InputError, match="batch_norm='running'"):
        input_jacobian(batch)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 2).double(), nn.Linear(2, 2).double()

    def forward(self, x, z):
        return torch.tanh(self.a(x)) * torch.sin(self.b(z))


@pytest.mark.parametrize("make", [input_jacobian, input_laplacian])
def test_of_several_inputs_the_chosen_ones_count(make):
    model, (X, y) = TwoInputs(), random_data(1, 6, 3, 2)
    objective, params = Objective(model, F.mse_loss, (X, 0.5 * y, y)), params_of(model)
    first, second, both = (make(objective, inputs=i).value(params) for i in (0, 1, [0, 1]))
    torch.testing.assert_close(first + second, both)
    with pytest.raises(InputError, match=r"2 inputs: pass inputs="):
        make(objective)
    for wrong in (2, -1, True, [], "x", [0, 3]):
        with pytest.raises(InputError, match="counted from 0 to 1"):
            make(objective, inputs=wrong)


def mlp_objective(loss=F.mse_loss, **options):
    return Objective(tanh_mlp(0), loss, random_data(0), **options)


def token_objective():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1)).double()
    return Objective(
        model, F.mse_loss, (torch.arange(10).reshape(5, 2) % 5, torch.ones(5, 1).double())
    )


def batch_loss_objective():
    return Objective.from_batch_loss(tanh_mlp(0), lambda m, b: m(b[0])[:, 0], random_data(0))


def linear_objective():
    return Objective(nn.Linear(5, 1).double(), F.mse_loss, random_data(0))


REFUSED = {
    "tokens": (lambda: input_jacobian(token_objective()), "make the embeddings the data"),
    "a batch loss": (lambda: input_laplacian(batch_loss_objective()), "to mean_of"),
    "too many inputs": (lambda: input_laplacian(mlp_objective(), limit=4), "limit=5"),
    "too many outputs": (
        lambda: input_jacobian(Objective(*CASES["squared error"]), limit=1),
        "limit=2",
    ),
    "a linear model": (lambda: input_laplacian(linear_objective()), "linear in these inputs"),
    "a linear loss": (
        lambda: input_jacobian(mlp_objective(lambda f, y: (f * y).mean())),
        "weighted=False",
    ),
    "a model": (lambda: input_jacobian(tanh_mlp(0)), "pass the tacit.Objective"),
    "a limit of 0": (lambda: input_jacobian(mlp_objective(), limit=0), "limit is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_derivatives_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        call()


def test_wrong_third_derivatives_of_a_fused_norm_are_refused():
    torch.manual_seed(0)
    layers = nn.Linear(5, 6), NativeLayerNorm(6), nn.Tanh(), nn.Linear(6, 1)
    model = nn.Sequential(*layers).double()
    objective, params = Objective(model, F.mse_loss, random_data(0)), params_of(model)
    with pytest.raises(InputError, match=r"input_laplacian is wrong in 0"):
        input_laplacian(objective).bind(params)
    penalty = input_jacobian(objective)  # takes no third derivative
    expected = reference.gradient(lambda p: naive(model, F.mse_loss, random_data(0))(p)[0], params)
    column = reference.flat(penalty.gradient(params)["input_jacobian"])
    torch.testing.assert_close(column, expected, rtol=1e-8, atol=1e-10)
