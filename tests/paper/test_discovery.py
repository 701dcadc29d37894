"""The discovery figure: its curves, checks and drawing."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.experiments import run

from tacit_paper import discovery
from tacit_paper.discovery.checks import check, largest_error
from tacit_paper.discovery.panels import PANELS

TINY = replace(discovery.QUICK, replicates=2)


def laws(names=tuple(PANELS)):
    """Rows in which every curve is its law."""
    rows = []
    for name in names:
        for x in torch.linspace(-0.9, 0.9, 60).tolist():
            law = PANELS[name].law(x)
            numbers = {"derivative": law, "low": law, "high": law, "law": law}
            whole = {"explained": 1.0, "ridge": 0.7, "exponent": 1.5, "problems": ""}
            rows.append({"panel": name, "kind": "curve", "x": x, "knot": True, **numbers, **whole})
        rows.append({"panel": name, "kind": "weight", "x": 0.1, **whole})
    return pd.DataFrame(rows)


def test_a_panel_finds_its_law_and_leaves_the_random_state():
    state = torch.random.get_rng_state()
    others = [name for name in PANELS if name != "power law"]
    rows = pd.DataFrame(list(run(discovery, TINY, finished=others)))
    assert torch.equal(state, torch.random.get_rng_state())
    assert largest_error(rows, "power law") < 0.05
    assert rows.exponent.iloc[0] == pytest.approx(1.5, abs=0.01)
    assert set(rows.problems) == {""}


def test_the_checks_hold_for_the_laws_and_not_for_other_curves(tmp_path):
    rows = laws()
    assert [result.label for result in check(rows) if not result.holds] == []
    wrong = rows.assign(derivative=rows.x, exponent=2.0, ridge=0.9, problems="weak")
    wrong_labels = [result.label for result in check(wrong) if not result.holds]
    assert len(wrong_labels) >= 8
    discovery.plot(rows).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_units_are_the_panels_and_laws_are_odd():
    assert list(discovery.work(discovery.QUICK, "cpu")) == list(PANELS)
    for panel in PANELS.values():
        assert panel.law(0.3) == pytest.approx(-panel.law(-0.3))
        assert panel.law(0.3) > 0
    assert PANELS["diagonal network"].law(0.02) == pytest.approx(math.asinh(1) / 4)
