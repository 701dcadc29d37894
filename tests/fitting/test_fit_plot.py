"""Figures of a fit draw its numbers, and are ready for a column of a paper."""

from dataclasses import replace

import pytest
import torch
from support.figures import assert_ready_for_print, written
from support.models import random_data, tanh_mlp
from support.systems import draw, equations, equations_of_parts
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError
from tacit.display import figures, render
from tacit.display.figures import COLUMN
from tacit.fitting.fit_plot import MOST_COLUMNS, MOST_LAYERS, MOST_ROWS
from tacit.fitting.layer_table import summarize_layers
from tacit.reporting.fit_report import describe_strengths


def texts(figure):
    return [text.get_text().replace("−", "-") for text in written(figure)]


def endpoint_fit(*regularizers, **options):
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    return tacit.fit(tacit.endpoint_equations(objective, list(regularizers), **options))


@pytest.fixture(scope="module")
def scored():
    fit = endpoint_fit(tacit.layerwise(tacit.l2()), tacit.smooth_l1(1e-2))
    return fit.with_error_bars(tacit.score_examples(fit).error_bars())


def noisy_fit(rows=60, groups=6):
    design = draw(1, rows, 2)
    targets = (design @ torch.tensor([2.0, -0.5]).double())[:, None] + 0.3 * draw(2, rows, groups)
    return tacit.fit(equations(design, targets))


def test_strengths_and_the_ends_of_their_intervals_are_where_the_fit_has_them(tmp_path):
    fit = noisy_fit()
    figure = fit.plot()
    panels = figure.get_axes()
    assert len(panels) == 2  # one unit each
    for axes, name in zip(panels, fit.strengths, strict=True):
        bar, dot, zero = axes.get_lines()
        assert tuple(bar.get_xdata()) == fit.intervals()["draws"][name]
        assert list(dot.get_xdata()) == [fit.strengths[name]]
        assert list(zero.get_xdata()) == [0, 0]
        low, high = axes.get_xlim()
        assert low < min(0, *bar.get_xdata())
        assert high > max(0, *bar.get_xdata())
    shown = texts(figure)
    for name, strength in fit.strengths.items():
        assert name in shown
        assert f"{strength:.3g}" in shown
    assert any(text.startswith("95 %, for the random draws") for text in shown)
    assert figure.get_figwidth() == COLUMN
    assert_ready_for_print(figure, tmp_path)


def test_strengths_of_one_regularizer_share_a_panel_with_all_kinds_of_intervals(scored, tmp_path):
    layerwise, lasso = scored.plot().get_axes()
    assert [label.get_text() for label in layerwise.get_yticklabels()] == ["l2[0]", "l2[2]"]
    assert [label.get_text() for label in lasso.get_yticklabels()] == ["smooth_l1"]
    ends = {tuple(line.get_xdata()) for line in lasso.get_lines()[:2]}
    assert ends == {bars["smooth_l1"] for bars in scored.intervals().values()}
    assert_ready_for_print(scored.plot(), tmp_path)


def test_doubtful_strengths_are_hollow_and_the_title_names_the_problems():
    fit = endpoint_fit(tacit.l2())
    assert fit.explained < 0.5
    figure = fit.plot()
    dots = [line for line in figure.get_axes()[0].get_lines() if line.get_marker() == "o"]
    assert [dot.get_markerfacecolor() for dot in dots] == ["white"]
    (title,) = [text for text in texts(figure) if "target" in text]
    assert title.replace("\u00a0", " ").startswith("l2 explains ")
    assert "unexplained" in title
    dots = [
        line for line in noisy_fit().plot().get_axes()[0].get_lines() if line.get_marker() == "o"
    ]
    assert "white" not in {dot.get_markerfacecolor() for dot in dots}


def test_strengths_that_are_not_determined_say_so():
    design = draw(1, 30, 2)
    fit = tacit.fit(equations(torch.cat([design, design[:, :1]], 1), draw(2, 30, 3)))
    assert texts(fit.plot()).count("not determined") == 2


