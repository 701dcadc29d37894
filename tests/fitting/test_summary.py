"""The summary says how much is explained, what was fitted, and what not to trust."""

from dataclasses import replace

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.systems import draw, equations
from torch.nn import functional as F

import tacit
from tacit.fitting import summary


def fit_network(**options):
    model = tanh_mlp(0)
    model[0].bias.requires_grad_(False)
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-3)]
    return tacit.estimate(model, F.mse_loss, random_data(0), regularizers, **options)


def first_lines(fit):
    """The lines above the first rule."""
    lines = fit.summary().splitlines()
    return lines[: next(i for i, line in enumerate(lines) if set(line) == {"─"})]


def fit_columns(count, noise):
    design = draw(1, 400, count)
    return tacit.fit(equations(design, design.sum(1) + noise * draw(2, 400)))


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, "r0 explains"),
        (2, "r0 and r1 explain"),
        (3, "r0, r1 and r2 explain"),
        (4, "r0, r1, r2 and 1 more explain"),
        (9, "r0, r1, r2 and 6 more explain"),
    ],
)
def test_the_first_line_says_how_much_the_regularizers_explain(count, names):
    exact, noisy = fit_columns(count, 0.0), fit_columns(count, 6.0)
    assert first_lines(exact) == [f"{names} 100.0 % of the target."]
    assert noisy.explained < 0.5
    assert first_lines(noisy) == [
        f"{names} {100 * noisy.explained:.1f} % of the target.",
        "Strengths in parentheses describe only that part of the target.",
    ]


@pytest.mark.parametrize(
    ("layers", "names"), [(3, "l2[0], l2[1], l2[2] and 1 more"), (4, "l2 (4 strengths) and l1")]
)
def test_the_first_line_has_one_name_for_a_regularizer_of_many_strengths(layers, names):
    torch.manual_seed(0)
    widths = [torch.nn.Linear(3, 3).double() for _ in range(layers)]
    model, X = torch.nn.Sequential(*widths), draw(0, 20, 3)
    fit = tacit.estimate(model, F.mse_loss, (X, X), [tacit.layerwise(tacit.l2()), tacit.l1()])
    line = " ".join(first_lines(fit))
    assert line.startswith(f"{names} explain")


def test_the_first_line_says_that_there_is_no_signal():
    X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    model = torch.nn.Linear(2, 1, bias=False).double()
    model.weight.data = y.T.clone()
    fit = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2()])
    (line,) = first_lines(fit)
    assert line.startswith("NO SIGNAL: the target is only noise or rounding; do not interpret")
    assert line.endswith("strength of l2.")


def test_strengths_of_an_unexplained_target_are_in_parentheses():
    fit = fit_network()
    assert fit.explained < 0.5
    lines = fit.summary().splitlines()
    for name, strength in fit.strengths.items():
        (row,) = [line for line in lines if line.startswith(f"{name} ")][-1:]
        assert f"({strength:.6g})" in row
    explained = fit_columns(1, 0.0)
    assert f"({explained.strengths['r0']:.6g})" not in explained.summary()


def test_a_fit_without_error_bars_says_how_to_add_them():
    X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    model = torch.nn.Linear(2, 1, bias=False).double()
    fit = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2()])
    assert "tacit.score_examples(fit) adds" in fit.summary()
    without_origin = tacit.fit(replace(fit.equations, origin=None))
    assert "score_examples" not in without_origin.summary()


def test_the_header_describes_the_target_the_data_and_the_parameters():
    text = fit_network(known={tacit.l2(): 5e-5}).summary()
    for part in (
        "endpoint equations",
        "−∇L",
        "mse_loss, mean",
        "64",
        "49 used in 3 tensors, 8 frozen, 0 tied; float64",
        "l2 = 5e-05",
    ):
        assert part in text, part


