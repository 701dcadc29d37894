"""The quick reproduction of all figures: its page, and the commands that the documentation shows.

These tests are in one file because they share the reproduction, which takes minutes.
"""

import html
import json
import re
import struct
import subprocess
import sys
import tomllib
import zlib

import pytest
from support.browser import CHROMIUM, needs_browser
from support.pages import PAGES, ROOT, commands, name_of
from typer.testing import CliRunner

from tacit.cli import build_app
from tacit_paper import EXPERIMENTS, figure_plots, find_experiment, store
from tacit_paper.bootstrap.checks import crossovers, select
from tacit_paper.commands import add_commands

FIGURES = sum(len(figure_plots(find_experiment(name))) for name in EXPERIMENTS)
PROBE = """<script>addEventListener("load", () => { setTimeout(() => {
  const images = [...document.images].map(image => {
    const canvas = document.createElement("canvas"); canvas.width = canvas.height = 64;
    const context = canvas.getContext("2d"); context.drawImage(image, 0, 0, 64, 64);
    const pixels = context.getImageData(0, 0, 64, 64).data;
    return {width: image.naturalWidth, drawn: image.getBoundingClientRect().width,
            colours: new Set(pixels).size};
  });
  const scrollWidth = document.documentElement.scrollWidth;
  const font = getComputedStyle(document.body).fontSize;
  const claims = [...document.querySelectorAll(".claims tbody tr")].map(row => {
    const {bottom, right} = row.getBoundingClientRect();
    return {bottom, right, cut: [...row.cells].some(cell => cell.scrollWidth > cell.clientWidth)};
  });
  document.body.dataset.measured = JSON.stringify({images, claims, scrollWidth, font, innerWidth});
}, 300); });</script>"""


pytestmark = pytest.mark.slow


REPRODUCE = ["reproduce", "--preset", "quick", "--out", "results"]
"""The first documented command, at its quick preset."""


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """A folder whose `results` hold all experiments at their quick preset."""
    folder = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = CliRunner().invoke(build_app([add_commands]), REPRODUCE)
    assert run.exit_code == 0, run.output
    assert "  no: " not in run.output, run.output  # every key number holds
    return folder


@pytest.fixture
def page(reproduced):
    return reproduced / "results" / "index.html"


def browse(page, folder, *options):
    assert CHROMIUM is not None, "TACIT_REQUIRE_BROWSER is set, but there is no chromium"
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=20000",
            f"--user-data-dir={folder / 'profile'}", *options, page.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120, cwd=folder,
    )  # fmt: skip


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_every_figure_in_narrow_and_wide_windows(page, tmp_path, width):
    # Chromium opens no window narrower than 500 pixels, so the page is put into a frame.
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" width="{width}" height="5000" srcdoc="{html.escape(probed.read_text())}">'
        '</iframe><script>setInterval(() => { const page = document.getElementById("f").'
        "contentDocument.body; if (page.dataset.measured) document.body.dataset.measured = "
        "page.dataset.measured; }, 200);</script>"
    )
    browser = browse(frame, tmp_path, "--dump-dom", "--window-size=1400,900")
    assert "CONSOLE" not in browser.stderr, browser.stderr
    (attribute,) = re.findall(r'<body data-measured="([^"]*)"', browser.stdout)
    measured = json.loads(html.unescape(attribute))
    assert len(measured["images"]) == FIGURES
    for image in measured["images"]:
        assert image["width"] > 300
        assert image["drawn"] > 0.8 * min(width, image["width"])
        assert image["colours"] > 20, "a blank image"
    assert measured["scrollWidth"] <= measured["innerWidth"] == width, (
        "the page is wider than its window"
    )
    assert measured["font"] == "16px"
    rows = measured["claims"]
    assert len(rows) == sum(len(find_experiment(name).CLAIMS) for name in EXPERIMENTS)
    assert all(row["right"] <= width and not row["cut"] for row in rows)
    first_screen = [row for row in rows if row["bottom"] <= 800]
    assert len(first_screen) >= min(2, len(rows)), "the first screen is not the claims"


