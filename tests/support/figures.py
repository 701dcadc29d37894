"""What every figure for a paper promises."""

from unittest import mock

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tacit.display.figures import PAGE, SMALL


def written(figure):
    """The texts of a figure that are drawn, without empty ones."""
    drawn, draw = [], mpl.text.Text.draw

    def record(text, renderer):
        drawn.append(text)
        draw(text, renderer)

    with mock.patch.object(mpl.text.Text, "draw", record):
        figure.draw(FigureCanvasAgg(figure).get_renderer())
    return [text for text in drawn if text.get_visible() and text.get_text().strip()]


def assert_ready_for_print(figure, tmp_path):
    """Fonts of 7 points or more, nothing clipped, no text on another, fonts in the PDF."""
    shown = []
    for text in written(figure):
        box = text.get_window_extent()
        assert text.get_fontsize() >= SMALL, text
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
        if text.get_rotation() in (0, 90):  # of others the box is larger than the letters
            shown.append((text, box.expanded(0.9, 0.8)))
    for number, (text, box) in enumerate(shown):
        others = [other for other, other_box in shown[:number] if box.overlaps(other_box)]
        assert not others, (text, others)
    assert figure.get_figwidth() <= PAGE
    path = tmp_path / "figure.pdf"
    with mpl.rc_context({"pdf.fonttype": 3, "font.size": 30, "savefig.bbox": "tight"}):
        figure.savefig(path)
    content = path.read_bytes()
    assert b"/FontFile2" in content  # embedded, as whole letters
    assert b"/Type3" not in content
    (width,) = {float(box.split()[2]) for box in _boxes(content)}
    assert width == pytest.approx(72 * figure.get_figwidth(), abs=0.1)


def _boxes(content):
    for part in content.split(b"/MediaBox [")[1:]:
        yield part.split(b"]")[0].decode()
