"""Key numbers of the early-stopping figure, computed only from its rows."""

from collections.abc import Iterator

from tacit_paper import Check, Table, plots
from tacit_paper.checking import at_least, at_most, within


def check(rows: Table) -> list[Check]:
    """Key numbers beside their expected values."""
    panels = (_check_theory, _check_fixed, _check_diagonal, _check_variable, _check_scalar)
    return [number for check_panel in panels for number in check_panel(rows)]


def mean_over_pools(rows: Table) -> Table:
    """Mean over pools for every m, with its 95 % confidence interval (Student's t)."""
    values = rows.groupby(rows.m.astype(int)).value
    intervals = values.agg(lambda pools: plots.interval(pools.tolist()))
    return values.agg(["mean"]).assign(
        low=[low for low, _ in intervals], high=[high for _, high in intervals]
    )


def select_series(rows: Table, panel: str, series: str) -> Table:
    """Rows of one series of a panel."""
    return rows[(rows.panel == panel) & (rows.series == series)]


def _check_theory(rows: Table) -> Iterator[Check]:
    largest = select_series(rows, "identity", "half-MSE step").value.max()
    yield at_most("identity: largest distance of minimiser and iterate", largest, 1e-12)
    smallest = select_series(rows, "identity", "MSE step").value.min()
    yield at_least("identity: smallest distance with a step on the full MSE", smallest, 1e-5)
    norm = select_series(rows, "A", "theory matrix").value.pow(2).sum() ** 0.5
    yield within("A: Frobenius norm of Λ(500)", norm, 0.02609, 0.02611)


def _check_fixed(rows: Table) -> Iterator[Check]:
    for series, bound in (("float64", 1e-11), ("float32", 1e-3)):
        error = select_series(rows, "B", series).query("m >= 10").value.max()
        yield at_most(f"B′: largest error at m ≥ 10, {series}", error, bound)
    fixed = select_series(rows, "B", "float64")
    error_at_nine = mean_over_pools(fixed).loc[9, "mean"]
    yield at_least("B′: error at m = 9, mean over pools", error_at_nine, 0.25)
    difference = (fixed["rank"] - fixed.rank_expected).abs().max()
    yield at_most("B′: difference of the rank from mp − m(m−1)/2", difference, 0)


def _check_diagonal(rows: Table) -> Iterator[Check]:
    datasets = select_series(rows, "C", "dataset")
    has_minimum = datasets.verdict == "strongly convex"
    error = datasets.value[has_minimum].max()
    yield at_most("C: largest retraining error where a minimum exists", error, 1e-12)
    yield within("C: share with a negative entry", (datasets.least_entry < 0).mean(), 0.69, 0.85)
    yield within("C: share without a minimum (flagged)", (~has_minimum).mean(), 0, 0.05)


def _check_variable(rows: Table) -> Iterator[Check]:
    stops = select_series(rows, "D", "min_delta stops").t
    yield within("D: median stop with min_delta 0.001", stops.median(), 456, 486)
    means = mean_over_pools(select_series(rows, "D", "min_delta"))["mean"]
    for m, low, high in ((1, 0.9, 1.0), (10, 0.25, 0.35), (100, 0.10, 0.15)):
        yield within(f"D: error at m = {m}, mean over pools", means[m], low, high)
    capped = (select_series(rows, "D", "text float64 stops").t == 2000).mean()
    yield at_least("D: share that never stops by the text's rule, float64", capped, 0.9)
    median = select_series(rows, "D", "text float32 stops").t.median()
    yield within("D: median stop by the text's rule, float32", median, 930, 990)


def _check_scalar(rows: Table) -> Iterator[Check]:
    scalar = select_series(rows, "E", "scalar")
    gap = (scalar.value / scalar.rayleigh - 1).abs().max()
    yield at_most("E: largest relative gap to the Rayleigh quotient", gap, 1e-9)
    ratio = (scalar.value / scalar["trace"]).set_axis(scalar.t)
    for t, expected in ((100, 0.98), (500, 0.895), (1000, 0.81)):
        low, high = expected - 0.005, expected + 0.005
        yield within(f"E: strength over tr(Λ)/p at t = {t}", ratio[t], low, high)
    speedup = (scalar.adam_seconds / scalar.exact_seconds).median()
    yield at_least("E: Adam's time over the exact fit's, median", speedup, 1)
