"""Metrics of a fit: names that loggers accept, and the fit's own numbers."""

import math
import re
from dataclasses import replace

import pytest
import torch
from support.systems import draw, equations, equations_of_parts

import tacit
from tacit.fitting import ErrorBars

NAMES = {
    "l2[0.weight]": "l2_0_weight",
    "l2[0/weight]": "l2_0_weight_2",
    "l2_0_weight_2": "l2_0_weight_2_2",
    "smooth_l1(0.03)": "smooth_l1_0_03",
    "metric ridge(optimizer, model)": "metric_ridge_optimizer_model",
    "λ‖θ‖²": "lambda_theta_2",
    "ϑ é µ": "theta_e_mu",
    "∇²": "2",
    "‖·‖": "regularizer",
    "explained": "explained",
}


def named(fit_equations, names):
    families = tuple(replace(f, name=n) for f, n in zip(fit_equations.families, names, strict=True))
    return tacit.fit(replace(fit_equations, families=families, names=tuple(names)))


def fit_of_endpoints(names, count=4):
    """A fit of several endpoints of several layers, with `training` and `layers` error bars."""
    parts = []
    for place in range(count):
        for layer in range(2):
            design = draw(10 * place + layer, 40, len(names))
            target = design.sum(1, keepdim=True) + 0.3 * draw(1000 + 10 * place + layer, 40, 1)
            parts.append((str(layer), place, 0, torch.cat([design, target], 1)))
    return named(equations_of_parts(parts, len(names)), names)


def test_names_are_accepted_unique_and_readable():
    metrics = fit_of_endpoints(list(NAMES)).to_metrics()
    assert all(re.fullmatch(r"[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*", name) for name in metrics)
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
    assert len(metrics) == 2 + 4 * len(NAMES)
    assert list(metrics)[:2] == ["tacit/explained", "tacit/problems"]
    strengths = [n.split("strength/")[1] for n in metrics if "/strength/" in n]
    assert strengths == list(NAMES.values())
    # File stores write a metric to a path: no name may be a folder of another.
    assert not any(a.startswith(b + "/") for a in metrics for b in metrics)


def test_values_are_those_of_the_fit():
    fit = fit_of_endpoints(["l2", "l1"])
    metrics = fit.to_metrics("")
    assert metrics["explained"] == fit.explained
    assert metrics["problems"] == len(fit.problems)
    for name in fit.strengths:
        assert metrics[f"strength/{name}"] == fit.strengths[name]
        assert metrics[f"standard_error/{name}"] == fit.standard_errors["training"][name]
        interval = fit.intervals()["training"][name]
        assert (metrics[f"low/{name}"], metrics[f"high/{name}"]) == interval
    assert fit.to_metrics("runs/1/") == {f"runs/1/{n}": v for n, v in metrics.items()}


def test_the_interval_is_the_widest_of_the_kinds_of_this_strength():
    fit = fit_of_endpoints(["l2", "l1"])
    errors = fit.standard_errors["training"]
    covariance = torch.diag(torch.tensor([100 * errors["l2"] ** 2, 1e-4 * errors["l1"] ** 2]))
    both = fit.with_error_bars(ErrorBars("sampling", "40 examples", ("l2", "l1"), covariance))
    metrics = both.to_metrics()
    assert metrics["tacit/standard_error/l2"] == both.standard_errors["sampling"]["l2"]
    assert metrics["tacit/high/l2"] == both.intervals()["sampling"]["l2"][1]
    assert metrics["tacit/standard_error/l1"] == both.standard_errors["training"]["l1"]


def test_what_is_not_finite_is_left_out():
    # A single point has no error bars but those of layers, which say nothing about precision.
    design = draw(0, 60, 2)
    single = tacit.fit(equations(design, design.sum(1) + draw(1, 60), blocks=3))
    assert "layers" in single.error_bars
    names = {"explained", "problems", "strength/r0", "strength/r1"}
    assert single.to_metrics("").keys() == names
    fit = fit_of_endpoints(["l2", "l1"])
    covariance = torch.diag(torch.tensor([math.inf, 0.01]))
    infinite = fit.with_error_bars(ErrorBars("sampling", "examples", ("l2", "l1"), covariance))
    assert infinite.to_metrics("").keys() == names - {"strength/r0", "strength/r1"} | {
        "strength/l2", "strength/l1", "standard_error/l1", "low/l1", "high/l1",
    }  # fmt: skip


def test_strengths_at_a_bound_have_no_interval():
    design = torch.cat([draw(2, 80, 1), draw(3, 80, 1)], 1)
    target = torch.stack([design @ torch.tensor([1.0, -1.0]).double() + 0.1 * draw(g, 80)
                          for g in range(4)], 1)  # fmt: skip
    metrics = tacit.fit(equations(design, target), nonnegative=True).to_metrics("")
    assert metrics["strength/r1"] == 0
    assert "low/r1" not in metrics
    assert "low/r0" in metrics


@pytest.mark.parametrize("prefix", ["/", "a//", "tacit: ", "λ/", "a.b/", None, 3])
def test_prefixes_that_loggers_refuse_are_refused(prefix):
    with pytest.raises(tacit.InputError, match=r"prefix is .*pass"):
        fit_of_endpoints(["l2"]).to_metrics(prefix)
