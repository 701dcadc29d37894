"""The summary shows what a reader needs, and never a bare strength."""

import torch
from problems import random_data, tanh_mlp
from torch.nn import functional as F

import tacit


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


def test_the_table_has_a_row_per_regularizer_and_room_for_errors():
    lines = found().summary().splitlines()
    (head,) = [line for line in lines if line.startswith("regularizer")]
    assert head.split() == ["regularizer", "strength", "std.", "error", "share", "inflation"]
    row = next(line for line in lines if line.startswith("smooth_l1")).split()
    assert float(row[1]) == float(f"{found().strengths['smooth_l1']:.6g}")


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
        assert " ".join(str(problem).split()) in text


def test_printing_a_fit_prints_its_summary():
    fit = found()
    assert str(fit) == fit.summary()
    assert "explained" in repr(fit)


def test_lines_are_narrow_and_long_tables_are_cut():
    model = torch.nn.Linear(60, 1).double()
    objective = tacit.Objective(model, F.mse_loss, random_data(1, inputs=60))
    text = tacit.fit(tacit.endpoint_equations(objective, [tacit.diagonal()])).summary()
    assert max(map(len, text.splitlines())) <= 88
    assert "… and 21 more" in text
