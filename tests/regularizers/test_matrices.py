"""Group lasso and nuclear norm: kinks, and tensors of more than two dimensions."""

import pytest
import torch
from support.columns import dense_columns, kink_positions, kinks_of, random_params
from support.models import params_of, tanh_mlp

from tacit.regularizers import group_l2, nuclear_norm

PARAMS = params_of(tanh_mlp(0, sizes=(3, 4, 2)))


def test_group_l2_has_kinks_only_at_zero_rows():
    params = random_params(PARAMS)
    params["0.weight"][1] = 0
    params["2.weight"][0, 1:] = 0
    params["2.bias"][1] = 0
    assert kink_positions(group_l2(), params) == {
        "0.weight": [[1, 0], [1, 1], [1, 2]],
        "2.bias": [[1]],
    }


def test_nuclear_norm_has_kinks_at_matrices_of_deficient_rank():
    params = random_params(PARAMS)
    params["0.weight"][:, 2] = params["0.weight"][:, 0] - 2 * params["0.weight"][:, 1]
    kinks = kinks_of(nuclear_norm(), params)
    assert kinks["0.weight"].all()
    assert not kinks["2.weight"].any()


@pytest.mark.parametrize("make", [group_l2, nuclear_norm])
def test_tensors_of_more_dimensions_are_matrices_by_their_first_dimension(make):
    torch.manual_seed(0)
    kernel = {"w": torch.randn(3, 2, 2, 2, dtype=torch.float64)}
    matrix = {"w": kernel["w"].reshape(3, 8)}
    columns, expected = dense_columns(make(), kernel), dense_columns(make(), matrix)
    torch.testing.assert_close(columns, expected, rtol=0, atol=0)
    torch.testing.assert_close(make().value(kernel), make().value(matrix), rtol=1e-14, atol=0)
