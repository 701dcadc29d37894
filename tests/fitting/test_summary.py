"""The summary shows what a reader needs, and never a bare strength."""

import torch
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit.fitting import summary as report


def found(**options):
    model = tanh_mlp(0)
    model[0].bias.requires_grad_(False)
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-3)]
    return tacit.estimate(model, F.mse_loss, random_data(0), regularizers, **options)


def test_the_header_says_what_was_fitted_to_what():
    text = found(known={tacit.l2(): 5e-5}).summary()
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
    fit = found()
    lines = fit.summary().splitlines()
    (head,) = [line for line in lines if line.startswith("regularizer")]
    assert head.split() == ["regularizer", "strength", "±layers", "share", "inflation"]
    row = next(line for line in lines if line.startswith("smooth_l1")).split()
    assert float(row[1].strip("()")) == float(f"{fit.strengths['smooth_l1']:.6g}")
    assert row[2] == f"{fit.standard_errors['layers']['smooth_l1']:.3g}"
    text = " ".join(fit.summary().split())
    low, high = fit.intervals()["layers"]["smooth_l1"]
    assert f"smooth_l1 [{low:.4g}, {high:.4g}]" in text
    assert "±layers: standard errors over which layers are looked at, from 2 layers." in text


def test_it_leads_with_what_is_not_explained_and_puts_such_strengths_in_parentheses():
    fit = found()
    assert fit.explained < 0.5
    lines = fit.summary().splitlines()
    assert lines[1].startswith(f"NOT EXPLAINED: {100 * (1 - fit.explained):.1f} % of the target.")
    for name, strength in fit.strengths.items():
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert f"({strength:.6g})" in row
    X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    model = torch.nn.Linear(2, 1, bias=False).double()
    model.weight.data = y.T / 1.5
    good = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2()])
    text = good.summary()
    assert text.splitlines()[1] == "100.0 % of the target is explained by l2."
    assert "(0.25)" not in text
    assert "score_examples" in text  # one layer at one point has no error bars of its own
    still = torch.nn.Linear(2, 1, bias=False).double()
    still.weight.data = y.T.clone()
    lost = tacit.estimate(still, F.mse_loss, (X, y), [tacit.l2()]).summary()
    assert lost.splitlines()[1].startswith("NO SIGNAL")


def test_a_percentage_has_the_digits_that_it_needs():
    shown = {0.5: "50.0 %", 0.996: "99.6 %", 0.99996: "99.996 %", 4e-5: "0.004 %"}
    shown |= {1.0: "100.0 %", 1 - 1e-12: "100.0 %", 0.0: "0.0 %"}
    assert {part: report._percent(part) for part in shown} == shown


def test_the_footer_says_how_much_is_explained_and_how_stationary_the_point_was():
    fit = found()
    text = fit.summary()
    assert f"explained {fit.explained:.4f}" in text
    assert f"‖∇L‖ {fit.gradient_norm:.4g}" in text
    assert "condition" in text
    assert "‖θ‖" in text


def test_problems_stand_below_with_their_remedies():
    fit = found()
    text = " ".join(fit.summary().split())
    assert fit.problems
    for problem in fit.problems:
        assert " ".join(problem.message.split()) in text
        assert " ".join(problem.remedy.split()) in text


def test_problems_of_one_kind_share_their_remedy():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8))).double()
    X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    many = tacit.estimate(model, F.mse_loss, (X, X.flip(1)), tacit.layerwise(tacit.l2()))
    alike = [problem for problem in many.problems if problem.kind == "chance"]
    assert len(alike) > 3
    text = " ".join(many.summary().split())
    assert text.count(" ".join(alike[0].remedy.split())) == 1
    assert f"So it is for {alike[2].names[0]}" in text


def test_printing_a_fit_prints_its_summary():
    fit = found()
    assert str(fit) == fit.summary()
    assert "explained" in repr(fit)


def test_lines_are_narrow_and_long_tables_are_cut():
    model = torch.nn.Linear(60, 1).double()
    objective = tacit.Objective(model, F.mse_loss, random_data(1, inputs=60))
    text = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.diagonal()])).summary()
    assert max(map(len, text.splitlines())) <= 88
    assert "… and 21 more" in text
