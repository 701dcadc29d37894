"""A summary as a table environment of LaTeX, for any engine, with the package booktabs."""

import re
import unicodedata
from collections.abc import Iterable, Iterator

from tacit.display.contents import Row, Summary, Table

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
    "…": r"\dots{}", "–": "--", "—": "---", "†": r"\dag{}",
    "[": "{[}", "]": "{]}", "\u00a0": "~", "\u202f": r"\,", "’": "'", "“": "``", "”": "''",
}  # fmt: skip
"""Brackets are in braces because one that follows a line break would be its argument."""
SYMBOLS = {
    "−": "-", "±": r"\pm", "×": r"\times", "·": r"\cdot", "∇": r"\nabla", "∂": r"\partial",
    "√": r"\surd", "∞": r"\infty", "∫": r"\int", "‖": r"\Vert", "⟨": r"\langle", "⟩": r"\rangle",
    "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "≈": r"\approx", "≫": r"\gg", "≪": r"\ll",
    "⪰": r"\succeq", "≻": r"\succ", "→": r"\to", "←": r"\leftarrow", "↦": r"\mapsto",
    "∘": r"\circ", "⊙": r"\odot", "∗": r"\ast", "ℓ": r"\ell", "′": "'", "″": "''",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
}  # fmt: skip
MINUS = re.compile(r"(?<![\w.\])}])-(?=[\d.])")
"""A hyphen that is the sign of a number."""
COMBINING = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar", "\u0307": "dot"}
LIKE_LATIN = {
    "Alpha": "A", "Beta": "B", "Epsilon": "E", "Zeta": "Z", "Eta": "H", "Iota": "I", "Kappa": "K",
    "Mu": "M", "Nu": "N", "Omicron": "O", "Rho": "P", "Tau": "T", "Chi": "X", "omicron": "o",
}  # fmt: skip
"""Greek letters that LaTeX has no command for."""


def write_latex(summary: Summary) -> str:
    r"""A table with the lead as its caption, and notes and problems below it in small print.

    It needs \usepackage{booktabs}.
    """
    lines = [r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering"]
    if summary.lead:
        lines.append(f"\\caption{{{escape(' '.join(summary.lead))}}}")
    for table in summary.tables:
        lines += [*_table(table), *_small(escape(note.text) for note in table.notes)]
    facts = [f"{escape(label)}: {escape(text)}" for label, text in summary.facts]
    numbers = [" ".join(map(escape, pair)) for line in summary.numbers for pair in line]
    about = [f"{'; '.join([escape(summary.title), *facts])}."]
    lines += _small([*about, *([f"{', '.join(numbers)}."] if numbers else []), *_problems(summary)])
    return "\n".join([*lines, r"\end{table}"])


def escape(text: str) -> str:
    """The text for LaTeX in any engine: letters of Latin script as they are, symbols as commands.

    Characters that fonts of LaTeX do not have, such as Chinese ones, become their numbers.
    """
    parts: list[str] = []
    for character in MINUS.sub("−", " ".join(text.split())):
        command = COMBINING.get(character)
        if command is not None and parts:
            parts[-1] = _accent(parts[-1], command)
        else:
            parts.append(_escape_character(character))
    return "".join(parts)


def _accent(letter: str, command: str) -> str:
    """The accent over a letter of any alphabet; other characters do not have one."""
    body = letter[len(r"\ensuremath{") : -1] if letter.startswith(r"\ensuremath{") else letter
    if not re.fullmatch(r"\\?[A-Za-z]+", body):
        return letter
    return f"\\ensuremath{{\\{command}{{{body}}}}}"


def _escape_character(character: str) -> str:
    if character in SPECIAL:
        return SPECIAL[character]
    if character in SYMBOLS:
        return f"\\ensuremath{{{SYMBOLS[character]}}}"
    if character.isascii():
        return character
    name, plain = unicodedata.name(character, ""), unicodedata.normalize("NFKD", character)
    if name.startswith("GREEK ") and len(plain) == 1:
        letter = name.split()[-1].replace("LAMDA", "LAMBDA")
        letter = letter.title() if "CAPITAL" in name else letter.lower()
        return f"\\ensuremath{{{LIKE_LATIN.get(letter, f'{chr(92)}{letter}')}}}"
    for kind, mark in (("SUPERSCRIPT", "^"), ("MODIFIER LETTER", "^"), ("SUBSCRIPT", "_")):
        if kind in name and plain != character:
            return f"\\ensuremath{{{mark}{{{plain.replace('−', '-')}}}}}"
    if name.startswith("LATIN ") and ord(character) < 0x180:
        return character
    return f"{{[}}U+{ord(character):04X}{{]}}"


def _table(table: Table) -> Iterator[str]:
    columns = table.columns
    yield f"\\begin{{tabular}}{{{''.join(column.align[0] for column in columns)}}}"
    yield r"\toprule"
    yield _row(tuple(column.label for column in columns))
    yield r"\midrule"
    for place, row in enumerate(table.rows):
        if len(row) == len(columns):
            yield _row(row)
        elif row:
            yield f"\\multicolumn{{{len(columns)}}}{{l}}{{\\emph{{{escape(row[0])}}}}} \\\\"
        elif place + 1 < len(table.rows):
            yield r"\addlinespace"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _small(paragraphs: Iterable[str]) -> Iterator[str]:
    """Paragraphs in small print."""
    if lines := [f"{text}\\par" for text in paragraphs if text]:
        yield r"\par\medskip"
        yield r"\begin{minipage}{\linewidth}\footnotesize\raggedright"
        yield from lines
        yield r"\end{minipage}"


def _row(cells: Row) -> str:
    return f"{' & '.join(map(escape, cells))} \\\\"


def _problems(summary: Summary) -> Iterator[str]:
    if not summary.problems:
        yield escape(summary.no_problems)
    for number, problem in enumerate(summary.problems, 1):
        kind, message, remedy = map(escape, (problem.kind, problem.message, problem.remedy))
        yield f"({number}) \\textbf{{{kind}}}: {message} \\emph{{{remedy}}}"
    for finding in summary.findings:
        yield f"Finding: {escape(finding)}"
