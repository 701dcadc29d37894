"""Splines: hat functions, their integrals, where knots are placed, and what is refused."""

import math

import numpy as np
import pytest
import torch
from support.models import params_of, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import InputError
from tacit.regularizers import check_contract, l1, l2, nuclear_norm, spectral_spline, spline
from tacit.regularizers.family import Shape
from tacit.regularizers.splines import Hats, _quantiles

PARAMS = params_of(tanh_mlp(3, sizes=(4, 5, 2)))
KNOTS = (-0.6, -0.1, 0.2, 0.35)


def naive_derivative(x, knots, j, *, even=False):
    """B_j(x) by definition: numpy's interpolation, with lines beyond the outermost knots."""
    values, size = np.eye(len(knots))[j], abs(x) if even else x
    inner = np.interp(size, knots, values)
    if len(knots) > 1 and size < knots[0]:
        inner = values[0] + (size - knots[0]) * (values[1] - values[0]) / (knots[1] - knots[0])
    if len(knots) > 1 and size > knots[-1]:
        inner = values[-1] + (size - knots[-1]) * (values[-1] - values[-2]) / (
            knots[-1] - knots[-2]
        )
    return inner * np.sign(x) if even else inner


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("knots", [KNOTS, (0.1, 0.4), (0.25,)])
def test_columns_are_hat_functions_and_values_their_integrals(even, knots):
    knots = tuple(k for k in knots if k > 0) if even else knots
    points = torch.linspace(-1, 1, 41, dtype=torch.float64) + 0.003
    hats = Hats(Shape(knots, even=even))
    expected = [
        [naive_derivative(float(x), knots, j, even=even) for j in range(len(knots))] for x in points
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(hats.derivatives(points), expected)
    torch.testing.assert_close(hats.integrals(points).sum(0), hats.values(points))

    for x in (-0.9, -0.3, 0.05, 0.3, 0.8):
        fine = np.linspace(0, x, 20_001)[1:] - x / 40_000  # midpoints
        for j in range(len(knots)):
            area = naive_area(fine, x, knots, j, even=even)
            exact = hats.values(torch.tensor([x], dtype=torch.float64))[j]
            assert float(exact) == pytest.approx(area, abs=1e-6)


def naive_area(fine, x, knots, j, *, even):
    """∫ B_j from 0 to x by the midpoint rule."""
    hats = Hats(Shape(knots, even=even))
    heights = hats.derivatives(torch.from_numpy(fine))[:, j].numpy()
    return heights.mean() * x


@pytest.mark.parametrize(
    "make",
    [
        lambda: spline(4),
        lambda: spline(4, even=True, convex=True),
        lambda: spline(1),
        lambda: spectral_spline(2, convex=True),
    ],
)
def test_a_number_of_knots_keeps_the_contract(make):
    check_contract(make(), {"w": PARAMS["2.weight"], "b": PARAMS["0.bias"]})


def test_every_scope_has_its_own_knots_and_columns():
    shape = spline(4, scope="*.bias").bind(PARAMS)
    biases = torch.cat([PARAMS["0.bias"], PARAMS["2.bias"]])
    assert set(shape.active) == {"0.bias", "2.bias"}
    assert (shape.shape.knots[0], shape.shape.knots[-1]) == (biases.min(), biases.max())
    assert sum(shape.shape.counts) == len(biases)


@pytest.mark.parametrize("family", ["spline", "spectral"])
def test_combinations_of_strengths_are_the_known_penalties(family):
    """s′ = 2x and s′ = sign(x) are splines, and so are the penalties of singular values."""
    known, shape = (l2(), l1()), spline(6, even=True)
    if family == "spectral":
        known, shape = (l2(scope="*.weight"), nuclear_norm()), spectral_spline(4)
    knots = torch.tensor(shape.bind(PARAMS).shape.knots, dtype=torch.float64)
    for penalty, strengths in zip(known, (2 * knots, torch.ones_like(knots)), strict=True):
        exact = penalty.gradient(PARAMS)[penalty.name]
        columns = shape.gradient(PARAMS).values()
        for name, entries in exact.items():
            pairs = zip(strengths, columns, strict=True)
            total = sum((s * column[name] for s, column in pairs), torch.zeros_like(entries))
            torch.testing.assert_close(total, entries, atol=1e-12, rtol=0)
        value = float(shape.value(PARAMS) @ strengths)
        assert value == pytest.approx(float(penalty.value(PARAMS)[0]), rel=1e-12)


def test_convex_columns_with_strengths_of_zero_or_above_are_all_convex_shapes():
    hats, ramps = Hats(Shape(KNOTS)), Hats(Shape(KNOTS, convex=True))
    points = torch.linspace(-1, 1, 301, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rises = torch.rand(4, generator=generator, dtype=torch.float64)
    rises[0] = -3
    slopes = ramps.derivatives(points) @ rises
    assert (slopes.diff() >= -1e-12).all()
    torch.testing.assert_close(slopes, hats.derivatives(points) @ rises.cumsum(0))
    assert Shape(KNOTS, convex=True).bounded == (False, True, True, True)
    assert Shape(KNOTS[2:], even=True, convex=True).bounded == (True, True)


def test_knots_are_set_once_and_stay():
    """Values and columns at other weights, and of wider zero widths, are of the same penalties."""
    shape, other = spline(6, even=True), {n: 3 * p for n, p in PARAMS.items()}
    knots = shape.bind(PARAMS).shape.knots
    assert shape.bind(other).shape.knots == knots
    assert shape.with_zero_width(0.3).bind(other).shape.knots == knots
    assert spline(6, even=True).bind(other).shape.knots != knots
    before = spline(knots, even=True).value(other)
    torch.testing.assert_close(shape.value(other), before)


def test_rows_at_zero_are_left_out_of_even_splines_only():
    params = {"w": torch.tensor([0.0, 1e-12, 0.5, -1.0])}
    assert spline(2, even=True).bind(params).kinks("w", slice(0, 4)).tolist() == [1, 1, 0, 0]
    assert spline(2, even=True, zero_width=0).bind(params).shape.knots[0] == pytest.approx(1e-12)
    assert spline(2).bind(params).kinks("w", slice(0, 4)) is None


def test_few_different_weights_are_the_knots():
    ternary = {"w": torch.tensor([-1.0, 0.0, 0.0, 1.0, 1.0]).bfloat16()}
    assert spline().bind(ternary).shape.knots == (-1, 0, 1)
    assert spline(even=True).bind(ternary).shape.knots == (1,)
    constant = {"w": torch.full((4,), 0.3)}
    assert spline().bind(constant).shape.knots == (pytest.approx(0.3),)
    columns = spline().bind(constant).rows("w", slice(0, 4))
    assert torch.equal(columns, torch.ones(4, 1, dtype=torch.float64))
    assert spline().bind({"w": torch.zeros(3)}).shape.knots == (0,)
    with pytest.raises(InputError, match="not zero"):
        spline(even=True).bind({"w": torch.zeros(3)})


@pytest.mark.parametrize("count", [2, 3, 24])
def test_every_interval_between_knots_has_weights(count):
    """So that no knot is undetermined: hats and weights interlace."""
    generator = torch.Generator().manual_seed(count)
    for draw in range(20):
        size = int(torch.randint(count + 1, 80, (1,), generator=generator))
        weights = torch.randn(size, generator=generator, dtype=torch.float64) ** (1 + 2 * draw % 5)
        knots = _quantiles([weights], count)
        assert 2 <= len(knots) <= count
        hats = Hats(Shape(knots))
        assert min(hats.counts([weights])[1:-1]) >= 1
        assert torch.linalg.matrix_rank(hats.derivatives(weights)) == len(knots)


def test_quantiles_of_many_weights_have_the_exact_ends(monkeypatch):
    monkeypatch.setattr("tacit.regularizers.splines.MOST_SORTED", 100)
    weights = torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    knots = _quantiles([weights[:5000], weights[5000:]], 9)
    assert (knots[0], knots[-1]) == (weights.min(), weights.max())
    assert len(knots) > 6


def test_many_zeros_do_not_attract_the_knots():
    weights = torch.cat([torch.zeros(1000), torch.linspace(-1, 1, 100)]).double()
    assert len(_quantiles([weights], 24)) >= 23


def test_close_knots_have_different_names():
    names = spline([1.0, 1.000001, 1.0000011]).bind({"w": torch.ones(2)}).names
    assert len(set(names)) == 3
    assert spline([0.25, 1]).bind({"w": torch.ones(2)}).names == ("spline[0.25]", "spline[1]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_of_coarse_weights_are_exact(dtype):
    coarse = {n: p.to(dtype) for n, p in PARAMS.items()}
    exact = {n: p.double() for n, p in coarse.items()}
    for make in (lambda: spline(5), lambda: spline(5, even=True), lambda: spectral_spline(3)):
        shape = make()
        for column, gradient in shape.gradient(coarse).items():
            for name, entries in gradient.items():
                torch.testing.assert_close(entries, shape.gradient(exact)[column][name])
        assert shape.value(coarse).dtype == dtype


def test_a_matrix_of_low_rank_has_equations_along_its_row_and_column_space():
    left, right = torch.randn(5, 2).double(), torch.randn(2, 6).double()
    columns = spectral_spline(3).bind({"w": left @ right})
    assert len(columns.shape.knots) == 2
    assert columns.subspace("w").dimension == 2 * (5 + 6 - 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: spline(0), "1 to 1,000"),
        (lambda: spline(True), "knots is True"),
        (lambda: spline([]), "knots is"),
        (lambda: spline("ab"), "knots is ab"),
        (lambda: spline(2.5), "knots is 2.5"),
        (lambda: spline([0.2, 0.1]), "increasing"),
        (lambda: spline([0.1, math.nan]), "increasing"),
        (lambda: spline([-0.1, 0.2], even=True), "not below zero"),
        (lambda: spline(even=1), "even"),
        (lambda: spline(convex="yes"), "convex"),
        (lambda: spline(even=True, zero_width=2), "zero_width"),
        (lambda: spectral_spline(convex=None), "convex"),
        (lambda: spectral_spline(scope="*.bias").bind(PARAMS), "none"),
        (lambda: tacit.layerwise(spline()), "layerwise"),
    ],
)
def test_bad_calls_are_explained(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_a_spline_of_several_strengths_is_no_known_penalty():
    model = nn.Linear(3, 1).double()
    data = torch.randn(8, 3).double(), torch.randn(8, 1).double()
    with pytest.raises(InputError, match="2 coefficients"):
        tacit.estimate(model, F.mse_loss, data, [l2()], known={spline(2): 0.1})
