"""Differences of two fits: closed forms, false positives and power, and what is not compared."""

import math
from dataclasses import replace

import pytest
import torch
from support.systems import draw, equations, equations_of_parts, source
from torch.nn import functional as F

import tacit
from tacit.fitting import ErrorBars, FitDifference
from tacit.fitting.fit_difference import _rejected, holm


def fit_of_endpoints(seed, strengths, *, count=4, noise=0.1, rows=30, nonnegative=False):
    """A fit of `count` endpoints that agree on these strengths but for noise."""
    truth = torch.tensor(strengths, dtype=torch.float64)
    parts = []
    for place in range(count):
        design = draw(100 * seed + place, rows, len(truth))
        # Noise along the columns, of each endpoint's own: its strengths differ.
        own = truth + noise * draw(50_000_000 + 100 * seed + place, len(truth))
        parts.append(("0", place, 0, torch.cat([design, (design @ own)[:, None]], 1)))
    system = equations_of_parts(parts, len(truth))
    sources = tuple(source(loss_value=float(100 * seed + i)) for i in range(count))
    return tacit.fit(replace(system, sources=sources), nonnegative=nonnegative)


def with_bars(fit, errors, freedom=math.inf, kind="sampling"):
    covariance = torch.tensor(errors, dtype=torch.float64).square().diag()
    return fit.with_error_bars(
        ErrorBars(kind, f"{freedom:g}", tuple(fit.strengths), covariance, freedom)
    )


def test_numbers_are_those_of_welch():
    from scipy.special import stdtr, stdtrit

    one, two = (with_bars(fit_of_endpoints(s, [1.0, 2.0]), [0.3, 0.1], 4.0) for s in (1, 2))
    two = with_bars(two, [0.4, 0.2], 9.0)
    apart = one.difference(two)
    assert isinstance(apart, FitDifference)
    variances = (0.09, 0.16), (0.01, 0.04)
    for name, (v1, v2) in zip(one.strengths, variances, strict=True):
        difference = one.strengths[name] - two.strengths[name]
        error = math.sqrt(v1 + v2)
        freedom = (v1 + v2) ** 2 / (v1**2 / 4 + v2**2 / 9)
        assert apart.differences[name] == pytest.approx(difference, abs=1e-14)
        assert apart.standard_errors["sampling"][name] == pytest.approx(error, rel=1e-12)
        assert apart.freedoms["sampling"][name] == pytest.approx(freedom, rel=1e-12)
        p = 2 * stdtr(freedom, -abs(difference) / error)
        assert apart.p_values["sampling"][name] == pytest.approx(p, rel=1e-12)
        low, high = apart.intervals(0.9)["sampling"][name]
        half = stdtrit(freedom, 0.95) * error
        assert (low, high) == pytest.approx((difference - half, difference + half), rel=1e-9)
    assert apart.strengths["r0"] == (one.strengths["r0"], two.strengths["r0"])
    assert {*apart.error_bars} == {"sampling", "training"}
    assert not apart.problems


def test_the_other_way_round_only_signs_change():
    one, two = fit_of_endpoints(3, [1.0, 2.0]), fit_of_endpoints(4, [0.0, 2.0], count=6)
    there, back = one.difference(two), two.difference(one)
    assert there.differences == {name: -value for name, value in back.differences.items()}
    assert there.p_values["training"] == pytest.approx(back.p_values["training"])
    assert there.freedoms["training"] == pytest.approx(back.freedoms["training"])


def test_infinite_and_single_degrees_of_freedom():
    normal = [with_bars(fit_of_endpoints(s, [1.0]), [0.1]) for s in (5, 6)]
    apart = normal[0].difference(normal[1])
    assert apart.freedoms["sampling"]["r0"] == math.inf
    t = apart.differences["r0"] / math.hypot(0.1, 0.1)
    assert apart.p_values["sampling"]["r0"] == pytest.approx(math.erfc(abs(t) / math.sqrt(2)))
    exact = [with_bars(fit, [0.0], 3.0) for fit in normal]
    assert exact[0].difference(exact[1]).p_values["sampling"]["r0"] == 0.0


