"""The page of figures opens offline in a browser: no errors, no blank image, narrow and wide."""

import html
import json
import os
import re
import shutil
import struct
import subprocess
import zlib

import pytest

from tacit_paper import MODULES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("TACIT_REQUIRE_BROWSER"),
    reason="no chromium: install it with 'apt-get install chromium' to check the page",
)
PROBE = """<script>addEventListener("load", () => { setTimeout(() => {
  const images = [...document.images].map(image => {
    const canvas = document.createElement("canvas"); canvas.width = canvas.height = 64;
    const context = canvas.getContext("2d"); context.drawImage(image, 0, 0, 64, 64);
    const pixels = context.getImageData(0, 0, 64, 64).data;
    return {width: image.naturalWidth, shown: image.getBoundingClientRect().width,
            colours: new Set(pixels).size};
  });
  const wide = document.documentElement.scrollWidth;
  const font = getComputedStyle(document.body).fontSize;
  document.body.dataset.found = JSON.stringify({images, wide, font, inner: innerWidth});
}, 300); });</script>"""


@pytest.fixture(scope="module")
def page(reproduced):
    return reproduced / "results" / "index.html"


def browse(page, folder, *options):
    assert CHROMIUM is not None, "TACIT_REQUIRE_BROWSER is set, but there is no chromium"
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=5000",
            f"--user-data-dir={folder / 'profile'}", *options, page.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120, cwd=folder,
    )  # fmt: skip


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_whole_in_a_browser(page, tmp_path, width):
    # A window narrower than 500 pixels is not to be had: a frame of the width is.
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" width="{width}" height="5000" srcdoc="{html.escape(probed.read_text())}">'
        "</iframe><script>setTimeout(() => { document.body.dataset.found = "
        'document.getElementById("f").contentDocument.body.dataset.found; }, 2500);</script>'
    )
    found = browse(frame, tmp_path, "--dump-dom", "--window-size=1400,900")
    assert "CONSOLE" not in found.stderr, found.stderr
    (data,) = re.findall(r'<body data-found="([^"]*)"', found.stdout)
    seen = json.loads(html.unescape(data))
    assert len(seen["images"]) == len(MODULES)
    for image in seen["images"]:
        assert image["width"] > 300
        assert image["shown"] > 0.8 * min(width, 990)
        assert image["colours"] > 20, "a blank image"
    assert seen["wide"] <= seen["inner"] == width, "the page is wider than its window"
    assert seen["font"] == "16px"


@needs_browser
def test_a_screenshot_of_the_page_is_not_blank(page, tmp_path):
    browse(page, tmp_path, "--window-size=1280,2400", "--screenshot=page.png")
    pixels = png_bytes(tmp_path / "page.png")
    assert len(set(pixels[:: len(pixels) // 50_000])) > 30


def png_bytes(path):
    """The raw bytes of a PNG's pixels, filters and all: enough to see that they vary."""
    content, place, packed = path.read_bytes(), 8, b""
    while place < len(content):
        (size,) = struct.unpack(">I", content[place : place + 4])
        if content[place + 4 : place + 8] == b"IDAT":
            packed += content[place + 8 : place + 8 + size]
        place += 12 + size
    return zlib.decompress(packed)


def test_the_page_needs_nothing_from_outside(page):
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text)
    assert text.count("data:image/svg+xml;base64,") == len(MODULES)
    for word in ("expected", "holds", "config_hash", "Settings", "as published"):
        assert word in text
