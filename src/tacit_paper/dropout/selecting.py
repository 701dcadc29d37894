"""Rows of the dropout figure, selected and averaged."""

from collections.abc import Sequence

from tacit_paper import Table, plots


def select(rows: Table, **values: object) -> Table:
    """Rows whose columns have these values."""
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def has_columns(rows: Table, *names: str) -> bool:
    """Whether rows have a value in every one of these columns; those of other versions may not."""
    return all(name in rows and rows[name].notna().any() for name in names)


def architectures(rows: Table) -> list[tuple[int, int]]:
    """Depths and widths of the paper's networks that were trained, sorted."""
    models = select(rows, kind="model")
    return sorted({(int(d), int(w)) for d, w in zip(models.depth, models.width, strict=True)})


def medians_by_rate(rows: Table, shape: tuple[int, int]) -> Table:
    """Medians over seeds of all numbers of an architecture's networks, by rate."""
    depth, width = shape
    networks = select(rows, kind="model", depth=depth, width=width)
    return networks.groupby("rate").median(numeric_only=True)


def means_and_intervals(
    rows: Table, column: str, rates: Sequence[float] | None = None
) -> tuple[list[float], list[float], list[list[float]]]:
    """Rates, means over networks, and how far 95 % intervals reach below and above them.

    The intervals are Student's, over networks that differ in start, batches and masks. Rates
    without a value are left out or, if `rates` are passed, have NaN.
    """
    groups = {
        rate: group[column].tolist() for rate, group in rows[rows[column].notna()].groupby("rate")
    }
    chosen = list(groups) if rates is None else list(rates)
    means, errors = [], []
    for rate in chosen:
        values = groups.get(rate, [float("nan")])
        means.append(sum(values) / len(values))
        low, high = plots.interval(values)
        errors.append([means[-1] - low, high - means[-1]])
    return chosen, means, [list(side) for side in zip(*errors, strict=True)]
