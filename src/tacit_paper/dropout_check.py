"""The key numbers of `dropout`, from its rows alone."""

from collections.abc import Iterator
from itertools import product

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within


def models(rows: Table) -> Table:
    """Rows of trained networks."""
    return rows[rows.kind == "model"]


def effects(rows: Table, weights: str) -> Table:
    """Rows of dropout's own effect at the best or at the last weights."""
    return rows[(rows.kind == "effect") & (rows.weights == weights)]


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the architectures that were run."""
    return [found for part in (_total, _marginal, _explicit, _retrained) for found in part(rows)]


def _cells(rows: Table, depth: int, width: int) -> Table:
    return rows[(rows.depth == depth) & (rows.width == width)]


def _total(rows: Table) -> Iterator[Check]:
    found = _cells(models(rows), 3, 256).groupby("rate").median(numeric_only=True)
    if not len(found):
        return
    yield within(
        "3×256: exact ridge strength, least over rates", found.total_l2.min(), 3.3e-5, 4.8e-5
    )
    yield within(
        "3×256: exact ridge strength, most over rates", found.total_l2.max(), 3.3e-5, 4.8e-5
    )
    yield at_most("3×256: explained by ridge at rate .5", found.total_explained.iloc[-1], 0.02)
    larger = (found.published_l2 / found.total_l2).min()
    yield at_least("3×256: published over exact strength, least over rates", larger, 10)


def _marginal(rows: Table) -> Iterator[Check]:
    found = rows[rows.kind == "effect"]
    if (found.width >= 128).any():
        yield at_most("marginal: noise of the masks, most", found.noise.max(), 0.05)
        last = effects(rows, "last").l2_strength.max()
        yield at_most("marginal, last weights: ridge strength, most", last, 0)
        yield at_most("marginal: explained by ridge, most", found.l2_explained.max(), 0.02)


def _explicit(rows: Table) -> Iterator[Check]:
    for (rate, least), weights in product(((0.05, 0.65), (0.1, 0.40)), ("best", "last")):
        cells = _cells(effects(rows, weights), 3, 512)
        found = cells[cells.rate == rate].median(numeric_only=True)
        if found.notna().any():
            row = found
            label = f"3×512, q = {rate:g}, {weights} weights: explicit dropout"
            yield at_least(f"{label} explains", row.explicit_dropout_explained, least)
            ratio = row.explicit_dropout_strength / row.theory
            yield within(f"{label}, coefficient over q/(1−q)", ratio, 0.85, 1.15)


def _retrained(rows: Table) -> Iterator[Check]:
    again = rows[rows.kind == "retrained"]
    if not len(again):
        return
    table = again.pivot_table(index="rate", columns="penalty", values="prediction_distance")
    closer = (table["explicit"] / table[["ridge", "nothing"]].min(axis=1)).max()
    yield at_most("retrained: explicit's distance over the next best, most", closer, 1)
