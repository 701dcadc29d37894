"""Regularizers from a function of the parameters."""

import pytest
import torch

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
