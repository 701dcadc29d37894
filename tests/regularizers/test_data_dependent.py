"""The squared gradient norm of an objective."""

import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import reference


def test_column_of_gradient_norm_is_twice_the_hessian_times_the_gradient():
    model, data = tanh_mlp(0, sizes=(3, 4, 2)), random_data(1, count=9, inputs=3, outputs=2)
    penalty = tacit.regularizers.gradient_norm(tacit.Objective(model, F.mse_loss, data))
    params, mean_loss = params_of(model), loss_of(model, F.mse_loss, data)
    column = reference.flat(penalty.gradient(params)["gradient_norm"])
    hessian, gradient = (f(mean_loss, params) for f in (reference.hessian, reference.gradient))
    torch.testing.assert_close(column, 2 * hessian @ gradient, rtol=1e-10, atol=1e-12)


def test_a_scope_limits_the_column_but_not_the_norm():
    model, data = tanh_mlp(0, sizes=(3, 4, 2)), random_data(1, count=9, inputs=3, outputs=2)
    objective, params = tacit.Objective(model, F.mse_loss, data), params_of(model)
    whole = tacit.regularizers.gradient_norm(objective)
    scoped = tacit.regularizers.gradient_norm(objective, scope="2")
    assert torch.equal(whole.value(params), scoped.value(params))
    assert set(scoped.bind(params).active) == {"2.weight", "2.bias"}
