"""One self-contained HTML page: the paper's claims with their verdicts, then all figures."""

import base64
import html
import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

from tacit.display.page import scroll_box
from tacit.display.page import write_page as write_html_page
from tacit.errors import InputError
from tacit_paper import (
    Check,
    Experiment,
    figure_plots,
    find_experiment,
    plots,
    read_text,
    store,
    verdicts,
)
from tacit_paper.slips import SLIPS
from tacit_paper.store import Result
from tacit_paper.verdicts import Verdict

TITLE = "tacit: the paper, claim by claim"
SETTINGS = ("preset", "device", "config", "versions", "platform", "config_hash", "content_hash")
"""What the page shows of the metadata of a result."""


class Shown(NamedTuple):
    """A result, as HTML, with the claims that its rows decide."""

    result: Result
    images: list[str]
    numbers: str
    verdicts: list[Verdict]


def write_page(out: Path) -> Path:
    """Write `index.html` with every finished result below a folder."""
    shown, errors = [], []
    for folder in store.finished_folders(out):
        try:
            shown.append(_show(store.read_result(folder)))
        except InputError as error:
            errors.append(f"<p class='no'>{html.escape(str(error))}</p>")
    shown.sort(key=lambda one: verdicts.order(one.result))
    groups = {name: list(group) for name, group in groupby(shown, key=_experiment)}
    claims = verdicts.complete({name: group[0].verdicts for name, group in groups.items()})
    sections = "\n".join(_section(name, group) for name, group in groups.items())
    body = Template(_read_beside("page.html")).substitute(
        summary=html.escape(verdicts.summarise(claims)),
        claims="\n".join(_claim(claim, linked=claim.experiment in groups) for claim in claims),
        links="\n".join(f"<li>{_link(name, _heading(name))}</li>" for name in groups),
        errors="".join(errors),
        sections=sections or "<p>No finished results yet.</p>",
        slips="\n".join(
            f"<li><b>{_prose(slip.place)}.</b> {_prose(slip.text)}</li>" for slip in SLIPS
        ),
    )
    text = write_html_page(TITLE, body, style=_read_beside("page.css"))
    content = text.encode(errors="backslashreplace")  # names of folders need not be text
    with store.locked(out):
        store.write(out / "index.html", lambda partial: partial.write_bytes(content))
    return out / "index.html"


def _read_beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _show(result: Result) -> Shown:
    experiment = find_experiment(result.metadata["experiment"])
    with plots.report_other_rows(result):
        checks = experiment.check(result.rows)
    images = [_image(_read_figure(result, name), experiment) for name in figure_plots(experiment)]
    return Shown(result, images, _key_numbers(checks), verdicts.judge(result))


def _experiment(shown: Shown) -> str:
    return shown.result.metadata["experiment"]