def test_an_infinite_interval_goes_from_end_to_end(tmp_path):
    fit = noisy_fit()
    bars = fit.error_bars["draws"]
    covariance = bars.covariance.clone()
    covariance[0, 0] = torch.inf
    fit = fit.with_error_bars(replace(bars, covariance=covariance))
    figure = fit.plot()
    infinite, finite = (axes.get_lines()[0] for axes in figure.get_axes())
    assert infinite.get_transform() == figure.get_axes()[0].get_yaxis_transform()
    assert tuple(infinite.get_xdata()) == (0, 1)  # parts of the panel
    assert tuple(finite.get_xdata()) == fit.intervals()["draws"]["r1"]
    assert_ready_for_print(figure, tmp_path)
    assert (
        describe_strengths(fit)[0]
        == f"r0 has strength {fit.strengths['r0']:.3g}, and no finite interval"
    )


def test_of_many_strengths_those_of_largest_share_are_drawn(tmp_path):
    design = draw(1, 400, 40)
    weights = torch.arange(1.0, 41.0).double()
    fit = tacit.fit(equations(design, design @ weights))
    figure = fit.plot()
    assert len(figure.get_axes()) == MOST_ROWS
    shown = {label.get_text() for axes in figure.get_axes() for label in axes.get_yticklabels()}
    assert shown == set(sorted(fit.shares, key=fit.shares.get)[-MOST_ROWS:])
    assert any(f"{MOST_ROWS} of 40 strengths" in text for text in texts(figure))
    assert_ready_for_print(figure, tmp_path)


def lasso_at_its_optimum():
    """y = X (X orthogonal): the lasso's optimum, with weights of both signs and one zero."""
    X, y = 2 * torch.eye(4).double(), torch.tensor([[3.0], [-2.0], [1.0], [0.1]]).double()
    model = nn.Linear(4, 1, bias=False).double()
    target = y.T / 2
    model.weight.data = target.sign() * (target.abs() - 0.1).clamp(min=0)
    return tacit.Objective(model, F.mse_loss, (X, y))


def test_gradients_are_those_of_the_loss_and_of_the_fitted_penalty(tmp_path):
    """∇L = 2(w − w₀) = −0.2 sign(w) where w is not zero; the zero weight has no equation."""
    fit = tacit.fit(tacit.endpoint_equations(lasso_at_its_optimum(), [tacit.l1()]))
    figure = fit.plot("gradients")
    (dots,) = figure.get_axes()[0].collections
    points = torch.tensor(dots.get_offsets().tolist(), dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.2], [-0.2, -0.2], [0.2, 0.2]]).double()
    torch.testing.assert_close(points, expected)
    assert_ready_for_print(figure, tmp_path)


def test_gradients_without_known_penalties_and_of_a_part_of_the_candidates():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    ridge = tacit.l2(scope="0.*", name="first")
    fit = tacit.fit(tacit.endpoint_equations(objective, [ridge], known={tacit.l2(): 0.01}))
    figure = fit.plot("gradients")
    (dots,) = figure.get_axes()[0].collections
    params, gradients = objective.params, objective.gradient()
    target = torch.cat([(-gradients[n] - 0.02 * p).flatten() for n, p in params.items()])
    slope = 2 * fit.strengths["first"]
    fitted = torch.cat([(slope * p * n.startswith("0.")).flatten() for n, p in params.items()])
    points = torch.tensor(dots.get_offsets().tolist(), dtype=torch.float64)
    torch.testing.assert_close(points, torch.stack([fitted, target], 1), rtol=1e-6, atol=1e-9)
    assert "−∂L/∂θ − known penalties" in [text.get_text() for text in written(figure)]


def test_gradients_of_a_difference_are_what_the_technique_adds():
    plain = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    noisy = tacit.techniques.input_noise(plain, 0.1, draws=16)
    fit = tacit.fit(tacit.difference_equations(noisy, plain, [tacit.l2()]))
    figure = fit.plot("gradients")
    (dots,) = figure.get_axes()[0].collections
    target = torch.tensor(dots.get_offsets().tolist(), dtype=torch.float64)[:, 1]
    added, before = noisy.gradient(), plain.gradient()
    expected = torch.cat([(added[n] - before[n]).flatten() for n in added])
    torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-10)


