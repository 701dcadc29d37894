"""One self-contained HTML page for a result."""

import os
from html import escape
from pathlib import Path

from tacit.atomic import write_atomically
from tacit.display.page import write_page
from tacit.errors import InputError, check_type
from tacit.fitting.fits import Fit
from tacit.identifiability.screening import Screen
from tacit.reporting.fit_report import fit_contents
from tacit.reporting.parts import Contents, Section
from tacit.reporting.screen_report import screen_contents
from tacit.reporting.validation_report import validation_contents
from tacit.reporting.watch_report import watch_contents
from tacit.validation.retraining import Validation
from tacit.watching.training_watch import Watch

Reportable = Fit | Screen | Watch | Validation


def report(result: Reportable, path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Write one HTML page about a result: verdict, tables, figures, layers, problems, method.

    The page needs no other file and no network: send it by mail, or open it in any browser, on a
    phone too. It is written completely or not at all. Figures are drawn with matplotlib.

    Trap: of an endpoint or a difference whose objective is in memory, the page shows the gradients
    of all parameters, which takes the passes over the data that the equations took.

    Args:
        result: a fit, a screen, a watch that has rows, or a validation.
        path: the file, which is replaced.
        title: the heading, such as the model's name; by default what kind of result it is.

    >>> import tacit, tempfile, torch
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(y.T / 1.5)  # the optimum of mse_loss + 0.25 ‖θ‖²
    >>> fit = tacit.estimate(model, torch.nn.functional.mse_loss, (X, y), [tacit.l2()])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(fit, f"{folder}/report.html").read_text()
    >>> "l2 explains 100.0 % of the target." in page
    True
    """
    check_type("path", path, (str, os.PathLike), "the path of an HTML file to write")
    check_type("title", title, str, "a text, or nothing")
    page = write_report(result, title=title).encode(errors="backslashreplace")
    remedy = "Pass the path of a file, in a folder that exists and has space."
    write_atomically(path, lambda partial: partial.write_bytes(page), remedy=remedy)
    return Path(path)


def write_report(result: Reportable, *, title: str = "") -> str:
    """The page of `report`, as text."""
    contents = _contents(result)
    heading = title or contents.title
    body = [
        f'<p class="kind">tacit report · {escape(contents.kind)}</p>',
        f"<h1>{escape(heading)}</h1>",
        _answer(contents),
        _links(contents.sections),
        *map(_section, contents.sections),
    ]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return write_page(f"{heading} · tacit", "\n".join(body), style=style)


def _contents(result: Reportable) -> Contents:
    if isinstance(result, Fit):
        return fit_contents(result)
    if isinstance(result, Screen):
        return screen_contents(result)
    if isinstance(result, Watch):
        return watch_contents(result)
    if isinstance(result, Validation):
        return validation_contents(result)
    raise InputError(
        f"report was given a {type(result).__name__}: pass what tacit.estimate, tacit.fit, "
        "tacit.screen, tacit.watch or tacit.validate returns."
    )


def _answer(contents: Contents) -> str:
    """The box at the top: the question, whether to believe the answer, and the answer."""
    verdict = contents.verdict
    badge = escape(verdict.badge)
    if verdict.tone != "good" and any(s.name == "problems" for s in contents.sections):
        badge = f'<a href="#problems">{badge}</a>'
    further = "\n".join(f"<p>{escape(text)}</p>" for text in verdict.further)
    return (
        f'<div class="answer {verdict.tone}">\n<p class="soft">{escape(verdict.question)}</p>\n'
        f'<p class="sentence">{escape(verdict.sentence)}</p>\n'
        f'<p><span class="verdict {verdict.tone}">{badge}</span></p>\n{further}</div>'
    )


def _links(sections: tuple[Section, ...]) -> str:
    items = "\n".join(f'<li><a href="#{s.name}">{escape(s.heading)}</a></li>' for s in sections)
    return f'<nav class="contents" aria-label="Contents"><ul>{items}</ul></nav>'


def _section(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-heading">\n'
        f'<h2 id="{section.name}-heading">{escape(section.heading)}</h2>\n'
        f"{section.content}\n</section>"
    )