def test_the_table_has_a_row_per_regularizer_and_error_bars_that_name_their_kind():
    fit = fit_network()
    lines = fit.summary().splitlines()
    (head,) = [line for line in lines if line.startswith("regularizer")]
    assert head.split() == ["regularizer", "strength", "±layers", "share", "inflation"]
    (row,) = [line.split() for line in lines if line.startswith("smooth_l1 ")]
    assert float(row[1].strip("()")) == float(f"{fit.strengths['smooth_l1']:.6g}")
    assert row[2] == f"{fit.standard_errors['layers']['smooth_l1']:.3g}"
    text = " ".join(fit.summary().split())
    assert "±layers: how far 2 layers disagree on one strength" in text
    assert "does not say how precisely the strength is known" in text
    assert "intervals" not in text  # which would read as the strength's uncertainty
    assert "tacit.score_examples(fit) adds the sampling of examples" in text


def test_layers_are_shown_only_where_they_say_something():
    """It was `±layers ∞` and `[-inf, inf]` where every strength was in one layer."""
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    by_layer = tacit.fit(tacit.endpoint_equations(objective, tacit.layerwise(tacit.l2())))
    assert set(by_layer.standard_errors["layers"].values()) == {float("inf")}
    for words in ("±layers", "∞", "-inf"):
        assert words not in by_layer.summary()
    assert "± none: a single point does not show its own uncertainty." in by_layer.summary()
    both = [tacit.l2(scope="0.*", name="first"), tacit.smooth_l1(1e-3)]
    text = tacit.fit(tacit.endpoint_equations(objective, both)).summary()
    (row,) = [line.split() for line in text.splitlines() if line.startswith("first ")][-1:]
    assert row[2] == "–"
    assert "∞" not in text
    drawn = tacit.fit(equations(draw(1, 50, 1), draw(2, 50, 3)))
    assert "95 % intervals: r0 [" in drawn.summary()


def test_percentages_have_more_digits_near_0_and_100():
    texts = {0.5: "50.0 %", 0.996: "99.6 %", 0.99996: "99.996 %", 4e-5: "0.004 %"}
    texts |= {1.0: "100.0 %", 1 - 1e-12: "100.0 %", 0.0: "0.0 %"}
    assert {part: summary.percent(part) for part in texts} == texts


def test_the_footer_says_how_much_is_explained_and_the_size_of_the_gradient():
    fit = fit_network()
    text = fit.summary()
    assert f"explained {fit.explained:.4f}" in text
    assert f"‖∇L‖ {fit.gradient_norm:.4g}" in text
    assert "condition" in text
    assert "‖θ‖" in text


def test_problems_are_listed_with_their_remedies():
    fit = fit_network()
    text = " ".join(fit.summary().split())
    assert fit.problems
    for problem in fit.problems:
        assert " ".join(problem.message.split()) in text
        assert " ".join(problem.remedy.split()) in text


def test_problems_of_one_kind_share_their_remedy():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8))).double()
    X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    fit = tacit.estimate(model, F.mse_loss, (X, X.flip(1)), tacit.layerwise(tacit.l2()))
    problems = [problem for problem in fit.problems if problem.kind == "weak"]
    assert len(problems) > 3
    text = " ".join(fit.summary().split())
    assert text.count(" ".join(problems[0].remedy.split())) == 1
    assert f"The same holds for {problems[2].names[0]}" in text


def test_printing_a_fit_prints_its_summary():
    fit = fit_network()
    assert str(fit) == fit.summary()
    assert "explained" in repr(fit)


def test_lines_have_at_most_88_characters_and_long_tables_are_cut():
    model = torch.nn.Linear(60, 1).double()
    objective = tacit.Objective(model, F.mse_loss, random_data(1, inputs=60))
    text = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.diagonal()])).summary()
    assert max(map(len, text.splitlines())) <= 88
    assert "… and 21 more" in text


def test_a_summary_of_stacked_equations_lists_where_their_sources_differ():
    small = tacit.Objective(tanh_mlp(7), F.mse_loss, random_data(7, count=10))
    large = tacit.Objective(tanh_mlp(7), F.mse_loss, random_data(8, count=64))
    first = tacit.endpoint_equations(small, [tacit.l2()])
    second = tacit.endpoint_equations(large, [tacit.l2()], known={tacit.l1(): 0.1})
    text = tacit.fit(tacit.stack([first, second])).summary()
    assert "differ: 10, 64" in text
    assert "differ: no penalties, l1 = 0.1" in text
    assert "layer 2" in tacit.fit(first).layers["2"].summary()
