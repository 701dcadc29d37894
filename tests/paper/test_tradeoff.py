"""The trade-off figure: its claims, from rows in closed form."""

import pandas as pd
import pytest
from support.experiments import run
from support.pages import ROOT

from tacit_paper import tradeoff


def test_claims_rest_on_their_rows():
    for rows in (
        pd.DataFrame(list(run(tradeoff, tradeoff.QUICK))),
        pd.read_parquet(ROOT / "results/paper/tradeoff/rows.parquet"),
    ):
        balance, strength = tradeoff.CLAIMS
        assert balance.measure(rows).agrees
        assert strength.measure(rows).agrees
        assert not balance.measure(rows.assign(loss_gradient=-rows.loss_gradient)).agrees
        assert not strength.measure(rows.assign(estimated=2 * rows.estimated)).agrees
        assert all(result.holds for result in tradeoff.check(rows))


def test_the_gradients_are_those_of_the_drawn_curves():
    """Central differences of the curves, whose values are quadratic in θ."""
    rows = pd.DataFrame(list(run(tradeoff, tradeoff.QUICK)))
    curves, (optimum,) = rows[rows.unit == "curves"], rows[rows.unit == "estimate"].itertuples()
    for name in ("loss", "penalty"):
        low, middle, high = (curves.iloc[k] for k in (10, 40, 70))
        left = (middle[name] - low[name]) / (middle.theta - low.theta)
        right = (high[name] - middle[name]) / (high.theta - middle.theta)
        curvature = 2 * (right - left) / (high.theta - low.theta)
        slope = left + curvature * (optimum.theta - (low.theta + middle.theta) / 2)
        assert slope == pytest.approx(getattr(optimum, f"{name}_gradient"), rel=1e-5)
