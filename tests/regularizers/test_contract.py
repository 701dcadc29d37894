"""One contract that every regularizer satisfies, with and without a scope, and layer by layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from support.columns import dense_columns, kinks_of, random_params
from support.families import (
    CLASS_DATA,
    FAMILIES,
    FROM_DATA,
    FROZEN_HEAD,
    MODEL,
    NOT_SEPARABLE,
    OBJECTIVE,
    ONLY_MATRICES,
    SEPARABLE,
    START,
)
from torch import nn
from torch.func import jacrev
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.objective.params import select
from tacit.regularizers import check_contract


def weights(**options):
    return random_params(START, **options)


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
    prefix, scopes = ("layerwise ", ("", " of weights")) if layerwise else ("", SCOPES)
    return {
        f"{prefix}{family}{suffix}": Case(make, SCOPES[suffix], layerwise)
        for family, make in families.items()
        for suffix in scopes
    }


CASES = cases(SEPARABLE) | cases(NOT_SEPARABLE) | cases(SEPARABLE, layerwise=True)
SCOPED_CASES = {name: case for name, case in CASES.items() if case.scope is not None}

every_regularizer = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_regularizer
def test_every_family_keeps_the_contract(case):
    check_contract(case(), weights(), scope=case.scope)


@pytest.mark.parametrize("name", FROM_DATA)
@pytest.mark.parametrize("scope", [None, "2", "*.weight"], ids=str)
def test_every_family_of_data_keeps_the_contract(name, scope):
    check_contract(FROM_DATA[name](scope=scope), weights(), scope=scope)


@every_regularizer
def test_gradient_is_nonzero_on_every_tensor_in_scope_that_the_family_covers(case):
    only_matrices = any(words in case().name for words in ONLY_MATRICES)
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


@pytest.mark.parametrize(
    "name",
    ["l2", "smooth_l1", "power of 1.5", "hypentropy", "diagonal", "balance", "gradient_norm"],
)
def test_smooth_families_have_no_kinks_even_at_zero(name):
    assert kinks_of(FAMILIES[name](), weights(scale=0.0)) == {}


def closed_forms(params):
    """The value of every family, written out over single entries."""
    flat, start = reference.flat(params).tolist(), reference.flat(START).tolist()
    rows = [row for p in params.values() for row in p.reshape(len(p), -1).tolist()]
    W, V = params["0.weight"], params["2.weight"]
    grams = [W.T @ W, V @ V.T]
    spectra = [torch.linalg.eigvalsh(gram) for gram in grams]
    pairs = [(i, j) for i in range(len(flat)) for j in range(i, len(flat))]
    gradient = reference.flat(OBJECTIVE.gradient(params))
    return {
        "l2": [sum(t * t for t in flat)],
        "l1": [sum(abs(t) for t in flat)],
        "smooth_l1": [sum(abs(t) - 0.35 if abs(t) > 0.7 else t * t / 1.4 for t in flat)],
        "distance_to": [sum((t - s) ** 2 for t, s in zip(flat, start, strict=True))],
        "group_l2": [sum(math.hypot(*row) for row in rows)],
        "nuclear_norm": [sum(power_of_singular_values(gram, 1) for gram in grams)],
        "power": [sum(abs(t) ** 0.5 for t in flat)],
        "power of 1.5": [sum(abs(t) ** 1.5 for t in flat)],
        "hypentropy": [sum(0.3 * hyperbolic_entropy(t / 0.3) for t in flat)],
        "schatten": [sum(power_of_singular_values(gram, 0.5) for gram in grams)],
        "schatten of 3": [sum(power_of_singular_values(gram, 3) for gram in grams)],
        "spectral_norm": [sum(float(squares.max()) ** 0.5 for squares in spectra)],
        "stable_rank": [sum(float(squares.sum() / squares.max()) for squares in spectra)],
        "orthogonality": [
            sum(float((M.T @ M - torch.eye(M.shape[1])).square().sum()) for M in (W, V))
        ],
        "balance": [sum((float(W[j] @ W[j]) - float(V[:, j] @ V[:, j])) ** 2 for j in range(4))],
        "diagonal": [t * t for t in flat],
        "symmetric": [flat[i] * flat[j] * (1 if i == j else math.sqrt(2)) for i, j in pairs],
        "gradient_norm": [float(gradient @ gradient)],
        "explicit_dropout": [dropout_penalty_of_two_classes(params)],
        "gradient_norm of power 1": [float(gradient.norm())],
        "gradient_norm of a layer": [float(gradient[-10:] @ gradient[-10:])],
        "gradient_l1": [sum(math.sqrt(g * g + 0.1) for g in gradient.tolist())],
        **closed_forms_over_data(params),
    }


def power_of_singular_values(gram, p):
    """Σ σ_k^p of a matrix W from the smaller of WWᵀ and WᵀW."""
    return float((torch.linalg.eigvalsh(gram) ** (p / 2)).sum())


def hyperbolic_entropy(z):
    return 2 - math.sqrt(4 + z * z) + z * math.asinh(z / 2)


def closed_forms_over_data(params):
    """The values of penalties that are means over examples or batches, by loops over them."""
    X, y = OBJECTIVE.data
    W, b, V, c = params.values()
    parts = [
        tacit.Objective(MODEL, F.mse_loss, (X[i : i + 4], y[i : i + 4])).gradient(params)
        for i in (0, 4, 8)
    ]
    rows = torch.stack(list(map(reference.flat, parts)))
    sizes = torch.tensor([4.0, 4.0, 1.0]).double() / 9
    h = torch.tanh(X @ W.T + b)
    z = h @ V.T + c
    weighted = (X.square() @ W.square().T).sum() + (h.square() @ V.square().T).sum()
    weighted = weighted + (z.tanh().square() @ FROZEN_HEAD.weight.square().T).sum()
    outputs = torch.tanh(torch.tanh(CLASS_DATA[0] @ W.T + b) @ V.T + c)
    p = outputs.softmax(1)
    first, second = zip(*map(input_derivatives(params), CLASS_DATA[0]), strict=True)
    jacobians, laplacians = torch.stack(first), torch.stack(second)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    errors = p - F.one_hot(CLASS_DATA[1], 2)
    logits = torch.tanh(CLASS_DATA[0] @ W.T + b) @ V.T + c
    return {
        "gradient_variance": [float(sizes @ (rows - sizes @ rows).square().sum(1))],
        "mean_of": [float(torch.logsumexp(logits, 1).square().mean())],
        "dropout_moments": [float((h.square() @ V.square().T).mean()) * 0.2 / 0.8],
        "activation_norm": [float((h.square().sum() + z.square().sum()) / 9)],
        "activation_norm of weights": [float(weighted.detach() / 9)],
        "input_jacobian of outputs": [float(jacobians.square().sum() / 9)],
        "input_jacobian": [
            float(torch.einsum("nkd,nkl,nld->", jacobians, curvature, jacobians) / 9)
        ],
        "input_laplacian": [float((errors * laplacians).sum() / 9)],
    }


def input_derivatives(params):
    """∂f/∂x and Δ_x f of one example, by torch.func."""
    W, b, V, c = params.values()

    def outputs(x):
        return torch.tanh(V @ torch.tanh(W @ x + b) + c)

    def both(x):
        hessians = jacrev(jacrev(outputs))(x)
        return jacrev(outputs)(x), hessians.diagonal(dim1=1, dim2=2).sum(1)

    return both


def dropout_penalty_of_two_classes(params):
    """½ mean_i p_i (1 − p_i) Σ_j h_ij² (w_0j − w_1j)²: dropout of h before two logits."""
    (X, _), (W, b, V, c) = CLASS_DATA, params.values()
    h = torch.tanh(X @ W.T + b)
    p = torch.sigmoid((h @ V.T + c) @ torch.tensor([1.0, -1.0]).double())
    return float((p * (1 - p) * (h**2 @ (V[0] - V[1]) ** 2)).mean() / 2)


@pytest.mark.parametrize("name", closed_forms(START))
def test_values_equal_their_closed_forms(name):
    value = (FAMILIES | FROM_DATA)[name]().value(weights())
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


@pytest.mark.parametrize("make", FROM_DATA.values(), ids=FROM_DATA)
def test_penalties_from_data_cannot_be_split_by_layer(make):
    with pytest.raises(tacit.InputError, match="not a sum over tensors"):
        tacit.layerwise(make())


def broken(**changes):
    """l2 with something wrong: a function of the columns, or other fields."""
    change_columns = changes.pop("columns", lambda columns: columns)
    right = tacit.l2(scope=changes.pop("scope", None))
    wrong = replace(right, bind=lambda params: change_columns(right.bind(params)))
    return replace(wrong, **changes)


def with_rows(rows):
    """Change the rows of all tensors: rows(rows_of_l2, part)."""
    return lambda columns: replace(
        columns, rows=lambda name, part: rows(columns.rows(name, part), part)
    )


def without_the_fourth(rows, part):
    return rows * (torch.arange(part.start, part.stop) != 3)[:, None]


def half_a_mask(columns):
    """Kinks that are told only for slices that start at 0."""

    def kinks(name, part):
        return torch.full((part.stop - part.start,), part.start == 0)

    return replace(columns, kinks=kinks)


def in_order_of_memory(params):
    """The columns of l2 with the entries as they lie in memory."""
    storages = {n: p.as_strided((p.numel(),), (1,)).view(p.shape) for n, p in params.items()}
    return tacit.l2().bind(storages)


def drawn_anew(params):
    return params["0.weight"].sum()[None] * torch.randn(())


def squares(params):
    return sum(p.square().sum() for p in params.values())[None]


def damage(params):
    for p in params.values():
        p.data.mul_(2)
    return tacit.l2().bind(params)


def missing(params):
    raise NotImplementedError("no value")


BROKEN = {
    "wrong sign": (
        broken(columns=with_rows(lambda rows, _: -rows)), "finite differences", "autograd",
    ),
    "wrong factor": (broken(columns=with_rows(lambda rows, _: 1.001 * rows)), "not the finite"),
    "one wrong entry": (
        broken(columns=with_rows(without_the_fourth)),
        "on '0.weight' the gradient of l2 is not",
    ),
    "columns outside of the scope": (broken(scope=None), "outside of the scope", "2.bias"),
    "float32 columns": (
        broken(columns=with_rows(lambda rows, _: rows.float())), "float64 is needed",
    ),
    "slices that disagree": (
        broken(columns=with_rows(lambda rows, part: rows * (1 + part.start))), "rows of slices",
    ),
    "kinks that disagree": (broken(columns=half_a_mask), "kinks of slices"),
    "kinks that are no mask": (
        broken(columns=lambda c: replace(c, kinks=lambda name, part: torch.zeros(2))),
        "one bool per row",
    ),
    "value missing": (broken(value=missing), "raised NotImplementedError: no value"),
    "value without a graph": (
        broken(value=lambda params: squares(params).detach()), "cannot be differentiated",
    ),
    "value a scalar": (broken(value=lambda params: squares(params)[0]), "one per name"),
    "value in float32": (broken(value=lambda params: squares(params).float()), "torch.float32 for"),
    "value of other weights": (
        broken(value=lambda params: params["0.weight"].square().sum()[None]), "on '2.weight' the",
    ),
    "random value": (broken(value=drawn_anew), "second value(params) gives another"),
    "random columns": (
        broken(columns=with_rows(lambda rows, _: rows + torch.randn(()))), "second bind(params)",
    ),
    "order of memory": (broken(bind=in_order_of_memory), "rows of '0.weight' are others where"),
    "changed parameters": (broken(bind=damage), "changes the parameters"),
    "names twice": (
        broken(columns=lambda c: replace(c, names=("l2", "l2"))), "the names l2, l2 are not unique",
    ),
    "another name": (broken(columns=lambda c: replace(c, names=("ridge",))), "do not start with"),
    "unknown tensor": (
        broken(columns=lambda c: replace(c, active=c.active | {"x": (0,)})), "x, which is no",
    ),
    "infinite at zero": (
        tacit.regularizer("log", lambda params: params["0.weight"].square().log().sum()),
        "zero weights",
    ),
    "not a sum over tensors": (
        replace(tacit.regularizers.balance(), separable=True), "separable: raised",
    ),
    "another function of entries": (
        broken(entrywise=tacit.l1().entrywise), "entrywise is not the column", "do not sum",
    ),
    "cost": (broken(cost="cheap"), "cost is 'cheap'"),
    "cost of data": (broken(objective=OBJECTIVE), "not 'weights'"),
    "definition of a moment": (broken(definition=str(object())), "the same in every process"),
    "influence of nothing": (broken(influence=lambda *_: torch.ones(1)), "influence needs obj"),
    "influence of another shape": (
        replace(FAMILIES["gradient_norm"](), influence=lambda *_: torch.ones(3)), "(9, 2, 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_family_is_told_what_it_violates(name):
    regularizer, *words = BROKEN[name]
    scope = "*.weight" if "scope" in name else None
    with pytest.raises(tacit.InputError, match="does not keep the contract") as error:
        check_contract(regularizer, weights(), scope=scope)
    for part in words:
        assert part in str(error.value)


def test_all_violations_are_listed_at_once():
    wrong = broken(
        columns=with_rows(lambda rows, part: -rows.float() * (1 + part.start)), cost="no"
    )
    with pytest.raises(tacit.InputError) as error:
        check_contract(wrong, weights())
    clauses = [line.partition(":")[0] for line in str(error.value).splitlines()[1:]]
    assert set(clauses) == {
        "- gradient against finite differences", "- gradient against autograd", "- slices",
        "- precision", "- statements", "- entrywise",
    }  # fmt: skip


def test_an_objective_below_float64_is_refused():
    objective = tacit.Objective(nn.Linear(3, 2), F.mse_loss, (torch.ones(4, 3), torch.ones(4, 2)))
    with pytest.raises(tacit.InputError, match="double precision"):
        check_contract(tacit.regularizers.gradient_norm(objective), objective.params)


def test_the_contract_holds_at_low_rank_at_equal_singular_values_and_at_zeros():
    params = weights()
    u, _, vh = torch.linalg.svd(params["0.weight"], full_matrices=False)
    params["0.weight"] = u @ torch.diag(torch.tensor([1.7, 1.7, 0.6]).double()) @ vh
    params["2.weight"][1] = params["2.weight"][0]
    params["0.bias"][1] = 0
    for make in (*SEPARABLE.values(), tacit.regularizers.balance):
        check_contract(make(), params)