def many_p_values(shift, seeds):
    values = []
    for seed in seeds:
        one = fit_of_endpoints(2 * seed, [1.0, 2.0], count=3 + seed % 4, noise=0.5)
        two = fit_of_endpoints(2 * seed + 1, [1.0 + shift, 2.0], count=5, noise=1.0)
        values.append(list(one.difference(two).p_values["training"].values()))
    return torch.tensor(values)


def test_equal_strengths_are_rarely_called_different_and_different_ones_often():
    equal = many_p_values(0.0, range(10_000, 10_400)).flatten()
    # Welch's t after the jackknife errs on the side of chance with few endpoints.
    for level in (0.01, 0.05, 0.2, 0.5):
        part = float((equal < level).double().mean())
        assert part <= level + 3 * math.sqrt(level * (1 - level) / len(equal)), level
        assert part >= level / 3, level
    shifted = many_p_values(5.0, range(20_000, 20_100))[:, 0]
    assert float((shifted < 0.05).double().mean()) > 0.95


def test_holm_names_none_by_chance_where_all_are_equal():
    fits = [fit_of_endpoints(seed, [0.0] * 8, noise=0.0) for seed in (30, 31)]
    named, strengths = 0, draw(70_000, 300, 2, 8)
    for both in strengths.tolist():
        one, two = (
            with_bars(
                replace(fit, strengths=dict(zip(fit.strengths, values, strict=True))), [1.0] * 8
            )
            for fit, values in zip(fits, both, strict=True)
        )
        named += bool(one.difference(two).beyond_chance()["sampling"])
    assert named / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    assert named > 0


def test_holm_adjusts_the_smallest_most():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_strengths_without_a_p_value_are_no_tests():
    p_values = {"r0": 0.01, "r1": 0.02, "r2": 0.2, "r3": math.nan}
    assert _rejected(p_values, 0.05) == ("r0", "r1")  # 3 · 0.01, 2 · 0.02, 1 · 0.2
    assert _rejected(p_values, 0.035) == ("r0",)
    assert _rejected(p_values, 0.025) == ()


def test_the_summary_says_what_chance_explains():
    one, two = fit_of_endpoints(7, [1.0, 2.0]), fit_of_endpoints(8, [9.0, 2.0])
    apart = one.difference(two)
    text = str(apart)
    assert apart.beyond_chance()["training"] == ("r0",)
    assert text.startswith("r0: more than the noise of training alone explains. r1:")
    assert "from 4 endpoints (each fit)." in text
    assert "95 % intervals of the differences: r0 [" in text
    assert text.endswith("No problems found.")
    assert max(map(len, text.splitlines())) <= 88
    assert apart.to_dict()["p_values"]["training"]["r1"] == apart.p_values["training"]["r1"]


def test_a_frame_has_a_row_per_strength_with_every_kind_of_error_bars():
    one, two = (with_bars(fit_of_endpoints(s, [1.0, 2.0]), [0.3, 0.1], 4.0) for s in (1, 2))
    apart = one.difference(two)
    frame = apart.to_frame().set_index("name")
    assert list(frame.index) == ["r0", "r1"]
    assert list(frame["first"]) == [*one.strengths.values()]
    assert list(frame["other"]) == [*two.strengths.values()]
    assert dict(frame["difference"]) == apart.differences
    for kind in ("training", "sampling"):
        assert dict(frame[f"{kind}_error"]) == apart.standard_errors[kind]
        assert dict(frame[f"{kind}_p"]) == apart.p_values[kind]
        ends = zip(frame[f"{kind}_low"], frame[f"{kind}_high"], strict=True)
        assert list(ends) == [*apart.intervals()[kind].values()]


