"""One contract for every regularizer, and pins of the conventions that strengths rest on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.problems import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.objective.params import select
from tacit.regularizers.quadratic import quadratic_matrix

MODEL = tanh_mlp(0, sizes=(3, 4, 2))
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, random_data(1, count=9, inputs=3, outputs=2))
START = params_of(MODEL)
DROPPING = nn.Sequential(MODEL[0], nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), MODEL[2])
LABELLED = random_data(1, count=9, inputs=3)[0], torch.arange(9) % 2
CLASSES = tacit.Objective(DROPPING, F.cross_entropy, LABELLED)
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def weights(seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for n, p in START.items()
    }


def coupled(params):
    """A penalty that is no sum over tensors."""
    spread = sum(p.sin().sum() for p in params.values())
    return spread.exp() + params["0.weight"].sum() * params["2.weight"].square().sum()


SEPARABLE = {
    "l2": tacit.l2,
    "l1": tacit.l1,
    "smooth_l1": lambda **options: tacit.smooth_l1(0.7, **options),
    "distance_to": lambda **options: tacit.regularizers.distance_to(START, **options),
    "group_l2": tacit.regularizers.group_l2,
    "nuclear_norm": tacit.regularizers.nuclear_norm,
}
COUPLED = {
    "diagonal": tacit.regularizers.diagonal,
    "symmetric": tacit.regularizers.symmetric,
    "gradient_norm": lambda **options: tacit.regularizers.gradient_norm(OBJECTIVE, **options),
    "explicit_dropout": lambda **options: tacit.regularizers.explicit_dropout(CLASSES, **options),
    "custom": lambda **options: tacit.regularizer("custom", coupled, **options),
}
SCOPES = {"": None, " of weights": "*.weight", " of a layer": "2", " chosen": lambda n: "2.w" in n}


@dataclass(frozen=True)
class Case:
    make: Callable[..., tacit.Regularizer]
    scope: str | Callable[[str], bool] | None
    layerwise: bool = False

    def __call__(self):
        family = self.make(scope=self.scope)
        return tacit.layerwise(family) if self.layerwise else family

    @property
    def covered(self):
        return select(NAMES, self.scope, what="scope")


def table(families, *, layerwise=False):
    prefix = "layerwise " if layerwise else ""
    return {
        f"{prefix}{name}{words}": Case(make, scope, layerwise)
        for name, make in families.items()
        for words, scope in SCOPES.items()
    }


CASES = table(SEPARABLE) | table(COUPLED) | table(SEPARABLE, layerwise=True)
SCOPED = {name: case for name, case in CASES.items() if case.scope is not None}

every_regularizer = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def dense(regularizer, params):
    """gradient() as one matrix, a column for every strength."""
    return torch.stack([reference.flat(c) for c in regularizer.gradient(params).values()], dim=1)


def inside(case):
    """Which coordinates the scope covers."""
    return torch.cat([torch.full((START[n].numel(),), n in case.covered) for n in NAMES])


def moved(params, index, step):
    vector = reference.flat(params)
    vector[index] += step
    parts = vector.split([p.numel() for p in params.values()])
    return {n: part.view(p.shape) for (n, p), part in zip(params.items(), parts, strict=True)}


@every_regularizer
def test_gradient_is_the_derivative_of_the_value_by_autograd(case):
    regularizer, params = case(), weights()
    oracle = reference.design([regularizer], params)
    torch.testing.assert_close(dense(regularizer, params), oracle, rtol=1e-10, atol=1e-12)


@every_regularizer
def test_gradient_is_the_derivative_of_the_value_by_finite_differences(case):
    regularizer, params, step = case(), weights(), 1e-5
    found = dense(regularizer, params)
    for i in torch.nonzero(inside(case))[:, 0].tolist():
        ahead, behind = (regularizer.value(moved(params, i, h)) for h in (step, -step))
        slope = (ahead - behind) / (2 * step)
        torch.testing.assert_close(found[i], slope, rtol=1e-6, atol=1e-6)


@every_regularizer
def test_gradient_and_value_are_finite_at_zero_weights(case):
    regularizer, zero = case(), weights(scale=0.0)
    assert dense(regularizer, zero).isfinite().all()
    assert regularizer.value(zero).isfinite().all()


@every_regularizer
def test_names_are_unique_and_values_one_for_each(case):
    regularizer, params = case(), weights()
    names, value = regularizer.bind(params).names, regularizer.value(params)
    assert len(set(names)) == len(names)
    assert all(name.startswith(regularizer.name) for name in names)
    assert tuple(regularizer.gradient(params)) == names
    assert value.shape == (len(names),)
    assert value.dtype == torch.float64


@every_regularizer
def test_outside_its_scope_the_gradient_is_zero_and_inside_it_is_not(case):
    found = dense(case(), weights())
    assert not found[~inside(case)].any()
    matrices = "nuclear_norm" in case().name
    for name in case.covered:
        slopes = case().gradient(weights(), [name])
        assert all(list(column) == [name] for column in slopes.values())
        covered = not matrices or name.endswith("weight")
        assert any(bool(column[name].any()) for column in slopes.values()) == covered


@pytest.mark.parametrize("case", SCOPED.values(), ids=SCOPED)
def test_a_scope_changes_nothing_inside_it(case):
    whole, part = Case(case.make, None, case.layerwise)(), case()
    whole, part = whole.gradient(weights(), case.covered), part.gradient(weights(), case.covered)
    for name, column in part.items():
        torch.testing.assert_close(reference.flat(column), reference.flat(whole[name]))


@every_regularizer
def test_slices_put_together_are_the_whole(case):
    params = weights()
    params["0.weight"][1] = 0  # a kink where there are any
    columns = case().bind(params)
    for name in columns.active:
        size = params[name].numel()
        parts = [slice(a, min(a + 5, size)) for a in range(0, size, 5)]
        rows = torch.cat([columns.rows(name, part) for part in parts])
        assert rows.shape == (size, len(columns.active[name]))
        assert torch.equal(rows, columns.rows(name, slice(0, size)))
        whole = columns.kinks(name, slice(0, size))
        if whole is not None:
            assert torch.equal(torch.cat([columns.kinks(name, part) for part in parts]), whole)


@pytest.mark.parametrize("name", [*SEPARABLE, "diagonal", "symmetric", "custom"])
def test_columns_are_float64_whatever_the_weights_dtype(name):
    regularizer = (SEPARABLE | COUPLED)[name]()
    found = dense(regularizer, {n: p.float() for n, p in weights().items()})
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, dense(regularizer, weights()), rtol=1e-5, atol=1e-5)


def kinks(regularizer, params):
    columns = regularizer.bind(params)
    found = {n: columns.kinks(n, slice(0, params[n].numel())) for n in columns.active}
    return {n: mask.view(params[n].shape) for n, mask in found.items() if mask is not None}


def test_l1_has_kinks_at_exact_zeros_alone():
    params = weights()
    params["0.weight"][1, 2] = 0
    params["2.bias"][0] = -0.0
    params["0.bias"][0] = 1e-300
    found = kinks(tacit.l1(), params)
    assert {n: m.nonzero().tolist() for n, m in found.items() if m.any()} == {
        "0.weight": [[1, 2]],
        "2.bias": [[0]],
    }


def test_group_l2_has_kinks_at_zero_rows_alone():
    params = weights()
    params["0.weight"][1] = 0
    params["2.weight"][0, 1:] = 0
    params["2.bias"][1] = 0
    found = kinks(tacit.regularizers.group_l2(), params)
    assert {n: m.nonzero().tolist() for n, m in found.items() if m.any()} == {
        "0.weight": [[1, 0], [1, 1], [1, 2]],
        "2.bias": [[1]],
    }


def test_nuclear_norm_has_kinks_at_matrices_of_deficient_rank():
    params = weights()
    params["0.weight"][:, 2] = params["0.weight"][:, 0] - 2 * params["0.weight"][:, 1]
    found = kinks(tacit.regularizers.nuclear_norm(), params)
    assert found["0.weight"].all()
    assert not found["2.weight"].any()


def test_smooth_families_have_no_kinks_even_at_zero():
    for make in (
        tacit.l2,
        SEPARABLE["smooth_l1"],
        tacit.regularizers.diagonal,
        COUPLED["gradient_norm"],
    ):
        assert kinks(make(), weights(scale=0.0)) == {}


def test_layerwise_names_the_owning_modules_and_sums_to_the_whole():
    for make in SEPARABLE.values():
        whole, split = make(), tacit.layerwise(make())
        assert split.bind(weights()).names == (f"{whole.name}[0]", f"{whole.name}[2]")
        total, parts = dense(whole, weights())[:, 0], dense(split, weights())
        torch.testing.assert_close(parts.sum(1), total, rtol=1e-15, atol=0)
        assert not (parts[:, 0] * parts[:, 1]).any()
        torch.testing.assert_close(split.value(weights()).sum(), whole.value(weights())[0])
    owned = {"weight": torch.ones(2)}
    assert tacit.layerwise(tacit.l2).bind(owned).names == ("l2[(model)]",)


def closed_forms(params):
    """Every value once more, written out over single entries."""
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
        "nuclear_norm": [sum(float(eigenvalue_roots(gram)) for gram in grams)],
        "diagonal": [t * t for t in flat],
        "symmetric": [flat[i] * flat[j] * (1 if i == j else math.sqrt(2)) for i, j in pairs],
        "gradient_norm": [float(gradient @ gradient)],
        "explicit_dropout": [two_classes(params)],
    }


def two_classes(params):
    """½ mean_i p_i (1 − p_i) Σ_j h_ij² (w_0j − w_1j)²: dropout of h before two logits."""
    (X, _), (W, b, V, c) = LABELLED, params.values()
    h = torch.tanh(X @ W.T + b)
    p = torch.sigmoid((h @ V.T + c) @ torch.tensor([1.0, -1.0]).double())
    return float((p * (1 - p) * (h**2 @ (V[0] - V[1]) ** 2)).mean() / 2)


def eigenvalue_roots(gram):
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().sum()


@pytest.mark.parametrize("name", closed_forms(START))
def test_values_are_what_their_formulas_say(name):
    value = (SEPARABLE | COUPLED)[name]().value(weights())
    expected = torch.tensor(closed_forms(weights())[name], dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)


def test_torch_weight_decay_is_twice_the_strength_of_l2():
    strength, rate = 0.03, 0.1
    model, (X, y) = tanh_mlp(2), random_data(1)
    start = params_of(model)
    slope = tacit.Objective(model, F.mse_loss, (X, y)).gradient()
    penalty = tacit.l2().gradient(start)["l2"]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=2 * strength)
    F.mse_loss(model(X), y).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = start[name] - rate * (slope[name] + strength * penalty[name])
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-15)


def test_coefficients_of_symmetric_have_the_norm_of_their_matrix():
    theta = torch.tensor([0.3, -2.0, 1.1], dtype=torch.float64)
    coefficients = torch.tensor([1.0, 2, -3, 4, 0.5, -6], dtype=torch.float64)
    matrix = quadratic_matrix(coefficients, "symmetric")
    assert torch.equal(matrix, matrix.T)
    assert float(matrix.norm()) == pytest.approx(float(coefficients.norm()), rel=1e-14)
    form = tacit.regularizers.symmetric().value({"w": theta}) @ coefficients
    assert float(form) == pytest.approx(float(theta @ matrix @ theta), rel=1e-14)


def test_one_endpoint_gives_the_symmetric_matrix_of_least_frobenius_norm():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, random_data(1, inputs=4))
    found = tacit.fit(tacit.endpoint_equations(objective, tacit.regularizers.symmetric())).matrix()
    theta, b = model.weight.detach()[0], -objective.gradient()["weight"][0] / 2
    # The least symmetric Λ with Λθ = b, in closed form.
    size = theta @ theta
    least = (b.outer(theta) + theta.outer(b)) / size - (theta @ b) * theta.outer(theta) / size**2
    torch.testing.assert_close(found, least, rtol=1e-10, atol=1e-12)


def test_a_reference_point_is_kept_as_it_was():
    model = tanh_mlp(0)
    distance = tacit.regularizers.distance_to(dict(model.named_parameters()))
    with torch.no_grad():
        model[0].weight += 1
    assert float(distance.value(params_of(model))) == pytest.approx(40, rel=1e-12)


def test_tensors_of_more_dimensions_are_rows_by_their_first():
    torch.manual_seed(0)
    kernel = {"w": torch.randn(3, 2, 2, 2, dtype=torch.float64)}
    matrix = {"w": kernel["w"].reshape(3, 8)}
    for make in (tacit.regularizers.group_l2, tacit.regularizers.nuclear_norm):
        torch.testing.assert_close(dense(make(), kernel), dense(make(), matrix), rtol=0, atol=0)
        torch.testing.assert_close(make().value(kernel), make().value(matrix), rtol=1e-14, atol=0)
