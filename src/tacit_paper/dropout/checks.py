"""Key numbers of the dropout figure, computed from its rows."""

from collections.abc import Iterator
from itertools import product

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within


def select(rows: Table, **values: object) -> Table:
    """Rows whose columns have these values."""
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the architectures that were run."""
    return [
        *_check_total_effect(rows),
        *_check_marginal_effect(rows),
        *_check_explicit_dropout(rows),
        *_check_retraining(rows),
    ]


def _check_total_effect(rows: Table) -> Iterator[Check]:
    networks = select(rows, kind="model", depth=3, width=256)
    medians = networks.groupby("rate").median(numeric_only=True)
    if not len(medians):
        return
    strengths = medians.total_l2
    yield within("3×256: exact ridge strength, lowest over rates", strengths.min(), 3.3e-5, 4.8e-5)
    yield within("3×256: exact ridge strength, highest over rates", strengths.max(), 3.3e-5, 4.8e-5)
    explained = medians.total_explained.iloc[-1]
    yield at_most("3×256: fraction explained by ridge at rate 0.5", explained, 0.02)
    ratio = (medians.published_l2 / strengths).min()
    yield at_least("3×256: published over exact strength, lowest over rates", ratio, 10)


def _check_marginal_effect(rows: Table) -> Iterator[Check]:
    effects = select(rows, kind="effect")
    if (effects.width >= 128).any():
        yield at_most("marginal effect: highest noise of the masks", effects.noise.max(), 0.05)
        strength = select(effects, weights="last").l2_strength.max()
        yield at_most("marginal effect, last weights: highest ridge strength", strength, 0)
        explained = effects.l2_explained.max()
        yield at_most("marginal effect: highest fraction explained by ridge", explained, 0.02)


def _check_explicit_dropout(rows: Table) -> Iterator[Check]:
    for (rate, bound), weights in product(((0.05, 0.65), (0.1, 0.40)), ("best", "last")):
        network = {"depth": 3, "width": 512, "rate": rate, "weights": weights}
        medians = select(rows, kind="effect", **network).median(numeric_only=True)
        if medians.notna().any():
            label = f"3×512, q = {rate:g}, {weights} weights: explicit dropout"
            explained = medians.explicit_dropout_explained
            yield at_least(f"{label}, explained fraction", explained, bound)
            ratio = medians.explicit_dropout_strength / medians.theory
            yield within(f"{label}, coefficient over q/(1−q)", ratio, 0.85, 1.15)


def _check_retraining(rows: Table) -> Iterator[Check]:
    retrained = select(rows, kind="retrained")
    if len(retrained):
        distances = retrained.pivot_table("prediction_distance", index="rate", columns="penalty")
        ratio = (distances["explicit"] / distances[["ridge", "nothing"]].min(axis=1)).max()
        label = "retrained: distance with explicit dropout over the next smallest, highest"
        yield at_most(label, ratio, 1)
