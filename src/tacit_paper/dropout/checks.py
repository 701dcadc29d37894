"""Key numbers of the dropout figure, computed from its rows."""

from collections.abc import Iterator
from itertools import product

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within


def select_models(rows: Table) -> Table:
    """Rows of trained networks."""
    return rows[rows.kind == "model"]


def select_effects(rows: Table, weights: str) -> Table:
    """Rows of the marginal effect of dropout at the `best` or at the `last` weights."""
    return rows[(rows.kind == "effect") & (rows.weights == weights)]


def select_architecture(rows: Table, depth: int, width: int) -> Table:
    """Rows of one architecture."""
    return rows[(rows.depth == depth) & (rows.width == width)]


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the architectures that were run."""
    return [
        *_check_total_effect(rows),
        *_check_marginal_effect(rows),
        *_check_explicit_dropout(rows),
        *_check_retraining(rows),
    ]


def _check_total_effect(rows: Table) -> Iterator[Check]:
    by_rate = select_architecture(select_models(rows), 3, 256).groupby("rate")
    medians = by_rate.median(numeric_only=True)
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
    effects = rows[rows.kind == "effect"]
    if (effects.width >= 128).any():
        yield at_most("marginal effect: highest noise of the masks", effects.noise.max(), 0.05)
        strength = select_effects(rows, "last").l2_strength.max()
        yield at_most("marginal effect, last weights: highest ridge strength", strength, 0)
        explained = effects.l2_explained.max()
        yield at_most("marginal effect: highest fraction explained by ridge", explained, 0.02)


def _check_explicit_dropout(rows: Table) -> Iterator[Check]:
    for (rate, bound), weights in product(((0.05, 0.65), (0.1, 0.40)), ("best", "last")):
        effects = select_architecture(select_effects(rows, weights), 3, 512)
        medians = effects[effects.rate == rate].median(numeric_only=True)
        if medians.notna().any():
            label = f"3×512, q = {rate:g}, {weights} weights: explicit dropout"
            yield at_least(
                f"{label}, explained fraction", medians.explicit_dropout_explained, bound
            )
            ratio = medians.explicit_dropout_strength / medians.theory
            yield within(f"{label}, coefficient over q/(1−q)", ratio, 0.85, 1.15)


def _check_retraining(rows: Table) -> Iterator[Check]:
    retrained = rows[rows.kind == "retrained"]
    if len(retrained):
        distances = retrained.pivot_table(
            index="rate", columns="penalty", values="prediction_distance"
        )
        ratio = (distances["explicit"] / distances[["ridge", "nothing"]].min(axis=1)).max()
        label = "retrained: distance with explicit dropout over the next smallest, highest"
        yield at_most(label, ratio, 1)
