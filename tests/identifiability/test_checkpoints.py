"""Strengths that still change over the last checkpoints of a run are reported as drifting."""

import pytest
import torch
from support.systems import draw, equations

import tacit
from tacit.fitting.drift import fit_trend
from tacit.identifiability import drift


def fits_over_time(strengths, times=None):
    """Fits of one exact column, by time."""
    column = draw(13, 30, 1)
    times = range(len(strengths)) if times is None else times
    pairs = zip(times, strengths, strict=True)
    return {time: tacit.fit(equations(column, s * column[:, 0])) for time, s in pairs}


def test_a_strength_that_still_changes_over_checkpoints_is_drifting():
    noise = 0.01 * draw(14, 12)
    fits = fits_over_time([1 + 0.05 * t + float(n) for t, n in enumerate(noise)])
    result = drift(fits, last=10)
    assert result.times == tuple(range(2, 12))
    (problem,) = result.problems
    assert (problem.kind, problem.names) == ("drifting", ("r0",))
    assert "over the last 10 checkpoints" in problem.message
    assert result.change["r0"] == pytest.approx(0.45 / 1.325, rel=0.1)
    assert result.t["r0"] > 10


def test_scatter_small_trends_and_constants_are_not_drifting():
    noise = 0.01 * draw(14, 12)
    assert not drift(fits_over_time([1 + float(n) for n in noise])).problems
    assert not drift(fits_over_time([1 + 0.005 * t for t in range(12)])).problems
    assert drift(fits_over_time([2.0] * 8)).t == {"r0": 0}


def test_the_trend_is_over_the_times_whatever_their_order():
    times = [1, 2, 3, 5, 8, 13, 21, 34]
    backwards = dict(reversed(fits_over_time([0.1 * t for t in times], times).items()))
    result = drift(backwards)
    assert result.first["r0"] == pytest.approx(0.1)
    assert result.last["r0"] == pytest.approx(3.4)
    assert result.change["r0"] == pytest.approx(3.3 / (0.1 * sum(times) / 8))


def test_correlated_scatter_makes_a_trend_less_certain():
    waves = [1 + 0.1 * float(torch.sin(torch.tensor(0.6 * t))) for t in range(12)]
    fits = fits_over_time(waves)
    result = drift(fits, last=12)
    strengths = torch.tensor([fit.strengths["r0"] for fit in fits.values()]).double()
    independent = fit_trend(torch.arange(12).double(), strengths[:, None])
    assert abs(result.t["r0"]) <= abs(float(independent.change / independent.error))
    assert not result.problems


def test_wrong_calls_are_refused():
    other = {9: tacit.fit(equations(draw(1, 30, 2), draw(2, 30)))}
    for fits, options, words in (
        (fits_over_time([1.0] * 5), {}, "5 checkpoints"),
        (fits_over_time([1.0] * 9), {"last": 4}, "at least 8"),
        ([1.0], {}, "dictionary"),
        (fits_over_time([1.0] * 8, "abcdefgh"), {}, "a time of fits is 'a': pass a finite number"),
        (dict.fromkeys(range(8), 1.0), {}, "the fit at time 0 is 1.0"),
        (fits_over_time([1.0] * 9) | other, {}, "same regularizers"),
    ):
        with pytest.raises(tacit.InputError, match=words):
            drift(fits, **options)
