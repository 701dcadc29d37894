"""Screens as frames, figures and summaries in every format, made of known rows."""

import math

import pytest
from support.figures import assert_ready_for_print, written
from support.systems import draw, equations

import tacit
from tacit.display import FORMATS
from tacit.identifiability.screening import Group, Screen, ScreenRow

ROWS = (
    ScreenRow("l2", 1, 0.9, 0.5, 0.89, 0.004, 0.012, (0.011, 0.013), True),
    ScreenRow("l2[matrices]", 1, 0.85, 0.4, 0.84, 0.004, 0.011, (0.01, 0.012), False),
    ScreenRow("stable_rank", 2, 0.01, 0.0, -0.1, 1.0, -3e-4, None, False),
)
GROUPS = (
    Group(("l2", "l2[matrices]"), 0.004, confirmed=True, named=("l2",)),
    Group(("stable_rank",), 1.0, confirmed=False, named=()),
)


def make_screen(rows=ROWS, groups=GROUPS):
    design = draw(0, 40, 1)
    fit = tacit.fit(equations(design, 0.012 * design[:, 0]))
    reason = "l2: confirmed, with 90.0% of the target explained."
    return Screen("answer", groups, rows, fit, ("layers", 10), reason, {}, {})


def test_a_frame_has_a_row_per_candidate():
    frame = make_screen().to_frame()
    for column in ("name", "group", "alone", "added", "held_out", "p", "strength", "chosen"):
        assert list(frame[column]) == [getattr(row, column) for row in ROWS]
    assert list(frame["low"])[:2] == [0.011, 0.01]
    assert list(frame["high"])[:2] == [0.013, 0.012]
    assert math.isnan(frame["low"][2])
    assert list(frame["confirmed"]) == [True, True, False]
    assert list(frame["named"]) == [True, False, False]
    assert len(make_screen((), ()).to_frame()) == 0


def test_bars_are_as_long_as_what_candidates_explain_alone(tmp_path):
    figure = make_screen().plot()
    (axes,) = figure.get_axes()
    assert [bar.get_width() for bar in axes.patches][:3] == [row.alone for row in ROWS]
    assert [line.get_xdata()[0] for line in axes.get_lines()[:3]] == [row.added for row in ROWS]
    chosen, other = (axes.patches[i].get_facecolor() for i in (0, 1))
    assert chosen != other
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "l2 (0.012)", "l2[matrices]", "stable_rank",
    ]  # fmt: skip
    assert any("r0: 100% of the target" in text.get_text() for text in written(figure))
    assert_ready_for_print(figure, tmp_path)


def test_widths_of_the_same_family_can_be_told_apart():
    names = ["smooth_l1(0.01)[matrices]", "smooth_l1(0.1)[matrices]"]
    rows = [ScreenRow(name, 1, 0.5, 0.1, 0.4, 0.5, 1.0, None, False) for name in names]
    (axes,) = make_screen(rows, (Group(tuple(names), 0.5, False, ()),)).plot().get_axes()
    assert [label.get_text() for label in axes.get_yticklabels()] == names


def test_a_figure_of_many_candidates_with_long_names_is_ready_for_print(tmp_path):
    names = [f"explicit_dropout[transformer.blocks.{i}.attention]" for i in range(30)]
    rows = [
        ScreenRow(name, i // 5, 0.5, 0.1, 0.4, 0.01, 1.0, (0.5, 1.5), i == 0)
        for i, name in enumerate(names)
    ]
    groups = [Group(tuple(names[i : i + 5]), 0.01, False, ()) for i in range(0, 30, 5)]
    figure = make_screen(tuple(rows), tuple(groups)).plot()
    assert len(figure.get_axes()[0].get_yticklabels()) == 14
    assert_ready_for_print(figure, tmp_path)
    assert_ready_for_print(make_screen((), ()).plot(), tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_the_verdict_and_the_candidates(format):
    text = make_screen().summary(format).replace("\\", "").replace("{[}", "[").replace("{]}", "]")
    for part in ("confirmed, with 90.0", "screen of 3 candidates", "l2[matrices]", "0.850"):
        assert part in text
    assert "0.0120 [0.0110, 0.0130]" in text
    assert make_screen()._repr_html_() == make_screen().summary("html")


def test_the_title_without_an_answer_says_that_nothing_is_confirmed():
    screen = tacit.screen(equations(draw(0, 40, 1), draw(1, 40, 1)[:, 0]))
    assert screen.verdict == "ranked"
    titles = [text.get_text().replace("\n", " ") for text in written(screen.plot())]
    assert "Candidates are ranked, and none is confirmed" in titles
