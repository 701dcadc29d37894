"""Noise of columns from probes: in factors, selections, stacks and files."""

import math
from dataclasses import replace

import pytest
import torch
from support.hessian import SMALL, exact_trace, objective_of, target_of

import tacit
from tacit.equations import candidates as candidates_module
from tacit.equations import rows
from tacit.equations.noise import LESS, correct_factor
from tacit.regularizers import gradient_norm, group_l2, hessian_trace, nuclear_norm

OBJECTIVE = objective_of(0, SMALL, count=12)
TARGET = target_of([exact_trace(OBJECTIVE), tacit.l2()], groups=3)
PARAMS = TARGET.points[0].params


def candidates(probes=6, **options):
    noisy = hessian_trace(OBJECTIVE, probes, **options)
    return [tacit.l2(), noisy, tacit.smooth_l1(0.1)]


def dense_groups(regularizer, params=PARAMS, names=None):
    """The column of every group of probes, (groups, rows)."""
    columns = regularizer.bind(params)
    parts = []
    for name in names or params:
        part = slice(0, params[name].numel())
        parts.append(columns.rows(name, part) + columns.deviations(name, part)[:, :, 0])
    return torch.cat(parts).T


def between_groups(groups):
    """The mean of ⟨A_g, A_h⟩ over groups g ≠ h, of which a little less noise is subtracted."""
    count, mean = len(groups), groups.mean(0)
    noise = (groups - mean).square().sum() / (count * (count - 1))
    products = groups @ groups.T
    pairs = (products.sum() - products.trace()) / (count * (count - 1))
    torch.testing.assert_close(pairs, mean.square().sum() - noise)
    return pairs + LESS / (count - 1) * noise


def dense_products(regularizers, target=TARGET, names=None):
    """[design | targets]ᵀ[design | targets], with products of the noisy column between groups."""
    point = target.points[0]
    names = list(names or point.params)
    columns = [
        torch.cat([r.gradient(point.params)[r.name][n].flatten() for n in names])
        for r in regularizers
    ]
    vectors = [torch.cat([v[n].flatten() for n in names]) for v in point.vectors]
    matrix = torch.stack([*columns, *vectors], dim=1)
    products = matrix.T @ matrix
    for i, regularizer in enumerate(regularizers):
        if regularizer.bind(point.params).noisy:
            products[i, i] = between_groups(dense_groups(regularizer, names=names))
    return products


def assert_products(equations, expected, **tolerances):
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, expected, rtol=1e-9, atol=1e-12, **tolerances)


def test_products_of_a_noisy_column_are_between_different_groups():
    regularizers = candidates()
    assert_products(TARGET.equations(regularizers), dense_products(regularizers))


def test_slices_do_not_matter(monkeypatch):
    regularizers = candidates()
    whole = TARGET.equations(regularizers).scatter()
    monkeypatch.setattr(candidates_module, "CHUNK", 40)
    sliced = TARGET.equations(regularizers).scatter()
    torch.testing.assert_close(sliced.products, whole.products)


def test_columns_are_selected_with_their_noise():
    regularizers = candidates()
    selected = TARGET.equations(regularizers).select_columns([1, 0])
    assert_products(selected, dense_products([regularizers[1], regularizers[0]]))
    exact = TARGET.equations(regularizers).select_columns([2, 0])
    assert exact.scatter() is None
    assert_products(exact, dense_products([regularizers[2], regularizers[0]]))


def test_a_layer_has_only_its_own_noise():
    regularizers = candidates(probes=128)
    layer = TARGET.equations(regularizers).layer("2")
    assert_products(layer, dense_products(regularizers, names=["2.weight", "2.bias"]))


def test_noise_of_stacked_equations_adds_up():
    regularizers = candidates()
    equations = TARGET.equations(regularizers)
    other = tacit.stack([equations, equations])
    torch.testing.assert_close(other.scatter().products, 2 * equations.scatter().products)
    assert other.scatter().points == 2
    strengths = tacit.fit(other).strengths
    assert strengths["hessian_trace"] == pytest.approx(
        tacit.fit(equations).strengths["hessian_trace"], rel=0.1
    )


def test_a_file_holds_the_noise(tmp_path):
    equations = TARGET.equations(candidates())
    equations.save(tmp_path / "equations")
    loaded = tacit.Equations.load(tmp_path / "equations")
    first, second = tacit.fit(equations), tacit.fit(loaded)
    assert first.strengths == second.strengths
    assert first.intervals() == second.intervals()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda block: replace(block, noisy=(5,)), "noisy columns"),
        (lambda block: replace(block, scatter=block.scatter[:-1]), "scatter of"),
        (lambda block: replace(block, scatter=block.scatter[:, :1]), "scatter of"),
        (lambda block: replace(block, scatter=block.scatter * math.nan), "not finite"),
        (lambda block: replace(block, scatter=-block.scatter), "negative"),
    ],
)
def test_a_file_whose_noise_does_not_fit_is_refused(tmp_path, damage, said):
    equations = TARGET.equations(candidates())
    blocks = (damage(equations.blocks[0]), *equations.blocks[1:])
    replace(equations, blocks=blocks).save(tmp_path / "equations")
    with pytest.raises(tacit.InputError, match=said):
        tacit.Equations.load(tmp_path / "equations")


