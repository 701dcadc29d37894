"""What the paper says about dropout, with verdicts computed from the figure's rows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tacit_paper import Claim, Evidence, Table
from tacit_paper.dropout.selecting import architectures, medians_by_rate, select

DEPTHS = (3, 5)
"""The paper's numbers of hidden layers."""


def spearman(networks: Table, column: str) -> float:
    """Rank correlation of the dropout rate with a column, over all networks."""
    return float(networks[["rate", column]].corr("spearman").iloc[0, 1])


def rises(rows: Table, column: str) -> list[bool]:
    """For each architecture, whether the median over seeds never falls with the rate."""
    medians = (medians_by_rate(rows, shape)[column] for shape in architectures(rows))
    return [bool(values.is_monotonic_increasing) for values in medians]


def has_sweep(rows: Table) -> bool:
    """Whether the rows hold both of the paper's depths at several widths and rates."""
    shapes = architectures(rows)
    widths = [[w for d, w in shapes if d == depth] for depth in DEPTHS]
    return min(map(len, widths)) > 1 and select(rows, kind="model").rate.nunique() > 2


def _needs_sweep(measure: Callable[[Table], Evidence]) -> Callable[[Table], Evidence | None]:
    """No evidence from rows of a small preset."""
    return lambda rows: measure(rows) if has_sweep(rows) else None


def _by_depth(rows: Table, measure: Callable[[Table], Any]) -> dict[int, list[Any]]:
    """A number of each architecture's networks, from narrow to wide, for each depth."""
    models = select(rows, kind="model")
    return {
        depth: [
            measure(select(models, depth=depth, width=width))
            for d, width in architectures(rows)
            if d == depth
        ]
        for depth in DEPTHS
    }


def _list(values: list[float], form: str) -> str:
    return ", ".join(format(value, form).replace("-", "−") for value in values)


@_needs_sweep
def _rise(rows: Table) -> Evidence:
    ranks = _by_depth(rows, lambda networks: spearman(networks, "total_l2"))
    shallow, deep = ranks[3], ranks[5]
    highest = [medians_by_rate(rows, s).total_explained.iloc[-1] for s in _of_depth(rows, 5)]
    return Evidence(
        f"exact λ̂ with rate: Spearman {_list(shallow, '.2f')} (depth 3), {_list(deep, '+.2f')} "
        f"(depth 5, explaining ≤ {100 * max(highest):.2f} % at the highest rate)",
        max(shallow) < -0.2
        and min(deep) > 0.2
        and max(highest) < 0.005
        and not any(rises(rows, "total_l2")),
    )


@_needs_sweep
def _magnitude(rows: Table) -> Evidence:
    ratios = [
        ratio
        for shape in architectures(rows)
        for ratio in _published_over_exact(medians_by_rate(rows, shape))
    ]
    return Evidence(
        f"the published fit ends {min(ratios):.3g} to {max(ratios):.3g} times above the exact λ̂",
        min(ratios) > 10,
    )


def _published_over_exact(medians: Table) -> list[float]:
    return (medians.published_l2 / medians.total_l2).tolist()


@_needs_sweep
def _published_rise(rows: Table) -> Evidence:
    ranks = _by_depth(rows, lambda networks: spearman(networks, "published_l2"))
    monotone, lowest = rises(rows, "published_l2"), min(map(min, ranks.values()))
    highest = max(map(max, ranks.values()))
    return Evidence(
        f"published fit, rerun: Spearman {lowest:.2f} to {highest:.2f}; medians monotone in "
        f"{sum(monotone)} of {len(monotone)}",
        lowest > 0.2 and 0 < sum(monotone) < len(monotone),
    )


@_needs_sweep
def _width(rows: Table) -> Evidence:
    first = {
        depth: [medians_by_rate(rows, shape).total_l2.iloc[0] for shape in _of_depth(rows, depth)]
        for depth in DEPTHS
    }
    falls = all(
        medians_by_rate(rows, wide).total_l2.lt(medians_by_rate(rows, narrow).total_l2).all()
        for depth in DEPTHS
        for narrow, wide in pairwise(_of_depth(rows, depth))
    )
    shallow, deep = (_list([1e6 * value for value in first[depth]], ".2g") for depth in DEPTHS)
    return Evidence(
        f"exact λ̂·10⁶ by width at q = 0: {shallow} (depth 3), {deep} (depth 5)",
        falls,
    )


def _of_depth(rows: Table, depth: int) -> list[tuple[int, int]]:
    return [shape for shape in architectures(rows) if shape[0] == depth]


@_needs_sweep
def _narrow(rows: Table) -> Evidence:
    changes = _by_depth(rows, _change_of_exact)
    shallow, deep = (_list([1e6 * value for value in changes[d]], "+.2g") for d in DEPTHS)
    return Evidence(
        f"rise of exact λ̂·10⁶ to the highest rate by width: {shallow}; {deep}",
        all(changes[depth][0] < max(changes[depth]) for depth in DEPTHS),
    )


def _change_of_exact(networks: Table) -> float:
    medians = networks.groupby("rate").total_l2.median()
    return float(medians.iloc[-1] - medians.iloc[0])


def _weight_decay(rows: Table) -> Evidence | None:
    effects = select(rows, kind="effect")
    if not has_sweep(rows) or not len(effects):
        return None
    ridge, best = effects.l2_explained.max(), select(effects, weights="best")
    by_network = best.groupby(["depth", "width", "rate"]).explicit_dropout_explained.mean()
    return Evidence(
        f"ridge explains at most {100 * ridge:.1f} % of what dropout adds; explicit dropout up "
        f"to {100 * by_network.max():.0f} %",
        bool(ridge < 0.02 and by_network.max() > 0.5),
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "The estimated ℓ₂ penalty increases monotonically with dropout rate across all "
        "architectures.",
        "Figure 5; Sec. 3, Dropout; contributions",
        "artefact",
        _rise,
        "At depth 3 the exact strength falls; at depth 5 it rises less, and as a penalty that "
        "explains next to nothing.",
        headline=True,
    ),
    Claim(
        "As fitted by the authors' procedure, λ̂ rises with the dropout rate.",
        "Figure 5",
        "holds with a caveat",
        _published_rise,
        "The rerun rises in every architecture, but not at every step.",
    ),
    Claim(
        "Dropout networks have ridge strengths λ̂ of about 10⁻⁴ to 10⁻³.",
        "Figure 5",
        "artefact",
        _magnitude,
        "Adam on log λ from λ = 1 stops before it converges.",
    ),
    Claim(
        "For wider networks, the absolute magnitude of the estimated penalty decreases.",
        "Sec. 3, Dropout",
        "holds",
        _width,
        headline=True,
    ),
    Claim(
        "The effect is most pronounced for narrower networks.",
        "Sec. 3, Dropout",
        "artefact",
        _narrow,
        "The narrowest network's exact strength has the largest rise at neither depth.",
    ),
    Claim(
        "Dropout acts as adaptive weight decay, with implicit ℓ₂ effects.",
        "Abstract; Figure 5",
        "artefact",
        _weight_decay,
        "What dropout adds is a penalty on activations, not on weights.",
        headline=True,
    ),
)