@needs_browser
def test_a_screenshot_of_the_page_is_not_blank(page, tmp_path):
    browse(page, tmp_path, "--window-size=1280,2400", "--screenshot=page.png")
    pixels = png_bytes(tmp_path / "page.png")
    assert len(set(pixels[:: len(pixels) // 50_000])) > 30


def png_bytes(path):
    """The decompressed bytes of a PNG's pixels, still filtered, to check that they vary."""
    content, offset, compressed = path.read_bytes(), 8, b""
    while offset < len(content):
        (size,) = struct.unpack(">I", content[offset : offset + 4])
        if content[offset + 4 : offset + 8] == b"IDAT":
            compressed += content[offset + 8 : offset + 8 + size]
        offset += 12 + size
    return zlib.decompress(compressed)


def test_the_page_refers_to_no_other_file(page):
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text)
    assert text.count("data:image/svg+xml;base64,") == FIGURES
    for word in ("expected", "holds", "config_hash", "Settings", "as published"):
        assert word in text


@pytest.fixture
def bootstrap_rows(reproduced):
    return store.read_result(reproduced / "results" / "quick" / "bootstrap").rows


def test_the_pairs_bootstrap_has_its_published_errors(bootstrap_rows):
    by_noise = select(bootstrap_rows, "F", "pairs").groupby("sigma").relative.mean()
    assert by_noise[10] == pytest.approx(0.62, abs=0.1)
    assert by_noise.is_monotonic_decreasing
    assert 5 < crossovers(bootstrap_rows)[0] < 7.5
    pools = select(bootstrap_rows, "E", "pairs").groupby("m").relative
    assert pools.median()[100] == pytest.approx(0.62, abs=0.1)
    assert pools.median().idxmax() in range(8, 13)
    assert pools.median().max() > 3  # far above the baseline of 1


def test_the_residual_bootstrap_is_exact_once_determined(bootstrap_rows):
    residual = select(bootstrap_rows, "E", "residual")
    assert residual[residual.m >= 11].relative.max() <= 1e-9
    assert residual[residual.m == 9].relative.min() > 0.2
    assert select(bootstrap_rows, "F", "residual").relative.max() <= 1e-9
    assert set(residual[residual.m >= 10]["rank"]) == {55}


def extras():
    """The names of the optional dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


# The commands of command-line.md, which write into the folder of examples, run in test_docs.py.
DOCUMENTED = [page for page in PAGES if list(commands(page)) and page.name != "command-line.md"]


def run_tacit(arguments, folder, monkeypatch):
    """Run the command in this process, which has imported what it needs, unless it has run."""
    if arguments == REPRODUCE:
        return
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        run = CliRunner().invoke(build_app(), arguments)
    assert run.exit_code == 0, f"tacit {arguments}: {run.output}"


@pytest.mark.parametrize("document", DOCUMENTED, ids=name_of)
def test_documented_commands_run_at_their_quick_presets(document, reproduced, monkeypatch):
    """Run each command in the folder of the reproduction, whose finished rows it reuses."""
    for command in commands(document):
        folder, arguments = reproduced, command
        if command[0] == "cd":  # cd FOLDER && …
            folder, arguments = ROOT / command[1], command[3:]
        if arguments[0] == "make":  # CI runs these; here each target must exist
            folder, program = ROOT, ["make", "--dry-run", *arguments[1:]]
        elif arguments[0] == "pip":  # `make wheel-test` installs; here each extra must exist
            assert set(re.findall(r"[\w-]+", arguments[-1].removeprefix("."))) <= set(extras())
            continue
        elif arguments[0] == "tacit":
            quick = ["quick" if word == "paper" else word for word in arguments[1:]]
            run_tacit(quick, folder, monkeypatch)
            continue
        elif arguments[0] in ("snakemake", "torchrun"):  # tests/workflow and test_docs.py run these
            continue
        elif arguments[0] == ".venv/bin/pre-commit":  # it would change the clone's git hooks
            program = [sys.executable, "-m", "pre_commit", arguments[1], "--help"]
        else:
            assert arguments[0] == "python", f"{arguments[0]} is not tested"
            program = [sys.executable, *arguments[1:]]
        run = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