def test_regularizers_of_only_one_fit_are_named():
    one, two = fit_of_endpoints(9, [1.0, 2.0]), fit_of_endpoints(10, [1.0, 2.0, 3.0])
    apart = one.difference(two)
    assert list(apart.differences) == ["r0", "r1"]
    (problem,) = apart.problems
    assert problem.names == ("r2",)
    assert "only the other fit has r2" in problem.message


def test_penalties_of_one_name_but_other_options_are_not_compared():
    one, two = fit_of_endpoints(11, [1.0, 2.0]), fit_of_endpoints(12, [1.0, 2.0])
    families = (replace(one.equations.families[0], definition="smooth_l1(beta=0.1)"),)
    changed = replace(one.equations, families=(*families, one.equations.families[1]))
    apart = tacit.fit(changed).difference(two)
    assert list(apart.differences) == ["r1"]
    assert "smooth_l1(beta=0.1)" in apart.problems[0].message


def test_bounds_are_named_and_have_no_p_value():
    one = fit_of_endpoints(13, [1.0, -5.0], nonnegative=True)
    apart = one.difference(fit_of_endpoints(14, [1.0, 2.0]))
    assert math.isnan(apart.p_values["training"]["r1"])
    assert not math.isnan(apart.p_values["training"]["r0"])
    assert any(p.kind == "bounded" and p.names == ("r1",) for p in apart.problems)
    assert " –" in str(apart)


def test_problems_of_the_fits_are_named_and_doubt_is_shown():
    design, good = draw(15, 60, 1), fit_of_endpoints(16, [1.0])
    poor = tacit.fit(equations(design, 0.1 * design[:, 0] + draw(17, 60)))
    apart = good.difference(poor)
    assert apart.doubtful
    kinds = [problem.kind for problem in apart.problems]
    assert kinds[0] == "no error bars"
    assert "unexplained" in kinds
    assert any(p.message.startswith("(the other fit)") for p in apart.problems)
    assert "(" in str(apart).split("difference")[2]


def test_layers_are_no_error_bars_of_a_difference():
    parts = [draw(s, 40, 1) for s in (18, 19)]
    fits = [
        tacit.fit(
            replace(equations(d, d[:, 0] + 0.01 * draw(20, 40), blocks=3),
                    sources=(source(loss_value=float(i)),))
        )
        for i, d in enumerate(parts)
    ]  # fmt: skip
    assert all("layers" in fit.error_bars for fit in fits)
    assert not fits[0].difference(fits[1]).error_bars


def test_wrong_calls_are_refused():
    fit = fit_of_endpoints(21, [1.0])
    with pytest.raises(tacit.InputError, match=r"other is a dict: pass another Fit"):
        fit.difference({"l2": 1.0})
    with pytest.raises(tacit.InputError, match=r"same weights and data.*not independent"):
        fit.difference(fit)
    other = fit_of_endpoints(22, [1.0, 2.0])
    renamed = replace(
        other.equations,
        names=("a", "b"),
        families=tuple(
            replace(f, name=n) for f, n in zip(other.equations.families, "ab", strict=True)
        ),
    )
    with pytest.raises(tacit.InputError, match="no regularizer in common"):
        fit.difference(tacit.fit(renamed))
    with pytest.raises(tacit.InputError, match="level is 95"):
        fit.difference(other).intervals(95)


def test_one_model_at_the_same_weights_is_not_independent_of_itself():
    X = draw(23, 50, 3)
    model = torch.nn.Linear(3, 1).double()
    objective = tacit.Objective(model, F.mse_loss, (X, X.sum(1, keepdim=True)))
    fits = [
        tacit.fit(tacit.endpoint_equations(objective, regularizers))
        for regularizers in (tacit.l2(), [tacit.l2(), tacit.l1()])
    ]
    with pytest.raises(tacit.InputError, match="not independent"):
        fits[0].difference(fits[1])
