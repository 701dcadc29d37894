"""The key numbers of `early_stopping`, from its rows alone."""

from collections.abc import Iterator

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within
from tacit_paper.early_stopping_plot import spread


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones."""
    parts = (_identity, _fixed, _diagonal, _variable, _trace)
    return [found for part in parts for found in part(rows)]


def _pick(rows: Table, panel: str, series: str) -> Table:
    return rows[(rows.panel == panel) & (rows.series == series)]


def _identity(rows: Table) -> Iterator[Check]:
    largest = _pick(rows, "identity", "half-MSE step").value.max()
    yield at_most("identity: largest distance of minimiser and iterate", largest, 1e-12)
    least = _pick(rows, "identity", "MSE step").value.min()
    yield at_least("identity: least distance with a step on the full MSE", least, 1e-5)
    norm = _pick(rows, "A", "theory matrix").value.pow(2).sum() ** 0.5
    yield within("A: Frobenius norm of Λ(500)", norm, 0.02609, 0.02611)


def _fixed(rows: Table) -> Iterator[Check]:
    for series, bound in (("float64", 1e-11), ("float32", 1e-3)):
        enough = _pick(rows, "B", series).query("m >= 10").value.max()
        yield at_most(f"B: largest error at m ≥ 10, {series}", enough, bound)
    fixed = _pick(rows, "B", "float64")
    yield at_least("B: error at m = 9, mean over pools", spread(fixed).loc[9, "mean"], 0.25)
    off = (fixed["rank"] - fixed.rank_expected).abs().max()
    yield at_most("B: rank differs from mp − m(m−1)/2 by", off, 0)


def _diagonal(rows: Table) -> Iterator[Check]:
    sets = _pick(rows, "C", "dataset")
    unique = sets.verdict == "strongly convex"
    error = sets.value[unique].max()
    yield at_most("C: largest retraining error where a minimum exists", error, 1e-12)
    yield within("C: share with a negative entry", (sets.least_entry < 0).mean(), 0.69, 0.85)
    yield within("C: share without a minimum (flagged)", (~unique).mean(), 0, 0.05)


def _variable(rows: Table) -> Iterator[Check]:
    stops = _pick(rows, "D", "min_delta stops").t
    yield within("D: median stop with min_delta 0.001", stops.median(), 456, 486)
    means = spread(_pick(rows, "D", "min_delta"))["mean"]
    for m, low, high in ((1, 0.9, 1.0), (10, 0.25, 0.35), (100, 0.10, 0.15)):
        yield within(f"D: error at m = {m}, mean over pools", means[m], low, high)
    capped = (_pick(rows, "D", "text float64 stops").t == 2000).mean()
    yield at_least("D: share that never stops as the text says, float64", capped, 0.9)
    early = _pick(rows, "D", "text float32 stops").t.median()
    yield within("D: median stop as the text says, float32", early, 930, 990)


def _trace(rows: Table) -> Iterator[Check]:
    scalar = _pick(rows, "E", "scalar")
    gap = (scalar.value / scalar.rayleigh - 1).abs().max()
    yield at_most("E: largest relative gap to the Rayleigh quotient", gap, 1e-9)
    ratio = (scalar.value / scalar["trace"]).set_axis(scalar.t)
    for t, expected in ((100, 0.98), (500, 0.895), (1000, 0.81)):
        low, high = expected - 0.005, expected + 0.005
        yield within(f"E: strength over tr(Λ)/p at t = {t}", ratio[t], low, high)
    times = (scalar.adam_seconds / scalar.exact_seconds).median()
    yield at_least("E: Adam's time over the exact fit's, median", times, 1)
