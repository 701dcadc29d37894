"""Validations as frames, figures and summaries in every format, made of known numbers."""

import math
from dataclasses import replace

import pytest
from support.figures import assert_ready_for_print, written

from tacit.display import FORMATS
from tacit.errors import Problem
from tacit.validation.retrained import DIVERGED, Retrained
from tacit.validation.retraining import Validation

CLOSE = Retrained(0.02, 0.01, 0.999, 0.03, 0.98, 1e-4, 1e-9)
FAR = Retrained(1.0, 0.5, 0.6, 0.4, 0.7, -0.02, 1e-9)
VALIDATION = Validation(
    strengths={"l2": 0.01},
    penalised=CLOSE,
    control=FAR,
    recovered_predictions=0.925,
    recovered=0.98,
    settled=True,
    loss=0.06,
    trainer="L-BFGS",
    certificate=None,
    problems=(Problem("local", "retraining started at the trained weights.", "Pass start=."),),
)


def test_a_frame_has_a_row_per_model():
    frame = VALIDATION.to_frame().set_index("model")
    assert list(frame.index) == ["penalised", "control"]
    assert frame.loc["penalised"].to_dict() == vars(CLOSE)
    assert frame.loc["control"].to_dict() == vars(FAR)


def test_columns_of_a_frame_are_numbers_also_where_some_are_missing():
    without = replace(VALIDATION, penalised=replace(CLOSE, agreement=None), control=DIVERGED)
    frame = without.to_frame().drop(columns="model")
    assert {str(dtype) for dtype in frame.dtypes} == {"float64"}
    assert frame["agreement"].isna().all()


def test_the_figure_compares_both_models_measure_by_measure(tmp_path):
    figure = VALIDATION.plot()
    (axes,) = figure.get_axes()
    assert axes.get_xscale() == "log"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["classes that differ", "prediction error", "distance of weights"]
    penalised, control = (
        line.get_xdata() for line in axes.get_lines() if line.get_marker() in ("o", "s")
    )
    assert list(penalised) == pytest.approx([0.02, 0.03, 0.01])
    assert list(control) == pytest.approx([0.3, 0.4, 0.5])
    shown = " ".join(text.get_text().replace("\n", " ") for text in written(figure))
    assert "agrees with the original on 98.0% of the classes" in shown
    assert "Problems: local." in shown
    assert_ready_for_print(figure, tmp_path)


@pytest.mark.parametrize(
    ("penalised", "control"),
    [
        (CLOSE, DIVERGED),
        (DIVERGED, DIVERGED),
        (replace(CLOSE, prediction_error=0.0, relative_distance=0.0, agreement=1.0), FAR),
        (replace(CLOSE, prediction_error=None), replace(FAR, prediction_error=None)),
        (replace(CLOSE, relative_distance=math.nan), replace(FAR, relative_distance=math.nan)),
    ],
)
def test_models_that_diverged_or_are_the_same_are_at_an_end_of_the_axis(
    penalised, control, tmp_path
):
    figure = replace(VALIDATION, penalised=penalised, control=control).plot()
    low, high = figure.get_axes()[0].get_xlim()
    assert 0 < low < high < math.inf
    assert_ready_for_print(figure, tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_both_models_and_the_problems(format):
    text = VALIDATION.summary(format)
    for part in ("with the penalty", "control", "0.98", "0.7", "0.9250", "L-BFGS", "local"):
        assert part in text
    assert "Pass start=" in text
    assert VALIDATION._repr_html_() == VALIDATION.summary("html")
