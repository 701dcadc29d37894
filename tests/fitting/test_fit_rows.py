"""Frames of a fit have its numbers, and a verdict on every strength."""

import math
import sys

import maketables
import pytest
import torch
from support.models import random_data, tanh_mlp
from support.systems import draw, equations, equations_of_parts
from torch.nn import functional as F

import tacit
from tacit import InputError


def noisy_fit(strengths=(2.0, -0.5, 0.0), groups=8, noise=0.05, **changes):
    """Design of noise, and groups of targets with noise of their own."""
    design = draw(1, 400, len(strengths))
    target = design @ torch.tensor(strengths).double()
    targets = target[:, None] + noise * draw(2, 400, groups)
    return tacit.fit(equations(design, targets, blocks=3, **changes))


def test_one_row_per_strength_with_shares_and_every_kind_of_interval():
    fit = noisy_fit((2.0, 0.5))
    frame = fit.to_frame()
    assert list(frame["name"]) == list(frame["regularizer"]) == ["r0", "r1"]
    assert dict(zip(frame.name, frame.strength, strict=True)) == fit.strengths
    assert dict(zip(frame.name, frame.share, strict=True)) == fit.shares
    assert dict(zip(frame.name, frame.unique_share, strict=True)) == fit.unique
    assert dict(zip(frame.name, frame.inflation, strict=True)) == fit.inflation
    assert {*fit.error_bars} == {"draws", "layers"}
    for kind, intervals in fit.intervals().items():
        errors = dict(zip(frame.name, frame[f"{kind}_error"], strict=True))
        assert errors == fit.standard_errors[kind]
        ends = zip(frame[f"{kind}_low"], frame[f"{kind}_high"], strict=True)
        assert dict(zip(frame.name, ends, strict=True)) == intervals
    assert frame.columns[-1] == "verdict"
    assert frame.share.sum() == pytest.approx(fit.explained)


def verdicts(fit):
    frame = fit.to_frame()
    return dict(zip(frame.name, frame.verdict, strict=True))


def test_verdicts_are_the_gravest_problem_or_where_the_widest_interval_lies():
    fit = noisy_fit()
    assert [(p.kind, p.names) for p in fit.problems] == [("weak", ("r2",)), ("negative", ("r1",))]
    assert verdicts(fit) == {"r0": "above zero", "r1": "negative", "r2": "weak"}
    applied = noisy_fit((2.0, -0.5), mode="difference")
    assert verdicts(applied) == {"r0": "above zero", "r1": "below zero"}
    poor = noisy_fit((0.0, 0.0), noise=1.0, groups=1)
    assert set(verdicts(poor).values()) == {poor.problems[0].kind}
    exact = tacit.fit(equations(draw(1, 20, 1), draw(1, 20, 1)[:, 0]))
    assert not exact.problems
    assert verdicts(exact) == {"r0": "no interval"}


def test_a_strength_that_a_bound_keeps_at_zero_is_called_bounded():
    free = noisy_fit((2.0, -5e-4), noise=1e-4)
    fit = tacit.fit(free.equations, nonnegative=True)
    assert fit.strengths["r1"] == 0
    assert not fit.problems
    assert verdicts(fit) == {"r0": "above zero", "r1": "bounded"}


def test_a_family_of_several_strengths_has_one_unique_share():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    regularizers = [tacit.layerwise(tacit.l2()), tacit.l1()]
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers))
    frame = fit.to_frame()
    assert list(frame["name"]) == ["l2[0]", "l2[2]", "l1"]
    assert list(frame["regularizer"]) == ["l2", "l2", "l1"]
    assert list(frame["unique_share"]) == [fit.unique["l2"], fit.unique["l2"], fit.unique["l1"]]


def test_by_layer_each_row_is_of_the_fit_of_that_layer():
    first, second = draw(1, 30, 2), draw(2, 30, 2)
    first[:, 1] = 0
    parts = [
        ("first", 0, 0, torch.cat([first, 3 * first[:, :1]], 1)),
        ("second", 0, 0, torch.cat([second, second @ torch.tensor([[1.0], [2.0]]).double()], 1)),
    ]
    fit = tacit.fit(equations_of_parts(parts, 2))
    frame = fit.to_frame("layer")
    assert list(zip(frame.layer, frame.name, strict=True)) == [
        ("first", "r0"), ("second", "r0"), ("second", "r1"),
    ]  # fmt: skip
    assert list(frame.strength) == pytest.approx([3.0, 1.0, 2.0])
    assert list(frame.explained) == pytest.approx([1.0, 1.0, 1.0])
    assert list(frame.share) == [
        fit.layers[layer].shares[name] for layer, name in zip(frame.layer, frame.name, strict=True)
    ]
    norms = [float(part[3][:, -1].square().sum()) for part in parts]
    shares = [norms[0] / sum(norms), *[norms[1] / sum(norms)] * 2]
    assert list(frame.target_share) == pytest.approx(shares)
    assert frame.columns[-1] == "verdict"


