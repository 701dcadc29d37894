"""What every page promises in a browser: it fits, it can be read, and it works by keyboard."""

import json
from html.parser import HTMLParser

MEASURE = """(() => {
  document.querySelectorAll("details").forEach(details => { details.open = true; });
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return {r, g, b, a};
  };
  const over = (top, bottom) => {
    const mix = key => top.a * top[key] + (1 - top.a) * bottom[key];
    return {r: mix("r"), g: mix("g"), b: mix("b"), a: 1};
  };
  const background = element => {
    if (!element) return {r: 255, g: 255, b: 255, a: 1};
    const own = parse(getComputedStyle(element).backgroundColor);
    return own.a === 1 ? own : over(own, background(element.parentElement));
  };
  const luminance = ({r, g, b}) => {
    const [R, G, B] = [r, g, b].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * R + 0.7152 * G + 0.0722 * B;
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), element = node.parentElement;
    if (!node.data.trim() || !box.width || box.right < 0) continue;
    const style = getComputedStyle(element), back = background(element);
    const lights = [over(parse(style.color), back), back].map(luminance);
    const ratio = (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
    const boxed = element.closest(".scroll");
    texts.push({text: node.data.trim().slice(0, 60), ratio, size: parseFloat(style.fontSize),
                bottom: box.bottom, right: boxed ? 0 : box.right});
  }
  const boxes = [...document.querySelectorAll(".scroll")].map(box => ({
    label: box.getAttribute("aria-label"), role: box.getAttribute("role"),
    tabindex: box.tabIndex, right: box.getBoundingClientRect().right,
    wide: box.scrollWidth > box.clientWidth + 1, overflow: getComputedStyle(box).overflowX,
  }));
  const figures = [...document.querySelectorAll("svg[role=img], img")].map(figure => {
    const {width, height, right} = figure.getBoundingClientRect();
    const boxed = figure.closest(".scroll");
    return {width, height, right: boxed ? 0 : right,
            label: figure.getAttribute("aria-label") || figure.getAttribute("alt")};
  });
  return JSON.stringify({texts, boxes, figures, innerWidth,
                         scrollWidth: document.documentElement.scrollWidth});
})()"""
FOCUSED = """(() => {
  const element = document.activeElement, style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  return JSON.stringify({tag: element.tagName, name: element.className || "",
    text: element.getAttribute("aria-label") || element.textContent.trim().slice(0, 60),
    outline: style.outlineStyle, width: parseFloat(style.outlineWidth), x: box.x, y: box.y,
    shown: box.right > 0 && box.bottom > 0 && box.top < innerHeight});
})()"""


def check_page(browser, path, *, width, dark):
    """Check a page in a window of this width and a colour scheme; what was measured."""
    browser.open(path, width=width, dark=dark)
    measured = json.loads(browser.run(MEASURE))
    assert browser.messages == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert measured["innerWidth"] == width
    assert measured["scrollWidth"] <= width, "the page is wider than its window"
    assert measured["texts"]
    for text in measured["texts"]:
        assert text["ratio"] >= 4.5, text  # level AA, also for large letters
        assert text["size"] >= 11, text
        assert text["right"] <= width + 1, text
    for box in measured["boxes"]:
        assert (box["role"], box["tabindex"], box["overflow"]) == ("region", 0, "auto"), box
        assert box["label"], box
        assert box["right"] <= width + 1, box
    for figure in measured["figures"]:
        assert figure["label"], figure
        assert figure["right"] <= width + 1, figure
        assert min(figure["width"], figure["height"]) > 60, figure
    return measured


def check_keyboard(browser, path, *, width=1280):
    """Tab through a page: the skip link first, then everything in order, each with a frame."""
    browser.open(path, width=width)
    count = browser.run(
        "[...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')]"
        ".filter(e => !e.closest('details:not([open]) > :not(summary)')).length"
    )
    stops = []
    for _ in range(count):
        browser.press_tab()
        stops.append(json.loads(browser.run(FOCUSED)))
    assert stops[0]["name"] == "skip"
    assert len({(stop["tag"], stop["text"]) for stop in stops}) > 1
    for stop in stops:
        assert stop["tag"] != "BODY", stop
        assert stop["shown"], stop
        assert stop["outline"] not in ("none", ""), stop
        assert stop["width"] >= 2, stop
    return stops


class Tags(HTMLParser):
    """All tags of a page with their attributes, its text, and the text of its headings."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.headings, self._inside = [], "", [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("style", "script") else ""
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((int(tag[1]), self.get_starttag_text()))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if not self._inside:
            self.text += data
