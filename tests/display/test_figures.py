"""Figures in a notebook and at any resolution."""

import random

import pytest

from tacit.display import figures

WORDS = ("retrained", "model's", "outputs", "7.5e-16", "relative", "weight_decay", "explains", "of")


def make_figure(title):
    with figures.style():
        figure = figures.new_figure(figures.COLUMN, 1.0)
        figures.set_title(figure, [title])
    return figure


@pytest.mark.parametrize("dpi", [72, 100, 150, 300])
def test_titles_are_whole_at_any_resolution(dpi):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    rng = random.Random(0)
    for _ in range(40):
        figure = make_figure(" ".join(rng.choices(WORDS, k=12)))
        figure.set_dpi(dpi)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        assert figure._suptitle.get_window_extent(renderer).x1 <= figure.bbox.x1


def test_a_notebook_shows_a_figure_as_the_last_line_of_a_cell():
    assert make_figure("a title")._repr_png_().startswith(b"\x89PNG")
