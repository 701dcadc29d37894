"""Models are scored on layers, endpoints and steps that they were not fitted to."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from support.models import minimise, random_data, tanh_mlp
from support.systems import SEEDS, equations, quick, random_system
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.identifiability import compare


def draw(seed, *size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def dense_scores(design, targets, parts):
    """What is left of each part when fitted to the others, and its norm, pairs of groups apart."""
    groups = targets.shape[1]
    pairs = [(g, h) for g in range(groups) for h in range(groups) if g != h or groups == 1]
    left, norms = [], []
    for part in parts:
        rest = torch.ones(len(design), dtype=torch.bool)
        rest[part] = False
        fits = [reference.fit(design[rest], target[rest]) for target in targets.T]
        missed = [t[part] - design[part] @ s for t, s in zip(targets.T, fits, strict=True)]
        left.append(sum(float(missed[g] @ missed[h]) for g, h in pairs))
        norms.append(sum(float(targets[part, g] @ targets[part, h]) for g, h in pairs))
    return left, norms


@quick
@given(SEEDS)
def test_scores_agree_with_dense_fits_to_all_but_one(seed):
    design, target = random_system(seed)
    design = torch.cat([design, draw(seed + 1, 40, design.shape[1])])
    target = torch.cat([target, draw(seed + 2, 40)])
    targets = target[:, None] + 0.3 * draw(seed + 3, len(target), 1 + seed % 3)
    parts = torch.arange(len(design)).chunk(4)
    models = {"one": ["r0"], "all": [f"r{j}" for j in range(design.shape[1])], "none": []}
    found = compare(equations(design, targets, blocks=4), models)
    assert found.clusters == ("0", "1", "2", "3")
    for name, columns in (("one", [0]), ("all", list(range(design.shape[1])))):
        left, norms = dense_scores(design[:, columns], targets, parts)
        assert list(found.left[name]) == pytest.approx(left, rel=1e-7)
        assert list(found.norms) == pytest.approx(norms, rel=1e-7)
        assert found.explained[name] == pytest.approx(1 - sum(left) / sum(norms), abs=1e-7)
    assert found.explained["none"] == pytest.approx(0, abs=1e-12)
    whole = tacit.fit(equations(design, targets, blocks=4)).explained
    assert found.fitted["all"] == pytest.approx(whole, rel=1e-8)


def test_the_jackknife_of_a_difference_is_the_naive_one():
    design, target = draw(0, 60, 2), draw(1, 60)
    found = compare(equations(design, target, blocks=5), {"a": ["r0"], "b": ["r0", "r1"]})
    left = {name: torch.tensor(values) for name, values in found.left.items()}
    norms = torch.tensor(found.norms)

    def gap(kept):
        return ((left["b"] - left["a"])[kept].sum() / norms[kept].sum()).item()

    without = torch.tensor([gap(torch.arange(5) != g) for g in range(5)])
    value, error = found.difference("a", "b")
    assert value == pytest.approx(found.explained["a"] - found.explained["b"])
    expected = (4 / 5 * (without - without.mean()).square().sum()).sqrt().item()
    assert error == pytest.approx(expected, rel=1e-4)
    assert found.difference("b", "a") == pytest.approx((-value, error))
    assert found.difference("a", "a") == (0, 0)


def test_a_larger_model_does_not_win_by_its_size():
    """Twelve columns of nothing: they explain where they are fitted, and not where they are not."""
    design = draw(2, 120, 13)
    target = design[:, 0] + 0.5 * draw(3, 120)
    names = [f"r{j}" for j in range(13)]
    found = compare(equations(design, target, blocks=6), {"all": names, "true": names[:1]})
    assert found.fitted["all"] > found.fitted["true"]
    assert found.best == "true"
    assert found.difference("true", "all").value > found.difference("true", "all").standard_error
    lines = found.summary().splitlines()
    assert lines[2].startswith("true")
    assert lines[3].startswith("all")
    assert "±" in lines[3]
    assert set(found.by_cluster["true"]) == set("012345")


def test_the_penalty_that_was_at_work_is_found_in_layers_held_out():
    model, data = tanh_mlp(3, (5, 8, 8, 1)), random_data(3)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    families = [tacit.l2(), tacit.smooth_l1(1e-2), tacit.layerwise(tacit.l2())]
    families[2] = replace(families[2], name="by layer")
    objective = tacit.Objective(model, F.mse_loss, data)
    given = tacit.endpoint_equations(objective, families)
    models = {"lasso": ["smooth_l1"], "ridge": ["l2"], "layers": ["by layer"], "l": ["l2[0]"]}
    found = compare(given, models)
    assert found.best == "ridge"
    assert found.explained["ridge"] == pytest.approx(1)
    assert found.explained["lasso"] < 0.99
    assert found.explained["layers"] == pytest.approx(0)  # no estimate where it was held out
    assert found.fitted["layers"] == pytest.approx(1)
    assert found.models["layers"] == ("l2[0]", "l2[2]", "l2[4]")
    assert compare(tacit.fit(given), models) == found


def test_endpoints_and_steps_are_held_out_too():
    parts = [equations(draw(s, 20, 2), draw(s + 50, 20), blocks=2) for s in range(3)]
    stacked = tacit.stack(parts)
    found = compare(stacked, {"a": ["r0"]}, held_out="endpoints")
    assert found.clusters == ("0", "1", "2")
    blocks = tuple(
        replace(block, layer="x", step=step)
        for step, part in enumerate(parts)
        for block in part.blocks
    )
    walked = compare(replace(parts[0], blocks=blocks), {"a": ["r0"]}, held_out="steps")
    assert walked.left["a"] == pytest.approx(found.left["a"])
    several = compare(stacked, {"a": ["r0"]}, held_out="steps")
    assert several.clusters == ("0.0", "1.0", "2.0")


def test_of_equal_models_the_smallest_is_best():
    design = draw(4, 60, 2)
    given = equations(design, design[:, 0], blocks=3)
    found = compare(given, {"both": ["r0", "r1"], "one": ["r0"]})
    assert found.best == "one"


def test_strengths_of_a_nonnegative_fit_stay_nonnegative():
    design = draw(5, 60, 2)
    target = design @ torch.tensor([1.0, -1.0]).double() + 0.1 * draw(6, 60)
    free = equations(design, target, blocks=3)
    held = compare(tacit.fit(free, nonnegative=True), {"b": ["r1"]})
    assert held.explained["b"] == pytest.approx(0)
    assert compare(free, {"b": ["r1"]}).explained["b"] > 0.2


def test_wrong_comparisons_are_refused():
    given = equations(draw(7, 20, 2), draw(8, 20), blocks=2)
    for models, options, words in (
        ({"a": ["x"]}, {}, "model 'a' names x.*there are r0, r1"),
        ({"a": "r0"}, {}, "list of names"),
        ({"a": ["r0", "r0"]}, {}, "twice"),
        ({}, {}, "dictionary"),
        ({"a": ["r0"]}, {"held_out": "rows"}, "'layers', 'endpoints' or 'steps'"),
        ({"a": ["r0"]}, {"held_out": "endpoints"}, "only one here.*tacit.stack"),
        ({"a": ["r0"]}, {"held_out": "steps"}, "only one here"),
    ):
        with pytest.raises(tacit.InputError, match=words):
            compare(given, models, **options)
    found = compare(given, {"a": ["r0"]})
    with pytest.raises(tacit.InputError, match="no model 'b'"):
        found.difference("a", "b")
