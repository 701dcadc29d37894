"""One self-contained HTML page of all figures, with key numbers beside their expected values."""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

from tacit.errors import InputError
from tacit_paper import EXPERIMENTS, Check, find_experiment, plots
from tacit_paper.store import (
    Result,
    explain_missing_columns,
    finished_folders,
    read_result,
    write_atomically,
)

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d1d1f; background: #fff;
       max-width: 62rem; margin: 0 auto; padding: 1rem 1.2rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .6rem; }
figure { margin: 1rem 0; } img { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
figcaption { color: #3a3a3c; margin-top: .6rem; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; margin: .8rem 0; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid #e3e3e6;
         vertical-align: top; overflow-wrap: normal; }
@media (max-width: 40rem) { table { font-size: .8rem; } th, td { padding-right: .4rem; } }
.no { color: #b00020; font-weight: 600; } .yes { color: #1c7c3a; }
details { font-size: .9rem; color: #3a3a3c; } pre { white-space: pre-wrap; font-size: .85rem; }
nav a { margin-right: 1rem; } small { color: #6e6e73; }
"""


def write_page(out: Path) -> Path:
    """Write `index.html` with every finished result below a folder."""
    results, errors = [], []
    for folder in finished_folders(out):
        try:
            result = read_result(folder)
            find_experiment(result.metadata["experiment"])
            results.append(result)
        except InputError as error:
            errors.append(f"<p class='no'>{html.escape(str(error))}</p>")
    results.sort(
        key=lambda result: (
            result.metadata["preset"],
            EXPERIMENTS.index(result.metadata["experiment"]),
        )
    )
    sections = "\n".join(_section(result) for result in results)
    links = " ".join(f'<a href="#{_anchor(r)}">{html.escape(_label(r))}</a>' for r in results)
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>tacit: figures</title><style>{STYLE}</style></head><body>
<h1>tacit: the paper's figures</h1>
<p>Each figure of <cite>Estimating Implicit Regularization in Deep Learning</cite> (Rudoler, Tan,
Hooker &amp; Kording, 2026), reproduced as published and exactly, with its key numbers beside their
expected values.</p>
<nav>{links}</nav>
{"".join(errors)}
{sections or "<p>No finished results yet.</p>"}
</body></html>
"""
    path = out / "index.html"
    write_atomically(path, lambda partial: partial.write_text(text))
    return path


def _section(result: Result) -> str:
    experiment = find_experiment(result.metadata["experiment"])
    svg = _read_figure(result)
    image = base64.b64encode(svg).decode()
    title = html.escape(experiment.TITLE)
    caption = "".join(f"<p>{html.escape(p)}</p>" for p in experiment.CAPTION.strip().split("\n\n"))
    return f"""<section id="{_anchor(result)}">
<h2>{title} <small>{html.escape(_label(result))}</small></h2>
<figure><div class="scroll"><img alt="{title}" style="min-width: {_minimum_width(svg)}px"
src="data:image/svg+xml;base64,{image}"></div>
<figcaption>{caption}</figcaption></figure>
{_table(experiment.check(result.rows))}
<details><summary>Settings, versions and hashes ({result.metadata["rows"]:,} rows)</summary>
<pre>{html.escape(_settings(result.metadata))}</pre></details>
</section>"""


def _read_figure(result: Result) -> bytes:
    """The SVG of a result, drawn again where it is missing or incomplete."""
    path = result.folder / "figure.svg"
    if not path.is_file() or not path.read_bytes().rstrip().endswith(b"</svg>"):
        with explain_missing_columns(result.folder):
            figure = find_experiment(result.metadata["experiment"]).plot(result.rows)
        plots.save(figure, result.folder)
    return path.read_bytes()


def _minimum_width(svg: bytes) -> int:
    """Pixels below which a figure of many panels is scrolled and not shrunk further."""
    (width,) = re.findall(rb'<svg[^>]*? width="([\d.]+)pt"', svg)
    return int(0.9 * float(width)) if float(width) > 600 else 0


def _table(checks: list[Check]) -> str:
    header = "<tr><th>key number</th><th>value</th><th>expected</th><th>holds</th></tr>"
    lines = "\n".join(
        f"<tr><td>{html.escape(check.label)}</td><td>{check.value:.4g}</td>"
        f"<td>{html.escape(check.expected)}</td>"
        f'<td class="{"yes" if check.holds else "no"}">{"yes" if check.holds else "no"}</td></tr>'
        for check in checks
    )
    return f"<table>{header}\n{lines}</table>"


def _settings(metadata: dict[str, Any]) -> str:
    keys = ("preset", "config", "versions", "platform", "config_hash", "content_hash")
    return json.dumps({key: metadata.get(key) for key in keys}, indent=2)


def _label(result: Result) -> str:
    return f"{result.metadata['experiment']}, {result.metadata['preset']}"


def _anchor(result: Result) -> str:
    return f"{result.metadata['experiment']}-{result.metadata['preset']}"
