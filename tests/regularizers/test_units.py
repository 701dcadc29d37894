"""Balance of hidden units: which matrices are paired, biases, convolutions, conservation."""

import pytest
import torch
from support.columns import dense_columns, random_params
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.regularizers import balance, check_contract

PARAMS = params_of(tanh_mlp(0, sizes=(3, 4, 2)))


def relu_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.LeakyReLU(), nn.Linear(6, 1)
    ).double()


def test_successive_matrices_that_fit_are_paired():
    params = params_of(relu_network())
    named = balance([("0.weight", "2.weight"), ("2.weight", "4.weight")])
    torch.testing.assert_close(dense_columns(balance(), params), dense_columns(named, params))
    assert set(balance().bind(params).active) == {"0.weight", "2.weight", "4.weight"}
    assert "0.bias" in balance(biases=True).bind(params).active
    first = balance([("0.weight", "2.weight")])
    assert set(first.bind(params).active) == {"0.weight", "2.weight"}


def test_units_of_convolutions_are_channels():
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (4, 3, 3, 3), "0.bias": (4,), "2.weight": (5, 4, 2, 2)}
    params = {n: torch.randn(s, generator=generator).double() for n, s in shapes.items()}
    W, b, V = params.values()
    expected = sum(
        (float(W[j].square().sum() + b[j] ** 2) - float(V[:, j].square().sum())) ** 2
        for j in range(4)
    )
    assert balance(biases=True).value(params).item() == pytest.approx(expected, rel=1e-12)
    check_contract(balance(biases=True), params)


def test_a_matrix_that_is_paired_with_itself_has_both_roles():
    check_contract(balance([("w", "w")]), random_params({"w": torch.zeros(4, 4)}))


@pytest.mark.parametrize("seed", range(3))
def test_gradient_flow_of_homogeneous_units_conserves_the_balance(seed):
    """⟨∇L, ∇d_j⟩ = 0 with biases; without them, or for tanh, it is not."""
    data = random_data(seed)
    model = relu_network(seed)
    gradient = reference.flat(tacit.Objective(model, F.mse_loss, data).gradient())

    def cosine(family):
        column = dense_columns(family, params_of(model))[:, 0]
        return abs(float(column @ gradient) / float(column.norm() * gradient.norm()))

    assert cosine(balance(biases=True)) < 1e-14
    assert cosine(balance()) > 1e-4


def test_units_that_weight_decay_balanced_have_no_column():
    params = random_params(PARAMS)
    norms = params["0.weight"].norm(dim=1)
    params["2.weight"] *= norms / params["2.weight"].norm(dim=0)
    assert not dense_columns(balance(), params).any()
    single = {n: p.float() for n, p in params.items()}
    assert not dense_columns(balance(), single).any()


WRONG = {
    "a pair that does not fit": (balance([("0.weight", "0.weight")]), "(4, 3)"),
    "an unknown name": (balance([("0.weight", "3.weight")]), "no parameter '3.weight'"),
    "a vector": (balance([("0.bias", "2.weight")]), "'0.bias' is a tensor of shape (4,)"),
    "a scope without pairs": (balance(scope="*.bias"), "none of its matrices"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pairs_are_refused_where_they_are_used(name):
    family, words = WRONG[name]
    for call in (family.bind, family.value):
        with pytest.raises(tacit.InputError) as error:
            call(PARAMS)
        assert words in str(error.value)


@pytest.mark.parametrize(
    "pairs", ["ab", [], [("a",)], ["ab"], [("a", 1)], 3, [("a", "b"), ("a", "b")]], ids=str
)
def test_wrong_pairs_are_refused_at_once(pairs):
    with pytest.raises(tacit.InputError, match="pairs"):
        balance(pairs)


def test_one_matrix_has_no_pair():
    with pytest.raises(tacit.InputError, match="no two successive matrices fit"):
        balance().bind({"weight": torch.ones(3, 2), "bias": torch.ones(3)})


def test_balance_is_not_split_by_layer_and_other_pairs_are_not_stacked():
    with pytest.raises(tacit.InputError, match="not a sum"):
        tacit.layerwise(balance())
    assert (
        balance().definition != balance(biases=True).definition != balance([("a", "b")]).definition
    )
