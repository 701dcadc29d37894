"""What the paper says about gradient step sizes, and what decides it."""

from collections.abc import Iterator
from itertools import combinations

from tacit_paper import Claim, Evidence, Table
from tacit_paper.step_size.checks import FITTED, SMALL_ETA, select_networks, select_trained


def _measure_recovery(rows: Table) -> Evidence | None:
    trained = select_trained(rows)
    first, second = trained.ratio_first, trained.ratio_second[trained.eta <= SMALL_ETA]
    if not len(second):
        return None
    worst = float((second - 1).abs().max())
    text = (
        f"λ̂/(ηp/4) = {first.min():.2f} to {first.max():.2f}; with the flow's next term within "
        f"{100 * worst:.1f} % for η ≤ {SMALL_ETA:g}"
    )
    agrees = bool(first.between(0.5, 1.02).all() and first.min() < 0.95 and worst <= 0.02)
    return Evidence(text, agrees)


def _measure_relationships(rows: Table) -> Evidence | None:
    trained = select_trained(rows)
    up, pairs = count_rises(trained[trained.train_accuracy >= FITTED])
    if pairs < 6:
        return None
    with_gradient = _rank_correlation(trained, "r_ig")
    with_accuracy = _rank_correlation(trained, "test_accuracy")
    text = (
        f"rank correlation with λ̂: R_IG {_signed(with_gradient)}, accuracy "
        f"{_signed(with_accuracy)}; where fitted, accuracy rises in {up} of {pairs} pairs"
    )
    return Evidence(text, with_gradient < -0.4 and with_accuracy > 0.4 and up / pairs < 0.8)


def _measure_exclusions(rows: Table) -> Evidence | None:
    networks, trained = select_networks(rows), select_trained(rows)
    etas = [eta for eta in sorted(networks.eta.unique()) if not (trained.eta == eta).any()]
    if not etas:
        return None
    text = (
        f"{len(networks) - len(trained)} of {len(networks)} networks excluded, among them all "
        f"with η ≤ {max(etas):g}"
    )
    return Evidence(text, bool(len(trained) / len(networks) > 0.5 and max(etas) < SMALL_ETA))


def count_rises(networks: Table) -> tuple[int, int]:
    """Pairs of one width whose test accuracy is higher at the larger λ̂, and all pairs."""
    rises = list(_rises(networks))
    return sum(rises), len(rises)


def _rises(networks: Table) -> Iterator[bool]:
    for _, width in networks.sort_values("lambda_hat").groupby("width"):
        for smaller, larger in combinations(width.test_accuracy, 2):
            yield bool(larger > smaller)


def _rank_correlation(trained: Table, column: str) -> float:
    return float(trained.lambda_hat.corr(trained[column], method="spearman"))


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


CLAIMS = (
    Claim(
        "The strength λ̂ estimated from trajectory deviations recovers the analytic value ηp/4.",
        "Figure 6",
        "holds with a caveat",
        _measure_recovery,
        "The analytic value is the first order in η; the rest of the ratio is the next order.",
    ),
    Claim(
        "Stronger implicit gradient regularization goes with smaller squared gradients and higher "
        "test accuracy.",
        "Sec. 3, Gradient step size",
        "holds with a caveat",
        _measure_relationships,
        "λ̂ grows with η and p, and larger steps also train further in 50 epochs; among networks "
        "that fit the training set, accuracy does not follow λ̂.",
    ),
    Claim(
        "Runs that do not reach 90 % on the training set are excluded.",
        "App. H",
        "holds with a caveat",
        _measure_exclusions,
        "The exclusions are not few: they remove whole step sizes from the figure.",
    ),
)