def test_of_many_parameters_cells_are_drawn_and_of_very_many_a_part_is_read(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4000, 1, bias=False).double()
    objective = tacit.Objective(
        model, F.mse_loss, (torch.eye(4000).double()[:50], torch.ones(50, 1).double())
    )
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()]))
    (cells,) = fit.plot("gradients").get_axes()[0].collections
    assert cells.get_array().sum() > 0
    monkeypatch.setattr("tacit.fitting.gradient_plot.MOST_READ", 1500)
    figure = fit.plot("gradients")
    (dots,) = figure.get_axes()[0].collections
    weights = model.weight.detach().flatten()[::3]
    assert len(dots.get_offsets()) == len(weights) == 1334
    fitted = torch.tensor(dots.get_offsets().tolist(), dtype=torch.float64)[:, 0]
    torch.testing.assert_close(fitted, 2 * fit.strengths["l2"] * weights)
    assert any("One in 3 parameters is drawn" in text for text in texts(figure))
    assert_ready_for_print(figure, tmp_path)


def test_gradients_need_the_objective_the_same_data_and_one_point():
    objective = lasso_at_its_optimum()
    equations = tacit.endpoint_equations(objective, [tacit.l2()])
    stored = tacit.fit(replace(equations, origin=None))
    with pytest.raises(InputError, match="Write the equations again"):
        stored.plot("gradients")
    fit = tacit.fit(equations)
    objective.data[1].mul_(2)
    with pytest.raises(InputError, match="the data has changed"):
        fit.plot("gradients")
    positions = [{"weight": torch.ones(1, 4).double() * s} for s in (1.0, 0.9, 0.8)]
    trajectory = tacit.Trajectory.from_positions(positions, 0.1)
    steps = tacit.trajectory_equations(objective, trajectory, [tacit.l2()])
    with pytest.raises(InputError, match="pass equations of one point"):
        tacit.fit(steps).plot("gradients")
    step = tacit.Trajectory.from_positions(positions[:2], 0.1)
    with pytest.raises(InputError, match="needs the recorded training"):
        tacit.fit(tacit.trajectory_equations(objective, step, [tacit.l2()])).plot("gradients")
    with pytest.raises(InputError, match="'strengths', 'gradients', 'layers'"):
        fit.plot("curves")


def test_a_heat_map_has_what_each_regularizer_explains_in_each_layer(tmp_path):
    first, second = draw(1, 30, 2), draw(2, 30, 2)
    parts = [
        ("first", 0, 0, torch.cat([first, 3 * first[:, :1]], 1)),
        ("second", 0, 0, torch.cat([second, second[:, 1:]], 1)),
    ]
    fit = tacit.fit(equations_of_parts(parts, 2))
    figure = fit.plot("layers")
    axes = figure.get_axes()[0]
    (image,) = axes.get_images()
    expected = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).double()
    torch.testing.assert_close(torch.tensor(image.get_array().tolist()).double(), expected)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["r0", "r1", "all"]
    norms = [9 * float(first[:, 0].square().sum()), float(second[:, 1].square().sum())]
    shares = [norm / sum(norms) for norm in norms]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"first ({shares[0]:.0%})", f"second ({shares[1]:.0%})",
    ]  # fmt: skip
    assert_ready_for_print(figure, tmp_path)


def test_a_heat_map_of_many_layers_and_regularizers_is_ready_for_print(tmp_path):
    parts = [
        (f"transformer.blocks.{i}.attention.projection", 0, 0, (1 + i) * draw(i, 12, 8))
        for i in range(50)
    ]
    figure = tacit.fit(equations_of_parts(parts, 7)).plot("layers")
    axes, bar = figure.get_axes()
    assert len(axes.get_yticklabels()) == MOST_LAYERS
    assert bar.get_ylabel() == "part explained"
    assert any("without the 10 of smallest targets" in text for text in texts(figure))
    assert_ready_for_print(figure, tmp_path)


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    fit = noisy_fit()
    contents = []
    for number in range(2):
        fit.plot().savefig(tmp_path / f"{number}.svg", metadata={"Date": None})
        contents.append((tmp_path / f"{number}.svg").read_bytes())
    assert contents[0] == contents[1]


LONG = "a penalty with_a_name_that_is_far_too_long_for_the_label_of_a_row_or_the_title_of_a_figure"
ODD_NAMES = [LONG, r"$\frac$", "$x^2$ and 100 %", "_two\nlines & <b>#{}", "fünf λ"]


@pytest.fixture(scope="module")
def odd():
    """A fit of penalties whose names have formulas, line breaks, and very many letters."""

    def penalty(name, power):
        def value(params):
            return sum(tensor.abs().pow(power).sum() for tensor in params.values())

        return tacit.regularizer(name, value)

    return endpoint_fit(*map(penalty, ODD_NAMES, [2.0, 3.0, 4.0, 1.5, 2.5]))


