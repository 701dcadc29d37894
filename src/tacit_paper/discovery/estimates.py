"""Rows of the discovery figure: the curve of every panel beside its law, and some weights."""

import math
from collections.abc import Iterator

import torch

from tacit import Target, fit, l2, stack
from tacit.fitting import Curve
from tacit.regularizers import spline
from tacit_paper import Row
from tacit_paper.discovery.config import Config
from tacit_paper.discovery.panels import PANELS
from tacit_paper.problem_kinds import join_kinds

TICKS = 200
"""Weights that are stored."""


def curve_rows(config: Config, name: str) -> Iterator[Row]:
    """The curve of one panel, with what it and ridge explain, and weights of one replicate."""
    panel = PANELS[name]
    seeds = range(config.first, config.first + config.replicates)
    targets = [panel.make_target(seed) for seed in seeds]
    knots = covering_knots(targets, config.knots, even=panel.even)
    shape = spline(knots, even=panel.even)
    curve_fit = fit(stack([target.equations(shape) for target in targets]))
    ridge = fit(stack([target.equations(l2()) for target in targets]))
    curve = curve_fit.curve()
    band = curve.derivative_intervals["training"]
    whole = {
        "panel": name,
        "explained": curve_fit.explained,
        "ridge": ridge.explained,
        "exponent": exponent(curve),
        "problems": join_kinds(curve_fit.problems),
    }
    for x, derivative, (low, high) in zip(curve.grid, curve.derivative, band, strict=True):
        numbers = {"derivative": derivative, "low": low, "high": high, "law": panel.law(x)}
        yield {**whole, "kind": "curve", "x": x, "knot": abs(x) in knots or x in knots, **numbers}
    weights = torch.cat([p.flatten() for p in targets[0].points[0].params.values()])
    for x in weights[:: math.ceil(len(weights) / TICKS)].tolist():
        yield {**whole, "kind": "weight", "x": x}


def covering_knots(targets: list[Target], count: int, *, even: bool) -> tuple[float, ...]:
    """Knots at quantiles of the weights of all replicates."""
    params = {
        f"{number} {n}": p
        for number, target in enumerate(targets)
        for n, p in target.points[0].params.items()
    }
    shape = spline(count, even=even).bind(params).shape
    assert shape is not None
    return shape.knots


def exponent(curve: Curve) -> float:
    """1 plus the slope of ln s′ against ln x over the upper half of the positive points."""
    pairs = [(x, d) for x, d in zip(curve.grid, curve.derivative, strict=True) if x > 0 and d > 0]
    upper = pairs[len(pairs) // 2 :]
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in zip(*upper, strict=True))
    x = x - x.mean()
    return 1 + float((x * y).sum() / x.square().sum())
