"""Key numbers of dropout by moments, computed from the rows."""

from collections.abc import Iterator

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within
from tacit_paper.dropout.selecting import select

EXPLAINED = {
    ("paper", 3, 256, 0.1): 0.85,
    ("paper", 3, 256, 0.3): 0.85,
    ("paper", 3, 256, 0.5): 0.85,
    ("every layer", 3, 256, 0.1): 0.93,
    ("every layer", 3, 256, 0.3): 0.93,
    ("every layer", 3, 256, 0.5): 0.80,
    ("every layer", 3, 512, 0.5): 0.88,
    ("every layer", 5, 128, 0.1): 0.90,
    ("every layer", 5, 128, 0.3): 0.75,
}
"""Fractions that dropout by moments is to explain, as means over seeds, of these networks."""
SETTINGS = {"paper": "paper's network", "every layer": "dropout after every layer"}


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the networks that were run."""
    return [*_check_moments(rows), *_check_retraining(rows)]


def _check_moments(rows: Table) -> Iterator[Check]:
    for (kind, depth, width, rate), bound in EXPLAINED.items():
        networks = select(rows, kind=kind, depth=depth, width=width, rate=rate)
        if not len(networks):
            continue
        label = f"{SETTINGS[kind]}, {depth}×{width}, q = {rate:g}: dropout by moments"
        explained = networks.dropout_moments_explained.mean()
        yield at_least(f"{label}, explained fraction", explained, bound)
        if depth == 3 and rate <= 0.3:
            strength = networks.dropout_moments_strength.mean()
            yield within(f"{label}, coefficient", strength, 0.7, 1.3)
    fitted = rows[rows.kind.isin(SETTINGS)]
    if fitted.width.max() >= 128:
        label = "fraction explained by moments over that of second order, lowest over networks"
        means = fitted.groupby(["kind", "depth", "width", "rate"]).mean(numeric_only=True)
        ratio = means.dropout_moments_explained / means.explicit_dropout_explained
        yield at_least(label, ratio.min(), 1)


def _check_retraining(rows: Table) -> Iterator[Check]:
    retrained = select(rows, kind="retrained")
    if retrained.width.max() < 128:
        return
    divergences = retrained.pivot_table("divergence", index="rate", columns="penalty")
    second_order = divergences[["explicit", "explicit, estimated"]].min(axis=1)
    others = divergences[["ridge", "published ridge", "nothing"]].min(axis=1)
    label = "retrained: KL with second order over the smallest of ridge and nothing, highest"
    yield at_most(label, (second_order / others).max(), 1)
    label = "retrained: KL with dropout by moments over the smallest of second order, highest"
    yield at_most(label, (divergences.moments / second_order).max(), 1)