@pytest.mark.parametrize("kind", ["strengths", "gradients", "layers"])
def test_names_are_drawn_as_they_are_and_cut_where_they_are_long(odd, kind, tmp_path):
    figure = odd.plot(kind)
    assert_ready_for_print(figure, tmp_path)
    (title,) = [text for text in written(figure) if text is figure._suptitle]
    assert r"\$\frac\$" in title.get_text()
    for axes in figure.get_axes():
        assert axes.bbox.width > 0.25 * figure.bbox.width or axes.get_ylabel() == "part explained"


def test_titles_are_as_wide_as_the_figure_and_no_wider():
    with figures.style():
        lines = figures.wrap(f"short words and {LONG} end", 200)
        widths = [figures.text_width(line) for line in lines]
    assert " ".join(lines).replace(" ", "") == f"short words and {LONG} end".replace(" ", "")
    assert max(widths) <= 200
    assert all(width > 60 for width in widths[:-1])


def test_of_many_regularizers_those_of_largest_share_are_in_the_heat_map(tmp_path):
    design = draw(1, 400, 30)
    target = design @ torch.arange(1.0, 31.0).double()[:, None]
    parts = [("first", 0, 0, torch.cat([design, target], 1))]
    fit = tacit.fit(equations_of_parts(parts, 30))
    figure = fit.plot("layers")
    labels = [label.get_text() for label in figure.get_axes()[0].get_xticklabels()]
    largest = sorted(fit.shares, key=fit.shares.get)[-MOST_COLUMNS:]
    assert labels == [*(name for name in fit.strengths if name in largest), "all"]
    assert any(f"{MOST_COLUMNS} of 30 regularizers" in text for text in texts(figure))
    assert_ready_for_print(figure, tmp_path)


@pytest.mark.parametrize("strength", [-4.5678e7, 1.2345e-10, -0.0123456])
def test_ticks_have_room_for_their_numbers(strength, tmp_path):
    """Also where a long name leaves a panel little width."""
    design = draw(1, 60, 1)
    target = strength * design + abs(strength) * 0.1 * draw(2, 60, 6)
    (family,) = (dense := equations(design, target)).families
    fit = tacit.fit(replace(dense, families=(replace(family, name=LONG),), names=(LONG,)))
    figure = fit.plot()
    assert_ready_for_print(figure, tmp_path)
    assert len(figure.get_axes()[0].get_xticks()) >= 2


def test_layers_with_their_number_in_the_middle_of_the_name_have_labels_of_their_own():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attention_projection = nn.Linear(3, 3)

        def forward(self, x):
            return torch.tanh(self.self_attention_projection(x))

    model = nn.ModuleDict({"transformer": nn.Sequential(*[Block() for _ in range(12)])}).double()
    model.forward = lambda x: model["transformer"](x).sum(1)
    X, y = random_data(0)
    objective = tacit.Objective(model, F.mse_loss, (X[:, :3], y[:, 0]))
    fit = tacit.estimate(objective, [tacit.layerwise(tacit.l2())])
    for kind in ("strengths", "layers"):
        (axes,) = fit.plot(kind).get_axes()
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert len({*labels}) == len(labels) == 12
        assert any(".11." in label for label in labels)


def test_the_part_of_a_target_that_is_zero_is_a_dash():
    model, X = tanh_mlp(0), random_data(0)[0]
    fit = tacit.estimate(model, F.mse_loss, (X, model(X).detach()), [tacit.l2()])
    labels = fit.plot("layers").get_axes()[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["0 (–)", "2 (–)"]
    assert "nan" not in render(summarize_layers(fit))


def test_layers_are_refused_where_no_layer_has_equations():
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    fit = tacit.estimate(
        model, F.mse_loss, (torch.eye(3).double(), torch.ones(3, 1).double()), tacit.l2()
    )
    with pytest.raises(InputError, match=r"no layer has equations: .* Fit other weights"):
        fit.plot("layers")


def test_labels_of_many_regularizers_stand_upright_so_that_none_is_on_another():
    penalties = [tacit.smooth_l1(10.0**k, name=f"smooth of 1e{k}, long") for k in range(-4, 4)]
    (axes, _) = endpoint_fit(*penalties).plot("layers").get_axes()
    labels = axes.get_xticklabels()
    assert len(labels) == 9
    assert {label.get_rotation() for label in labels} == {90}
    assert {label.get_ha() for label in labels} == {"center"}
