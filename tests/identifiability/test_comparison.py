"""Models are scored on layers, endpoints and steps that they were not fitted to."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from support.models import minimise, random_data, tanh_mlp
from support.systems import SEEDS, draw, equations, quick, random_system
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.identifiability import compare


def dense_residuals(design, targets, parts):
    """‖residual‖² of each part when fitted to the others, and ‖target‖², over pairs of groups."""
    groups = targets.shape[1]
    pairs = [(g, h) for g in range(groups) for h in range(groups) if g != h or groups == 1]
    square_residuals, square_norms = [], []
    for part in parts:
        others = torch.ones(len(design), dtype=torch.bool)
        others[part] = False
        strengths = [reference.fit(design[others], target[others]) for target in targets.T]
        residuals = [t[part] - design[part] @ s for t, s in zip(targets.T, strengths, strict=True)]
        square_residuals.append(sum(float(residuals[g] @ residuals[h]) for g, h in pairs))
        square_norms.append(sum(float(targets[part, g] @ targets[part, h]) for g, h in pairs))
    return square_residuals, square_norms


@quick
@given(SEEDS)
def test_residuals_agree_with_dense_fits_to_all_parts_but_one(seed):
    design, target = random_system(seed)
    design = torch.cat([design, draw(seed + 1, 40, design.shape[1])])
    target = torch.cat([target, draw(seed + 2, 40)])
    targets = target[:, None] + 0.3 * draw(seed + 3, len(target), 1 + seed % 3)
    parts = torch.arange(len(design)).chunk(4)
    models = {"one": ["r0"], "all": [f"r{j}" for j in range(design.shape[1])], "none": []}
    comparison = compare(equations(design, targets, blocks=4), models)
    assert comparison.clusters == ("0", "1", "2", "3")
    for name, columns in (("one", [0]), ("all", list(range(design.shape[1])))):
        residuals, norms = dense_residuals(design[:, columns], targets, parts)
        assert list(comparison.square_residuals[name]) == pytest.approx(residuals, rel=1e-7)
        assert list(comparison.square_norms) == pytest.approx(norms, rel=1e-7)
        explained = 1 - sum(residuals) / sum(norms)
        assert comparison.explained[name] == pytest.approx(explained, abs=1e-7)
    assert comparison.explained["none"] == pytest.approx(0, abs=1e-12)
    fit = tacit.fit(equations(design, targets, blocks=4))
    assert comparison.fitted["all"] == pytest.approx(fit.explained, rel=1e-8)


def test_the_standard_error_of_a_difference_is_the_jackknife_over_clusters():
    design, target = draw(0, 60, 2), draw(1, 60)
    comparison = compare(equations(design, target, blocks=5), {"a": ["r0"], "b": ["r0", "r1"]})
    residuals = {name: torch.tensor(r) for name, r in comparison.square_residuals.items()}
    norms = torch.tensor(comparison.square_norms)

    def difference(clusters):
        gains = (residuals["b"] - residuals["a"])[clusters]
        return (gains.sum() / norms[clusters].sum()).item()

    left_out = torch.tensor([difference(torch.arange(5) != g) for g in range(5)])
    value, error = comparison.difference("a", "b")
    assert value == pytest.approx(comparison.explained["a"] - comparison.explained["b"])
    expected = (4 / 5 * (left_out - left_out.mean()).square().sum()).sqrt().item()
    assert error == pytest.approx(expected, rel=1e-4)
    assert comparison.difference("b", "a") == pytest.approx((-value, error))
    assert comparison.difference("a", "a") == (0, 0)


def test_a_larger_model_does_not_win_by_its_size():
    """Twelve columns of noise explain where they are fitted, and not where they are not."""
    design = draw(2, 120, 13)
    target = design[:, 0] + 0.5 * draw(3, 120)
    names = [f"r{j}" for j in range(13)]
    comparison = compare(equations(design, target, blocks=6), {"all": names, "true": names[:1]})
    assert comparison.fitted["all"] > comparison.fitted["true"]
    assert comparison.best == "true"
    value, error = comparison.difference("true", "all")
    assert value > error
    lines = comparison.summary().splitlines()
    assert lines[2].startswith("true")
    assert lines[3].startswith("all")
    assert "±" in lines[3]
    assert set(comparison.by_cluster["true"]) == set("012345")


def test_the_penalty_that_was_applied_is_best_in_layers_held_out():
    model, data = tanh_mlp(3, (5, 8, 8, 1)), random_data(3)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    by_layer = replace(tacit.layerwise(tacit.l2()), name="by layer")
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-2), by_layer]
    system = tacit.endpoint_equations(tacit.Objective(model, F.mse_loss, data), regularizers)
    models = {"lasso": ["smooth_l1"], "ridge": ["l2"], "layers": ["by layer"], "l": ["l2[0]"]}
    comparison = compare(system, models)
    assert comparison.best == "ridge"
    assert comparison.explained["ridge"] == pytest.approx(1)
    assert comparison.explained["lasso"] < 0.99
    assert comparison.explained["layers"] == pytest.approx(0)  # no estimate where it was held out
    assert comparison.fitted["layers"] == pytest.approx(1)
    assert comparison.models["layers"] == ("l2[0]", "l2[2]", "l2[4]")
    assert compare(tacit.fit(system), models) == comparison


def test_endpoints_and_steps_can_be_held_out_too():
    parts = [equations(draw(s, 20, 2), draw(s + 50, 20), blocks=2) for s in range(3)]
    stacked = tacit.stack(parts)
    over_endpoints = compare(stacked, {"a": ["r0"]}, held_out="endpoints")
    assert over_endpoints.clusters == ("0", "1", "2")
    blocks = tuple(
        replace(block, layer="x", step=step)
        for step, part in enumerate(parts)
        for block in part.blocks
    )
    over_steps = compare(replace(parts[0], blocks=blocks), {"a": ["r0"]}, held_out="steps")
    expected = over_endpoints.square_residuals["a"]
    assert over_steps.square_residuals["a"] == pytest.approx(expected)
    over_all_steps = compare(stacked, {"a": ["r0"]}, held_out="steps")
    assert over_all_steps.clusters == ("0.0", "1.0", "2.0")


def test_of_equal_models_the_smallest_is_best():
    design = draw(4, 60, 2)
    system = equations(design, design[:, 0], blocks=3)
    assert compare(system, {"both": ["r0", "r1"], "one": ["r0"]}).best == "one"


def test_strengths_of_a_nonnegative_fit_stay_nonnegative():
    design = draw(5, 60, 2)
    target = design @ torch.tensor([1.0, -1.0]).double() + 0.1 * draw(6, 60)
    system = equations(design, target, blocks=3)
    nonnegative = compare(tacit.fit(system, nonnegative=True), {"b": ["r1"]})
    assert nonnegative.explained["b"] == pytest.approx(0)
    assert compare(system, {"b": ["r1"]}).explained["b"] > 0.2


def test_wrong_comparisons_are_refused():
    system = equations(draw(7, 20, 2), draw(8, 20), blocks=2)
    for models, options, words in (
        ({"a": ["x"]}, {}, "model 'a' names x.*there are r0, r1"),
        ({"a": "r0"}, {}, "list of names"),
        ({"a": ["r0", "r0"]}, {}, "twice"),
        ({}, {}, "dictionary"),
        ({"a": ["r0"]}, {"held_out": "rows"}, "'layers', 'endpoints', 'steps'"),
        ({"a": ["r0"]}, {"held_out": "endpoints"}, "only one.*tacit.stack"),
        ({"a": ["r0"]}, {"held_out": "steps"}, "only one.*trajectory"),
    ):
        with pytest.raises(tacit.InputError, match=words):
            compare(system, models, **options)
    with pytest.raises(tacit.InputError, match="no model 'b'"):
        compare(system, {"a": ["r0"]}).difference("a", "b")
