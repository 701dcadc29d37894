"""Key numbers of the dropout figure, computed from its rows."""

from collections.abc import Iterator
from itertools import pairwise, product

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within
from tacit_paper.dropout.claims import has_sweep
from tacit_paper.dropout.selecting import architectures, medians_by_rate, select


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the architectures that were run."""
    return [
        *_check_published_statements(rows),
        *_check_total_effect(rows),
        *_check_marginal_effect(rows),
        *_check_explicit_dropout(rows),
    ]


def _check_published_statements(rows: Table) -> Iterator[Check]:
    """What the paper says of every architecture: λ̂ rises with the rate, and falls with width."""
    if not has_sweep(rows):
        return
    for depth, width in architectures(rows):
        medians = medians_by_rate(rows, (depth, width))
        for column, name in (("published_l2", "published"), ("total_l2", "exact")):
            falls = int((medians[column].diff() < 0).sum())
            label = f"{depth}×{width}: steps of the rate at which the {name} λ̂ falls"
            yield at_most(label, falls, 0, tests="protocol")
        ratio = (medians.published_l2 / medians.total_l2).min()
        yield at_least(f"{depth}×{width}: published over exact λ̂, lowest over rates", ratio, 10)
    for narrow, wide in pairwise(architectures(rows)):
        if narrow[0] == wide[0]:
            ratios = medians_by_rate(rows, wide).total_l2 / medians_by_rate(rows, narrow).total_l2
            label = f"exact λ̂ of {wide[0]}×{wide[1]} over {narrow[0]}×{narrow[1]}, highest"
            yield at_most(label, ratios.max(), 1, tests="protocol")


def _check_total_effect(rows: Table) -> Iterator[Check]:
    medians = medians_by_rate(rows, (3, 256))
    if not len(medians):
        return
    strengths = medians.total_l2
    yield within("3×256: exact ridge strength, lowest over rates", strengths.min(), 3.3e-5, 4.8e-5)
    yield within("3×256: exact ridge strength, highest over rates", strengths.max(), 3.3e-5, 4.8e-5)
    shapes = architectures(rows)
    explained = max(medians_by_rate(rows, shape).total_explained.iloc[-1] for shape in shapes)
    yield at_most("fraction explained by ridge at rate 0.5, highest", explained, 0.02)


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