def test_the_error_of_a_finite_scale_is_a_column_of_its_own():
    plain = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    noisy = tacit.techniques.input_noise(plain, 0.2, draws=16)
    fit = tacit.fit(tacit.difference_equations(noisy, plain, [tacit.l2()]))
    assert "step_error" not in fit.to_frame()
    halved = fit.with_halved()
    assert list(halved.to_frame()["step_error"]) == list(halved.step_errors.values())


def test_bad_calls_are_explained(monkeypatch):
    fit = noisy_fit()
    with pytest.raises(InputError, match="'strength', 'layer'"):
        fit.to_frame("parameter")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"pip install 'tacit\[frames\]'"):
        fit.to_frame()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'tacit\[plots\]'"):
        fit.plot()


def test_maketables_reads_coefficients_with_the_widest_error_bars():
    fit = noisy_fit((2.0, 0.5))
    extractor = maketables.extractors.get_extractor(fit)
    frame = extractor.coef_table(fit)
    assert list(frame.columns) == ["b", "se", "t", "p", "ci95l", "ci95u"]
    assert list(frame.index) == ["r0", "r1"]
    assert dict(frame["b"]) == fit.strengths
    assert dict(frame["se"]) == fit.standard_errors["draws"]
    low, high = fit.intervals()["draws"]["r0"]
    assert (frame["ci95l"]["r0"], frame["ci95u"]["r0"]) == (low, high)
    assert list(frame["t"]) == list(frame["b"] / frame["se"])
    t, p = frame["t"]["r1"], frame["p"]["r1"]
    freedom = fit.error_bars["draws"].freedom
    exact = 2 * float(torch.special.ndtr(torch.tensor(-abs(t)).double()))
    assert freedom < 30  # so that p is above that of the normal distribution
    assert exact < p < 1
    assert [extractor.stat(fit, key) for key in ("N", "r2", "rows", "nonsense")] == [
        1, fit.explained, 400, None,
    ]  # fmt: skip
    assert extractor.default_stat_keys(fit) == ["N", "rows", "r2", "problems"]
    assert extractor.stat_labels(fit)["r2"] == "Explained"
    assert extractor.depvar(fit) == "−∇L at one point"


def _stars(fit):
    """Those behind the first strength in a table of maketables."""
    lines = maketables.ETable([fit]).make(type="tex").splitlines()
    (row,) = [line for line in lines if line.startswith("r0 ")]
    return "*" * row.count("*")


def test_maketables_has_no_p_value_where_a_problem_hides_the_strength():
    design = draw(1, 400, 3)
    other = (design @ torch.ones(3).double())[:, None] + 0.01 * draw(2, 400, 8)
    fit = tacit.fit(equations(design[:, :1], other))
    assert fit.problems[0].kind == "unexplained"
    frame = fit.__maketables_coef_table__
    assert math.isnan(frame["p"]["r0"])
    assert frame["se"]["r0"] == fit.standard_errors["draws"]["r0"]
    stars = [_stars(each) for each in (fit, noisy_fit((2.0,)))]
    assert stars == ["", "***"]


def test_maketables_has_no_p_value_of_what_a_random_direction_would_add():
    design, rest = draw(1, 400, 2), 0.05 * draw(3, 400, 1)
    targets = 2 * design[:, :1] + rest + 1e-4 * draw(2, 400, 8)
    fit = tacit.fit(equations(design, targets))
    (problem,) = fit.problems
    assert (problem.kind, problem.names) == ("weak", ("r1",))
    frame = fit.__maketables_coef_table__
    assert abs(frame["t"]["r1"]) > 10
    assert math.isnan(frame["p"]["r1"])
    assert frame["p"]["r0"] < 1e-6


def test_a_table_of_maketables_has_the_numbers_of_several_fits():
    fits = [noisy_fit((2.0, 0.5)), noisy_fit((1.0,))]
    text = maketables.ETable(fits).make(type="tex")
    for fit in fits:
        assert f"{fit.strengths['r0']:.3f}" in text
    assert "Explained" in text
    (problems,) = [line for line in text.splitlines() if line.startswith("Problems")]
    assert problems.split("&")[1:] == [
        f" {len(fits[0].problems)} ",
        f" {len(fits[1].problems)} \\\\",
    ]
