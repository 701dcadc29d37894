"""Key numbers of the dropout figure, computed from its rows."""

from collections.abc import Iterator
from itertools import pairwise, product

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within
from tacit_paper.dropout.claims import has_sweep
from tacit_paper.dropout.selecting import architectures, has_columns, medians_by_rate, select

EVERY_LAYER = {
    (3, 256, 0.1): 0.93,
    (3, 256, 0.3): 0.93,
    (3, 256, 0.5): 0.80,
    (3, 512, 0.5): 0.88,
    (5, 128, 0.1): 0.90,
    (5, 128, 0.3): 0.75,
}
"""Fractions that dropout by moments is to explain with dropout after every hidden layer."""


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the architectures that were run."""
    return [
        *_check_published_statements(rows),
        *_check_total_effect(rows),
        *_check_marginal_effect(rows),
        *_check_explicit_dropout(rows),
        *_check_moments(rows),
        *_check_every_layer(rows),
        *_check_retraining(rows),
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


def _moments_means(rows: Table, kind: str, depth: int, width: int, rate: float) -> Table | None:
    """Means over seeds of dropout by moments for one network; None if it was not fitted."""
    network = {"depth": depth, "width": width, "rate": rate, "weights": "best"}
    networks = select(rows, kind=kind, **network)
    if not has_columns(networks, "dropout_moments_explained"):
        return None
    return networks[["dropout_moments_explained", "dropout_moments_strength"]].mean()


def _check_moments(rows: Table) -> Iterator[Check]:
    for rate in (0.1, 0.3, 0.5):
        means = _moments_means(rows, "effect", 3, 256, rate)
        if means is not None:
            label = f"3×256, q = {rate:g}, best weights: dropout by moments, explained fraction"
            yield at_least(label, means.dropout_moments_explained, 0.85)


def _check_every_layer(rows: Table) -> Iterator[Check]:
    for (depth, width, rate), bound in EVERY_LAYER.items():
        means = _moments_means(rows, "every layer", depth, width, rate)
        if means is None:
            continue
        label = f"dropout after all layers, {depth}×{width}, q = {rate:g}: dropout by moments"
        yield at_least(f"{label}, explained fraction", means.dropout_moments_explained, bound)
        if depth == 3 and rate <= 0.3:
            yield within(f"{label}, coefficient", means.dropout_moments_strength, 0.7, 1.3)


def _check_retraining(rows: Table) -> Iterator[Check]:
    retrained = select(rows, kind="retrained")
    if not has_columns(retrained, "divergence") or retrained.width.max() < 128:
        return
    divergences = retrained.pivot_table("divergence", index="rate", columns="penalty")
    if not {"moments", "explicit", "nothing"} <= set(divergences):
        return
    second_order = divergences[[name for name in divergences if name.startswith("explicit")]]
    others = divergences[[name for name in divergences if "ridge" in name or name == "nothing"]]
    label = "retrained: KL with second order over the smallest of ridge and nothing, highest"
    yield at_most(label, (second_order.min(axis=1) / others.min(axis=1)).max(), 1)
    label = "retrained: KL with dropout by moments over second order, highest"
    yield at_most(label, (divergences.moments / second_order.min(axis=1)).max(), 1)
