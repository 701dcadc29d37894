"""Joining columns, and families split by layer."""

import torch
from support.columns import random_params
from support.models import params_of, tanh_mlp

import tacit
from tacit.regularizers import join_columns

PARAMS = random_params(params_of(tanh_mlp(0, sizes=(3, 4, 2))))


def test_joined_columns_stand_side_by_side_on_the_tensors_that_each_covers():
    families = [tacit.l2(), tacit.regularizers.nuclear_norm(), tacit.layerwise(tacit.l1())]
    separate = [family.bind(PARAMS) for family in families]
    joined = join_columns(separate)
    assert joined.names == ("l2", "nuclear_norm", "l1[0]", "l1[2]")
    assert joined.active == {
        "0.weight": (0, 1, 2),
        "0.bias": (0, 2),
        "2.weight": (0, 1, 3),
        "2.bias": (0, 3),
    }
    for name, tensor in PARAMS.items():
        part = slice(1, tensor.numel())
        blocks = [columns.rows(name, part) for columns in separate if name in columns.active]
        assert torch.equal(joined.rows(name, part), torch.cat(blocks, dim=1))


def test_joined_columns_have_the_kinks_of_all_families():
    params = {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)}
    families = [tacit.l2(), tacit.l1(), tacit.regularizers.group_l2()]
    joined = join_columns([family.bind(params) for family in families])
    assert joined.kinks("w", slice(0, 4)).tolist() == [False, True, True, True]
    smooth = join_columns([tacit.l2().bind(params)])
    assert smooth.kinks("w", slice(0, 4)) is None


def test_layerwise_names_parameters_of_the_outermost_module():
    assert tacit.layerwise(tacit.l2).bind({"weight": torch.ones(2)}).names == ("l2[(model)]",)
