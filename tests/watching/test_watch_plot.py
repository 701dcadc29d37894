"""Rows of a watch as a frame, a figure and a summary in every format."""

import re

import pytest
import torch
from support.figures import assert_ready_for_print, written
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import InputError
from tacit.display import FORMATS
from tacit.display.numbers import show_with_interval
from tacit.watching.changes import interval_of


def watched(regularizers, *, epochs=20):
    """A network that is watched every ten epochs."""
    data, orders = random_data(0, count=96), torch.Generator().manual_seed(0)
    model = tanh_mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    objective = tacit.Objective(model, F.mse_loss, data)
    watch = tacit.watch(model, optimizer, objective, regularizers, every=10, budget=None)
    for _ in range(epochs):
        for rows in torch.randperm(96, generator=orders).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
        watch.end_epoch()
    return watch


@pytest.fixture(scope="module")
def watch():
    return watched([tacit.layerwise(tacit.l2()), tacit.smooth_l1(0.05)])


def test_a_frame_has_a_row_per_row_of_the_watch_and_strength(watch):
    frame = watch.to_frame()
    names = ["l2[0]", "l2[2]", "smooth_l1"]
    assert list(frame["name"]) == names * 2
    assert list(frame["window"]) == [10] * 3 + [20] * 3
    assert list(frame["update"]) == [120] * 3 + [240] * 3
    fits = [row.fit for row in watch.rows]
    assert list(frame["strength"]) == [fit.strengths[name] for fit in fits for name in names]
    assert list(frame["explained"]) == [fit.explained for fit in fits for _ in names]
    lows = [fit.intervals()["training"][name][0] for fit in fits for name in names]
    assert list(frame["training_low"]) == lows
    assert frame.columns[-1] == "verdict"


def test_a_figure_has_strengths_and_their_intervals_along_the_updates(watch, tmp_path):
    figure = watch.plot()
    ridge, lasso, explained = figure.get_axes()
    assert [text.get_text() for text in ridge.get_legend().get_texts()] == ["l2[0]", "l2[2]"]
    assert ridge.get_title(loc="left") == "strength of l2"
    dots = lasso.get_lines()[0]
    assert list(dots.get_xdata()) == [120, 240]
    assert list(dots.get_ydata()) == [row.fit.strengths["smooth_l1"] for row in watch.rows]
    (band,) = lasso.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    for row in watch.rows:
        low, high = row.fit.intervals()["training"]["smooth_l1"]
        assert {(row.update, low), (row.update, high)} <= corners
    parts = list(explained.get_lines()[0].get_ydata())
    assert parts == [row.fit.explained for row in watch.rows]
    assert "updates" in [text.get_text() for text in written(figure)]
    assert_ready_for_print(figure, tmp_path)


def test_a_single_row_has_its_interval_too(tmp_path):
    figure = watched([tacit.l2()], epochs=10).plot()
    assert len(figure.get_axes()) == 2
    assert len(figure.get_axes()[0].collections) == 2  # the band has no width
    assert_ready_for_print(figure, tmp_path)


def test_a_legend_has_every_name(tmp_path):
    long = "_a_name_that_is_$too$_long_for_the_legend_of_a_figure"
    watch = watched([tacit.layerwise(tacit.l2(name=long))])
    figure = watch.plot()
    assert_ready_for_print(figure, tmp_path)
    shown = [text.get_text() for text in figure.get_axes()[0].get_legend().get_texts()]
    assert [text[-2:] for text in shown] == ["0]", "2]"]


def test_every_format_has_the_rows_and_the_problems_of_the_last_one(watch):
    for format in FORMATS:
        text = watch.summary(format)
        plain = re.sub(r"\\ensuremath{-}", "-", text).replace("{[}", "[").replace("{]}", "]")
        plain = plain.replace("\\", "")
        for row in watch.rows:
            assert str(row.update) in text
            strength = row.fit.strengths["smooth_l1"]
            assert show_with_interval(strength, *interval_of(row.fit, "smooth_l1")) in plain
        for problem in watch.fit.problems:
            assert problem.kind in text
    assert watch._repr_html_() == watch.summary("html")
    assert str(watch).startswith("In the last row, l2[0], l2[2] and smooth_l1 explain")


def test_without_a_row_a_watch_says_when_to_expect_one():
    watch = watched([tacit.l2()], epochs=1)
    for format in FORMATS:
        assert "no row yet: about 9 more epochs" in watch.summary(format)
    for call in (watch.to_frame, watch.plot):
        with pytest.raises(InputError, match="no row yet: about 9 more epochs"):
            call()


def test_rows_are_aligned_below_long_names_and_small_strengths():
    names = ("decay[model.layers.10.self_attn]", "decay[model.layers.11.self_attn]", "of biases")
    scopes = ("0.*", "2.*", "*.bias")
    penalties = [tacit.l2(scope=s, name=n) for s, n in zip(scopes, names, strict=True)]
    lines = watched(penalties).summary().splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith("window"))
    head, *rows = lines[place : place + 3]
    ends = [match.end() for match in re.finditer(r"(?<=\])(?= |$)", rows[0])]
    assert len(ends) == 3
    for name, end in zip(names, ends, strict=True):
        assert head[:end].endswith(name)
        assert rows[1][:end].endswith("]")


def test_a_watch_with_one_row_has_one_row():
    assert "along training, 1 row\n" in watched([tacit.l2()], epochs=10).summary()
