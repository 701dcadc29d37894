"""One contract that every regularizer satisfies, with and without a scope, and layer by layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.columns import dense_columns, kinks_of, random_params
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.objective.params import select

MODEL = tanh_mlp(0, sizes=(3, 4, 2))
START = params_of(MODEL)
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, random_data(1, count=9, inputs=3, outputs=2))

DROPOUT_MODEL = nn.Sequential(MODEL[0], nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), MODEL[2])
CLASS_DATA = random_data(1, count=9, inputs=3)[0], torch.arange(9) % 2
DROPOUT_OBJECTIVE = tacit.Objective(DROPOUT_MODEL, F.cross_entropy, CLASS_DATA)

ADAMW = torch.optim.AdamW(MODEL.parameters())
for parameter in MODEL.parameters():  # as after three steps
    squares = torch.full_like(parameter, 0.1) + parameter.detach().square()
    ADAMW.state[parameter] = {"step": torch.tensor(3.0), "exp_avg_sq": squares}


def weights(**options):
    return random_params(START, **options)


def coupled(params):
    """A penalty that is not a sum over tensors."""
    spread = sum(p.sin().sum() for p in params.values())
    return spread.exp() + params["0.weight"].sum() * params["2.weight"].square().sum()


SEPARABLE = {
    "l2": tacit.l2,
    "l1": tacit.l1,
    "smooth_l1": lambda **options: tacit.smooth_l1(0.7, **options),
    "distance_to": lambda **options: tacit.regularizers.distance_to(START, **options),
    "group_l2": tacit.regularizers.group_l2,
    "nuclear_norm": tacit.regularizers.nuclear_norm,
    "metric_ridge": lambda **options: tacit.regularizers.metric_ridge(ADAMW, MODEL, **options),
}
NOT_SEPARABLE = {
    "diagonal": tacit.regularizers.diagonal,
    "symmetric": tacit.regularizers.symmetric,
    "gradient_norm": lambda **options: tacit.regularizers.gradient_norm(OBJECTIVE, **options),
    "hessian_trace": lambda **options: tacit.regularizers.hessian_trace(OBJECTIVE, **options),
    "explicit_dropout": lambda **options: tacit.regularizers.explicit_dropout(
        DROPOUT_OBJECTIVE, **options
    ),
    "custom": lambda **options: tacit.regularizer("custom", coupled, **options),
}
FAMILIES = SEPARABLE | NOT_SEPARABLE
SCOPES = {
    "": None,
    " of weights": "*.weight",
    " of one layer": "2",
    " by predicate": lambda name: "2.w" in name,
    " of a list": ["0.weight", "2"],
    " of matrices": tacit.matrices,
}


@dataclass(frozen=True)
class Case:
    make: Callable[..., tacit.Regularizer]
    scope: tacit.objective.Scope
    layerwise: bool = False

    def __call__(self):
        family = self.make(scope=self.scope)
        return tacit.layerwise(family) if self.layerwise else family

    @property
    def in_scope(self):
        return select(START, self.scope, what="scope")


def cases(families, *, layerwise=False):
    prefix = "layerwise " if layerwise else ""
    return {
        f"{prefix}{family}{suffix}": Case(make, scope, layerwise)
        for family, make in families.items()
        for suffix, scope in SCOPES.items()
    }


CASES = cases(SEPARABLE) | cases(NOT_SEPARABLE) | cases(SEPARABLE, layerwise=True)
SCOPED_CASES = {name: case for name, case in CASES.items() if case.scope is not None}

every_regularizer = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def in_scope_mask(case):
    """Which coordinates of the flat parameter vector the scope covers."""
    return torch.cat([torch.full((START[n].numel(),), n in case.in_scope) for n in NAMES])


def shift(params, index, step):
    """The parameters with one coordinate of the flat vector increased by a step."""
    vector = reference.flat(params)
    vector[index] += step
    return reference.unflatten(vector, params)


@every_regularizer
def test_gradient_is_the_derivative_of_the_value_by_autograd(case):
    regularizer, params = case(), weights()
    expected = reference.design([regularizer], params)
    torch.testing.assert_close(dense_columns(regularizer, params), expected, rtol=1e-10, atol=1e-12)


@every_regularizer
def test_gradient_is_the_derivative_of_the_value_by_finite_differences(case):
    regularizer, params, step = case(), weights(), 1e-5
    columns = dense_columns(regularizer, params)
    for i in torch.nonzero(in_scope_mask(case))[:, 0].tolist():
        ahead, behind = (regularizer.value(shift(params, i, h)) for h in (step, -step))
        quotient = (ahead - behind) / (2 * step)
        torch.testing.assert_close(columns[i], quotient, rtol=1e-6, atol=1e-6)


@every_regularizer
def test_gradient_and_value_are_finite_at_zero_weights(case):
    regularizer, zero = case(), weights(scale=0.0)
    assert dense_columns(regularizer, zero).isfinite().all()
    assert regularizer.value(zero).isfinite().all()


@every_regularizer
def test_names_are_unique_and_there_is_one_value_per_name(case):
    regularizer, params = case(), weights()
    names, value = regularizer.bind(params).names, regularizer.value(params)
    assert len(set(names)) == len(names)
    assert all(name.startswith(regularizer.name) for name in names)
    assert tuple(regularizer.gradient(params)) == names
    assert value.shape == (len(names),)
    assert value.dtype == torch.float64


@every_regularizer
def test_gradient_is_zero_outside_the_scope_and_nonzero_inside(case):
    columns = dense_columns(case(), weights())
    assert not columns[~in_scope_mask(case)].any()
    only_matrices = "nuclear_norm" in case().name
    for name in case.in_scope:
        gradients = case().gradient(weights(), [name])
        assert all(list(gradient) == [name] for gradient in gradients.values())
        covered = not only_matrices or name.endswith("weight")
        assert any(bool(gradient[name].any()) for gradient in gradients.values()) == covered


@pytest.mark.parametrize("case", SCOPED_CASES.values(), ids=SCOPED_CASES)
def test_a_scope_changes_nothing_inside_it(case):
    unscoped, scoped = Case(case.make, None, case.layerwise)(), case()
    expected = unscoped.gradient(weights(), case.in_scope)
    for name, gradient in scoped.gradient(weights(), case.in_scope).items():
        torch.testing.assert_close(reference.flat(gradient), reference.flat(expected[name]))


@every_regularizer
def test_slices_concatenated_equal_the_whole_tensor(case):
    params = weights()
    params["0.weight"][1] = 0  # a kink of the families that have kinks
    columns = case().bind(params)
    for name in columns.active:
        size = params[name].numel()
        parts = [slice(start, min(start + 5, size)) for start in range(0, size, 5)]
        rows = torch.cat([columns.rows(name, part) for part in parts])
        assert rows.shape == (size, len(columns.active[name]))
        assert torch.equal(rows, columns.rows(name, slice(0, size)))
        whole_mask = columns.kinks(name, slice(0, size))
        if whole_mask is not None:
            mask = torch.cat([columns.kinks(name, part) for part in parts])
            assert torch.equal(mask, whole_mask)


@pytest.mark.parametrize("name", [*SEPARABLE, "diagonal", "symmetric", "custom"])
def test_columns_are_float64_for_weights_of_any_dtype(name):
    regularizer = FAMILIES[name]()
    columns = dense_columns(regularizer, {n: p.float() for n, p in weights().items()})
    assert columns.dtype == torch.float64
    expected = dense_columns(regularizer, weights())
    torch.testing.assert_close(columns, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["l2", "smooth_l1", "diagonal", "gradient_norm"])
def test_smooth_families_have_no_kinks_even_at_zero(name):
    assert kinks_of(FAMILIES[name](), weights(scale=0.0)) == {}


def closed_forms(params):
    """The value of every family, written out over single entries."""
    flat, start = reference.flat(params).tolist(), reference.flat(START).tolist()
    rows = [row for p in params.values() for row in p.reshape(len(p), -1).tolist()]
    grams = [params[n] @ params[n].T for n in ("0.weight", "2.weight")]
    pairs = [(i, j) for i in range(len(flat)) for j in range(i, len(flat))]
    gradient = reference.flat(OBJECTIVE.gradient(params))
    return {
        "l2": [sum(t * t for t in flat)],
        "l1": [sum(abs(t) for t in flat)],
        "smooth_l1": [sum(abs(t) - 0.35 if abs(t) > 0.7 else t * t / 1.4 for t in flat)],
        "distance_to": [sum((t - s) ** 2 for t, s in zip(flat, start, strict=True))],
        "group_l2": [sum(math.hypot(*row) for row in rows)],
        "nuclear_norm": [sum(float(sum_of_singular_values(gram)) for gram in grams)],
        "diagonal": [t * t for t in flat],
        "symmetric": [flat[i] * flat[j] * (1 if i == j else math.sqrt(2)) for i, j in pairs],
        "gradient_norm": [float(gradient @ gradient)],
        "explicit_dropout": [dropout_penalty_of_two_classes(params)],
    }


def sum_of_singular_values(gram):
    """Σ σ_k of a matrix W from WWᵀ."""
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().sum()


def dropout_penalty_of_two_classes(params):
    """½ mean_i p_i (1 − p_i) Σ_j h_ij² (w_0j − w_1j)²: dropout of h before two logits."""
    (X, _), (W, b, V, c) = CLASS_DATA, params.values()
    h = torch.tanh(X @ W.T + b)
    p = torch.sigmoid((h @ V.T + c) @ torch.tensor([1.0, -1.0]).double())
    return float((p * (1 - p) * (h**2 @ (V[0] - V[1]) ** 2)).mean() / 2)


@pytest.mark.parametrize("name", closed_forms(START))
def test_values_equal_their_closed_forms(name):
    value = FAMILIES[name]().value(weights())
    expected = torch.tensor(closed_forms(weights())[name], dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("make", SEPARABLE.values(), ids=SEPARABLE)
def test_layerwise_has_one_column_per_layer_and_the_columns_sum_to_the_family(make):
    whole, split = make(), tacit.layerwise(make())
    assert split.bind(weights()).names == (f"{whole.name}[0]", f"{whole.name}[2]")
    total, columns = dense_columns(whole, weights())[:, 0], dense_columns(split, weights())
    torch.testing.assert_close(columns.sum(1), total, rtol=1e-15, atol=0)
    assert not (columns[:, 0] * columns[:, 1]).any()
    torch.testing.assert_close(split.value(weights()).sum(), whole.value(weights())[0])
