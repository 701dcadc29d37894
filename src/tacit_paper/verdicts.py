"""The paper's claims: verdicts, and the numbers of stored rows that decide them.

`python -m tacit_paper.verdicts` in the root of a clone writes `docs/claims.md` again, from
the rows in `results/paper`. A test compares.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tacit_paper import EXPERIMENTS, Claim, Evidence, find_experiment, plots, read_text, store
from tacit_paper.slips import SLIPS
from tacit_paper.store import Result

PRESETS = ("paper", "quick")
"""Sizes of results, the one that decides first."""
STATES = {
    "holds": ("holds", "hold"),
    "holds with a caveat": ("holds with a caveat", "hold with a caveat"),
    "artefact": ("is an artefact", "are artefacts"),
    "not tested": ("is not tested", "are not tested"),
    "not at this size": ("does not show at this size", "do not show at this size"),
    "no rows": ("has no rows here", "have no rows here"),
    "rows disagree": ("disagrees with the rows", "disagree with the rows"),
}
"""What is said of a claim, and of one or several of them in a sentence."""
INTRODUCTION = """# The paper's claims

What *Estimating Implicit Regularization in Deep Learning* says, whether it holds, and the numbers
that decide it, computed from the rows in `results/paper/`. `tacit claims results` prints the same
claims, and the page `results/index.html` has them above the figures. An artefact is a result that
the published protocol produces, and the exact solution of the same equations does not.
"""
"""The beginning of `docs/claims.md`."""


class Verdict(NamedTuple):
    """A claim beside the numbers of some rows."""

    experiment: str
    claim: Claim
    preset: str = ""
    """Size of the rows; empty where there are none."""
    evidence: Evidence | None = None

    @property
    def state(self) -> str:
        """The claim's verdict where these rows support it, else why it cannot be said of them.

        Rows of the paper's size that contradict the verdict are an error; a smaller size need not
        show what the paper's shows.
        """
        if self.claim.verdict == "not tested" or (self.evidence and self.evidence.agrees):
            return self.claim.verdict
        if self.preset not in ("", "paper"):
            return "not at this size"
        return "rows disagree" if self.evidence else "no rows"

    @property
    def number(self) -> str:
        """The deciding numbers, in words; empty where there are none."""
        return self.evidence.text if self.evidence else ""

    @property
    def caveat(self) -> str:
        """What limits the verdict, where it is said."""
        return self.claim.caveat if self.state == self.claim.verdict else ""


def judge(result: Result) -> list[Verdict]:
    """The claims of a result's experiment, measured on its rows."""
    name, preset = result.metadata["experiment"], result.metadata["preset"]
    with plots.report_other_rows(result):
        return [
            Verdict(name, c, preset, c.measure(result.rows)) for c in find_experiment(name).CLAIMS
        ]


def order(result: Result) -> tuple[int, int]:
    """Sorts results: experiments as in the paper, and the size that decides first."""
    preset = result.metadata["preset"]
    size = PRESETS.index(preset) if preset in PRESETS else len(PRESETS)
    return EXPERIMENTS.index(result.metadata["experiment"]), size


def complete(judged: Mapping[str, list[Verdict]]) -> list[Verdict]:
    """All claims in the paper's order: those of experiments without rows have no number."""
    return [
        verdict
        for name in EXPERIMENTS
        for verdict in judged.get(name, [Verdict(name, c) for c in find_experiment(name).CLAIMS])
    ]


def gather(out: Path) -> list[Verdict]:
    """All claims with the numbers of the finished results below a folder."""
    results = [store.read_result(folder) for folder in store.finished_folders(out)]
    judged = [(result, judge(result)) for result in results]
    judged.sort(key=lambda pair: order(pair[0]), reverse=True)
    return complete({result.metadata["experiment"]: verdicts for result, verdicts in judged})


def summarise(verdicts: Sequence[Verdict]) -> str:
    """One sentence: how many claims there are, and what is said of how many."""
    counts = Counter(verdict.state for verdict in verdicts)
    parts = [f"{counts[s]} {words[counts[s] > 1]}" for s, words in STATES.items() if counts[s]]
    noun = "claim" if len(verdicts) == 1 else "claims"
    return f"{len(verdicts)} {noun}: {', '.join(parts)}." if parts else "No claims."


def claims_page(verdicts: Sequence[Verdict]) -> str:
    """The page `docs/claims.md`."""
    lines = [INTRODUCTION, summarise(verdicts), *_headlines(verdicts)]
    for name, group in groupby(verdicts, key=lambda verdict: verdict.experiment):
        experiment = find_experiment(name)
        lines += ["", f"## {experiment.FIGURE} · {read_text(experiment).title}", ""]
        lines += ["| the paper says | where | verdict | numbers | caveat |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        lines += [
            _row(v.claim.statement, v.claim.place, v.state, v.number, v.caveat) for v in group
        ]
    lines += ["", "## Slips in the paper's text", ""]
    lines += [f"- **{slip.place}.** {slip.text}" for slip in SLIPS]
    return "\n".join(lines) + "\n"


def _headlines(verdicts: Sequence[Verdict]) -> list[str]:
    """The section of the most important claims, if there are any."""
    chosen = [verdict for verdict in verdicts if verdict.claim.headline]
    rows = [_row(v.claim.statement, v.state, v.number) for v in chosen]
    header = [
        "",
        "## In short",
        "",
        "| the paper says | verdict | numbers |",
        "| --- | --- | --- |",
    ]
    return [*header, *rows] if rows else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _write_documents(root: Path) -> None:
    verdicts = gather(root / "results" / "paper")
    (root / "docs" / "claims.md").write_text(claims_page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    _write_documents(Path())