@pytest.mark.parametrize("other", [group_l2(), nuclear_norm()], ids=["kinks", "subspace"])
def test_rows_without_equations_have_no_noise(other):
    params = {n: p.clone() for n, p in PARAMS.items()}
    params["0.weight"][2:] = 0  # four of six groups, and a matrix of rank two
    objective = tacit.Objective(OBJECTIVE.model, OBJECTIVE.loss, OBJECTIVE.data)
    noisy = hessian_trace(objective, 6)
    equations = tacit.endpoint_equations(objective, [noisy, other], params=params)
    matrix, columns = [], noisy.bind(params)
    bound = equations.origin.bind()
    for name, p in params.items():
        part = slice(0, p.numel())
        groups = columns.rows(name, part) + columns.deviations(name, part)[:, :, 0]
        space, kinks = bound.subspace(name), rows.kinks_on(bound, name, part)
        groups = groups if space is None else space.project(groups)
        matrix.append(groups if kinks is None else groups[~kinks])
    expected = between_groups(torch.cat(matrix).T)
    factor = equations.factor()
    torch.testing.assert_close(factor[:, 0].square().sum(), expected)


def test_two_noisy_columns_share_their_probes():
    """Of two objectives with the same probes: their noise is correlated."""
    scaled = tacit.Objective(OBJECTIVE.model, lambda o, y: 3 * OBJECTIVE.loss(o, y), OBJECTIVE.data)
    first, second = hessian_trace(OBJECTIVE, 6), hessian_trace(scaled, 6, name="scaled")
    factor = TARGET.equations([first, second]).factor()
    products = factor.T @ factor
    torch.testing.assert_close(products[0, 1], 3 * products[0, 0])
    torch.testing.assert_close(products[1, 1], 9 * products[0, 0])


def test_different_numbers_of_groups_are_refused():
    first, second = hessian_trace(OBJECTIVE, 6), hessian_trace(OBJECTIVE, 4, name="other")
    with pytest.raises(tacit.InputError, match="same probes="):
        TARGET.equations([first, second])
    parts = [TARGET.equations(hessian_trace(OBJECTIVE, probes)) for probes in (4, 6)]
    with pytest.raises(tacit.InputError, match="same probes="):
        tacit.stack(parts)


def test_a_known_penalty_with_noise_is_refused():
    known = {hessian_trace(OBJECTIVE, 6): 0.1}
    with pytest.raises(tacit.InputError, match=r"known penalty 'hessian_trace'.*probes"):
        tacit.endpoint_equations(OBJECTIVE, tacit.l2(), known=known)
    tacit.endpoint_equations(OBJECTIVE, tacit.l2(), known={hessian_trace(OBJECTIVE): 0.1})


def test_an_average_over_updates_of_noisy_columns_is_refused():
    model = OBJECTIVE.model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(tacit.InputError, match="hessian_trace cannot be averaged"):
        tacit.average_epochs(model, optimizer, averaged=[hessian_trace(OBJECTIVE, 6)])


def test_columns_without_noise_keep_their_precision():
    """A correction by products would lose half of the digits of nearly dependent columns."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    matrix[:, 1] = matrix[:, 0] + 1e-10 * matrix[:, 1]
    factor = torch.linalg.qr(matrix, mode="r").R
    noise = torch.tensor([[5.0]], dtype=torch.float64)
    corrected = correct_factor(factor, 3, [2], noise)
    both = [torch.linalg.svdvals(f[:, :2]) for f in (factor, corrected)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=0)
    square = corrected[:, 2].square().sum()
    torch.testing.assert_close(square, factor[:, 2].square().sum() - 5)


def test_a_noisy_column_that_others_span_stays_finite():
    """As where there are fewer equations than columns."""
    matrix = torch.randn(3, 5, dtype=torch.float64)
    noise = torch.tensor([[5.0]], dtype=torch.float64)
    for factor in (matrix, torch.cat([matrix[:2], torch.zeros(1, 5).double()])):
        corrected = correct_factor(factor, 4, [3], noise)
        assert corrected.isfinite().all()
        torch.testing.assert_close(
            corrected[:, :3].T @ corrected[:, :3], factor[:, :3].T @ factor[:, :3]
        )
    zero = correct_factor(0 * matrix, 4, [3], 0 * noise)
    assert not zero.any()


def test_a_column_of_the_gradient_norm_beside_it_is_exact():
    regularizers = [hessian_trace(OBJECTIVE, 6), gradient_norm(OBJECTIVE)]
    assert_products(TARGET.equations(regularizers), dense_products(regularizers))
