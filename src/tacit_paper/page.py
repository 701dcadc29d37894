"""One self-contained HTML page of all figures, with key numbers beside their expected values."""

import base64
import html
import json
import re
from pathlib import Path
from string import Template

from tacit.errors import InputError
from tacit_paper import EXPERIMENTS, Check, find_experiment, plots, read_text, store
from tacit_paper.store import Result


def write_page(out: Path) -> Path:
    """Write `index.html` with every finished result below a folder."""
    sections, errors = [], []
    for folder in store.finished_folders(out):
        try:
            result = store.read_result(folder)
            sections.append((result, _section(result)))
        except InputError as error:
            errors.append(f"<p class='no'>{html.escape(str(error))}</p>")
    sections.sort(key=lambda section: _order(section[0]))
    links = " ".join(f'<a href="#{_name(r, "-")}">{_name(r, ", ")}</a>' for r, _ in sections)
    shown = "\n".join(text for _, text in sections) or "<p>No finished results yet.</p>"
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    text = template.substitute(links=links, errors="".join(errors), sections=shown)
    content = text.encode(errors="backslashreplace")  # names of folders need not be text
    with store.locked(out):
        store.write(out / "index.html", lambda partial: partial.write_bytes(content))
    return out / "index.html"


def _order(result: Result) -> tuple[str, int]:
    return result.metadata["preset"], EXPERIMENTS.index(result.metadata["experiment"])


def _section(result: Result) -> str:
    experiment = find_experiment(result.metadata["experiment"])
    with plots.report_other_rows(result):
        table = _table(experiment.check(result.rows))
    svg = _read_figure(result)
    image = base64.b64encode(svg).decode()
    text = read_text(experiment)
    title = html.escape(text.title)
    caption = "".join(
        f"<p>{html.escape(paragraph)}</p>" for paragraph in (text.caption, *text.details)
    )
    keys = ("preset", "config", "versions", "platform", "config_hash", "content_hash")
    settings = json.dumps({key: result.metadata.get(key) for key in keys}, indent=2)
    return f"""<section id="{_name(result, "-")}">
<h2>{title} <small>{_name(result, ", ")}</small></h2>
<figure><div class="scroll"><img alt="{title}" style="min-width: {_minimum_width(svg)}px"
src="data:image/svg+xml;base64,{image}"></div>
<figcaption>{caption}</figcaption></figure>
{table}
<details><summary>Settings, versions and hashes ({result.metadata["rows"]:,} rows)</summary>
<pre>{html.escape(settings)}</pre></details>
</section>"""


def _read_figure(result: Result) -> bytes:
    """The SVG of a result, drawn again where it is missing or incomplete."""
    path = result.folder / "figure.svg"
    if not path.is_file() or not path.read_bytes().rstrip().endswith(b"</svg>"):
        with store.locked(result.folder):
            plots.draw(result)
    return path.read_bytes()


def _minimum_width(svg: bytes) -> int:
    """Pixels below which a figure of many panels is scrolled and not shrunk further."""
    found = re.search(rb'<svg[^>]*? width="(\d{1,5}(?:\.\d+)?)pt"', svg)
    width = float(found[1]) if found else 0
    return int(0.9 * width) if width > 600 else 0


def _table(checks: list[Check]) -> str:
    lines = ["<tr><th>key number</th><th>value</th><th>expected</th><th>holds</th></tr>"]
    for check in checks:
        label, expected = html.escape(check.label), html.escape(check.expected)
        holds = "yes" if check.holds else "no"
        numbers = f"<td>{check.value:.4g}</td><td>{expected}</td>"
        lines.append(f'<tr><td>{label}</td>{numbers}<td class="{holds}">{holds}</td></tr>')
    body = "\n".join(lines)
    return f"<table>{body}</table>"


def _name(result: Result, separator: str) -> str:
    return html.escape(f"{result.metadata['experiment']}{separator}{result.metadata['preset']}")
