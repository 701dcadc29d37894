"""Reports in Chromium: they fit any window, can be read in both schemes, and work by keyboard."""

import pytest
from support.browser import Browser, needs_browser
from support.page_checks import check_keyboard, check_page
from support.reports import RESULTS

import tacit

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The path of a report of every result."""
    folder = tmp_path_factory.mktemp("reports")
    return {name: tacit.report(make(), folder / f"{name}.html") for name, make in RESULTS.items()}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", RESULTS)
def test_a_report_can_be_read(browser, reports, name, width, dark):
    measured = check_page(browser, reports[name], width=width, dark=dark)
    # The verdict is on the first screen, also of a phone.
    sentence = browser.run("document.querySelector('.sentence').textContent")
    shown = next(text for text in measured["texts"] if text["text"] == sentence[:60])
    assert shown["bottom"] <= 640
    badge = browser.run("document.querySelector('.verdict').getBoundingClientRect().bottom")
    assert badge <= 740
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (not dark)


@pytest.mark.parametrize("name", ["doubtful", "screen"])
def test_a_wide_table_is_scrolled_by_itself_on_a_phone(browser, reports, name):
    measured = check_page(browser, reports[name], width=360, dark=False)
    assert any(box["wide"] for box in measured["boxes"])


@pytest.mark.parametrize("name", RESULTS)
def test_everything_is_reached_by_keyboard(browser, reports, name):
    stops = check_keyboard(browser, reports[name])
    labels = [stop["text"] for stop in stops]
    assert "versions" in labels
    assert {stop["tag"] for stop in stops} >= {"A", "DIV"}


def test_the_skip_link_goes_to_the_content(browser, reports):
    browser.open(reports["good"])
    assert browser.run("document.querySelector('.skip').getBoundingClientRect().right") < 0
    browser.press_tab()
    assert browser.run("document.activeElement.getBoundingClientRect().right") > 100
    browser.run("document.activeElement.click()")
    assert browser.run("location.hash") == "#content"
    assert browser.run("document.activeElement.id") == "content"


def test_figures_are_drawn_and_turned_light_on_dark(browser, reports, tmp_path):
    for dark in (False, True):
        browser.open(reports["good"], dark=dark)
        script = "getComputedStyle(document.querySelector('svg[role=img]')).filter"
        assert ("invert" in browser.run(script)) == dark
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000  # a blank one has 5,000


def test_on_paper_everything_is_open_and_black_on_white(browser, reports):
    assert len(browser.pdf()) > 10_000
    browser.open(reports["screen"], dark=True)
    closed = browser.run("document.documentElement.scrollHeight")
    browser.emulate_print(dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('.skip')).display") == "none"
    assert browser.run("document.documentElement.scrollHeight") > closed + 300