def _prose(text: str) -> str:
    """A text of a docstring or a claim: backticks are code, and no line ends inside `η ≤ 5 %`."""
    unbroken = re.sub(r" (?=[%≤≥≈])|(?<=[≤≥≈]) ", "\N{NO-BREAK SPACE}", html.escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", unbroken)


def _heading(name: str) -> str:
    experiment = find_experiment(name)
    return f"{experiment.FIGURE} · {read_text(experiment).title}"


def _link(name: str, text: str) -> str:
    return f'<a href="#{html.escape(name)}">{html.escape(text)}</a>'


def _claim(verdict: Verdict, *, linked: bool) -> str:
    """A line of the table: claim, verdict, numbers and figure."""
    claim, figure = verdict.claim, find_experiment(verdict.experiment).FIGURE
    size = (
        ""
        if verdict.preset in ("", "paper")
        else f" <small>{_prose(verdict.preset)}&nbsp;size</small>"
    )
    caveat = f'<small class="caveat">{_prose(verdict.caveat)}</small>' if verdict.caveat else ""
    place = "" if claim.place == figure else f"<small>{_prose(claim.place)}</small>"
    state = html.escape(verdict.state)
    link = _link(verdict.experiment, figure) if linked else html.escape(figure)
    return f"""<tr><td class="claim">{_prose(claim.statement)} {place}</td>
<td><span class="verdict {state.replace(" ", "-")}">{state}</span></td>
<td class="number">{_prose(verdict.number)}{size}{caveat}</td>
<td class="figure">{link}</td></tr>"""


def _section(name: str, shown: Sequence[Shown]) -> str:
    """An experiment: its text, the result that decides, and the other sizes folded."""
    text = read_text(find_experiment(name))
    first, *others = shown
    figure, *more = first.images
    details = "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in text.details)
    folded = f"<details><summary>Details</summary>{details}</details>" if details else ""
    rest = "\n".join(
        f"<details class='other'><summary>The same at {_size(one.result)}</summary>\n"
        + "\n".join(one.images) + f"\n{one.numbers}\n{_settings(one.result)}</details>"
        for one in others
    )  # fmt: skip
    return f"""<section id="{html.escape(name)}">
<h2>{html.escape(_heading(name))} <small>{_size(first.result)}</small></h2>
<figure>{figure}
<figcaption>{_prose(text.caption)}</figcaption></figure>
{"".join(more)}
{folded}
{first.numbers}
{_settings(first.result)}
{rest}
</section>"""


def _size(result: Result) -> str:
    return html.escape(f"{result.metadata['preset']} size")


def _settings(result: Result) -> str:
    """Settings, versions and hashes, folded; the versions that matter most are outside."""
    versions = result.metadata.get("versions") or {}
    tacit = versions.get("tacit", "not installed").replace("not installed", "without a version")
    made_with = html.escape(f"tacit {tacit}, torch {versions.get('torch')}")
    settings = json.dumps({key: result.metadata.get(key) for key in SETTINGS}, indent=2)
    return f"""<details><summary>Settings, versions and hashes ({result.metadata["rows"]:,} rows,
{made_with})</summary><pre>{html.escape(settings)}</pre></details>"""


def _image(svg: bytes, experiment: Experiment) -> str:
    title, image = html.escape(read_text(experiment).title), base64.b64encode(svg).decode()
    least, most = _widths(svg)
    content = f"""<img alt="{title}" decoding="async"
style="min-width: {least}px; max-width: {most}px"
src="data:image/svg+xml;base64,{image}">"""
    return scroll_box(content, f"figure: {read_text(experiment).title}")


def _read_figure(result: Result, name: str) -> bytes:
    """An SVG of a result, drawn again where it is missing or incomplete."""
    path = result.folder / f"{name}.svg"
    if not path.is_file() or not path.read_bytes().rstrip().endswith(b"</svg>"):
        with store.locked(result.folder):
            plots.draw(result)
    return path.read_bytes()


def _widths(svg: bytes) -> tuple[int, int]:
    """The least and the largest width of a figure in pixels, from its own in points.

    A figure of many panels is scrolled where it would become too small to read, and one of few is
    not enlarged by more than a quarter.
    """
    found = re.search(rb'<svg[^>]*? width="(\d{1,5}(?:\.\d+)?)pt"', svg)
    points = float(found[1]) if found else 600
    return int(0.9 * points) if points > 600 else 0, int(points * 1.25 * 4 / 3)


def _key_numbers(checks: Sequence[Check]) -> str:
    """Key numbers beside their expected values, folded; how many hold is outside."""
    held = sum(check.holds for check in checks)
    missed = f" <span class='no'>{len(checks) - held} do not</span>" if held < len(checks) else ""
    lines = ["<tr><th>key number</th><th>value</th><th>expected</th><th>holds</th></tr>"]
    for check in checks:
        label, expected = html.escape(check.label), html.escape(check.expected)
        numbers = f"<td>{check.value:.4g}</td><td>{expected}</td>"
        shade = "yes" if check.holds else "no"
        lines.append(f'<tr><td>{label}</td>{numbers}<td class="{shade}">{check.answer}</td></tr>')
    body = "\n".join(lines)
    summary = f"Key numbers: {held} of {len(checks)} hold{',' if missed else ''}{missed}"
    table = scroll_box(f"<table>{body}</table>", "key numbers")
    return f"<details><summary>{summary}</summary>{table}</details>"
