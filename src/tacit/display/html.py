"""A summary as a section of an HTML page for notebooks, and its parts for whole pages."""

from collections.abc import Iterable, Iterator
from html import escape

from tacit.display.contents import Column, Note, Row, Summary, Table

LEFT = ' style="text-align: left"'


def write_html(summary: Summary) -> str:
    """One <section> with the classes `tacit-…`; it has no style of its own."""
    lines = ['<section class="tacit-summary">']
    lines += [f'<p class="tacit-lead"><strong>{escape(t)}</strong></p>' for t in summary.lead]
    lines += _facts(summary)
    for table in summary.tables:
        lines += [write_table(table), *map(write_note, table.notes)]
    if summary.numbers:
        pairs = [pair for line in summary.numbers for pair in line]
        lines += [write_pairs(pairs, "tacit-pairs tacit-numbers")]
    lines += _problems(summary)
    return "\n".join([*lines, "</section>"])


def _facts(summary: Summary) -> Iterator[str]:
    """The title, which unfolds what the result is of."""
    if not summary.facts:
        yield f'<p class="tacit-title">{escape(summary.title)}</p>'
        return
    yield '<details class="tacit-facts">'
    yield f'<summary class="tacit-title">{escape(summary.title)}</summary>'
    yield write_pairs(summary.facts)
    yield "</details>"


def write_pairs(pairs: Iterable[tuple[str, str]], name: str = "tacit-pairs") -> str:
    """Labels and texts as a table of two columns, of the class `name`."""
    lines = [f'<table class="{name}"><tbody>']
    for label, text in pairs:
        parts = "<br>".join(escape(line) for line in text.split("\n"))
        lines.append(f'<tr><th scope="row"{LEFT}>{escape(label)}</th><td{LEFT}>{parts}</td></tr>')
    return "\n".join([*lines, "</tbody></table>"])


def write_table(table: Table) -> str:
    """A table without its notes; gaps begin a new body."""
    columns = table.columns
    heads = "".join(f'<th scope="col"{_align(c)}>{escape(c.label)}</th>' for c in columns)
    lines = ['<table class="tacit-table"><thead><tr>', heads, "</tr></thead><tbody>"]
    for place, row in enumerate(table.rows):
        if row:
            lines.append(_row(row, columns))
        elif place + 1 < len(table.rows):
            lines.append("</tbody><tbody>")
    return "\n".join([*lines, "</tbody></table>"])


def write_note(note: Note) -> str:
    """A note below a table, as a paragraph."""
    name = "tacit-detail" if note.is_detail else "tacit-note"
    return f'<p class="{name}">{escape(note.text)}</p>'


def _row(row: Row, columns: tuple[Column, ...]) -> str:
    if len(row) < len(columns):
        text = escape(row[0].strip())
        return f'<tr class="tacit-remark"><td colspan="{len(columns)}">{text}</td></tr>'
    first, *others = zip(row, columns, strict=True)
    cells = "".join(f"<td{_align(column)}>{escape(text)}</td>" for text, column in others)
    return f'<tr><th scope="row"{_align(first[1])}>{escape(first[0])}</th>{cells}</tr>'


def _align(column: Column) -> str:
    """Alignment is part of a table's meaning, so that it does not depend on a page's style."""
    return f' style="text-align: {column.align}"'


def _problems(summary: Summary) -> Iterator[str]:
    if summary.problems:
        yield '<ol class="tacit-problems">'
        for problem in summary.problems:
            kind, message, remedy = map(escape, (problem.kind, problem.message, problem.remedy))
            yield f"<li><strong>{kind}</strong>: {message} <em>{remedy}</em></li>"
        yield "</ol>"
    elif summary.no_problems:
        yield f'<p class="tacit-no-problems">{escape(summary.no_problems)}</p>'
    for finding in summary.findings:
        yield f'<p class="tacit-finding">Finding: {escape(finding)}</p>'
