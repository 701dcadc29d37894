"""What the summary of a fit says: how much it explains, a table, error bars, and problems."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tacit.display import Column, Note, Summary, Table
from tacit.display.numbers import count_of, show_interval
from tacit.errors import Problem, ProblemKind
from tacit.fitting.error_bars import KINDS, ErrorBars
from tacit.fitting.evidence import MIN_EXPLAINED
from tacit.fitting.halving import scaled_strengths
from tacit.fitting.shares import column_groups
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.equations.sources import Source
    from tacit.fitting.fits import Fit

MAX_ROWS = 40
MAX_INTERVALS = 6
MOST_LISTED = 3
"""Names in the first sentence, and strengths of a regularizer that are named one by one there."""
MAX_SIMILAR = 2
"""Problems of one kind that are written out in full."""

TARGETS = {
    "endpoint": "−∇L at one point",
    "difference": "∇L with the technique − ∇L without",
    "trajectory": "(reference − observed displacement)/time",
    "accumulated": "−∫∇L over the path",
}


def summarize(fit: "Fit", *, most: int = MAX_ROWS) -> Summary:
    """What is explained, what the fit is of, one row per regularizer, error bars and problems.

    The table has at most so many rows.
    """
    notes = (*_error_bars(fit), *_step_errors(fit))
    return Summary(
        title=_title(fit),
        lead=tuple(lead(fit)),
        facts=tuple(_facts(fit).items()),
        tables=(replace(_table(fit, most), notes=notes),),
        numbers=_numbers(fit),
        problems=merge_similar(fit.problems),
        findings=fit.findings,
        no_problems="No problems found.",
    )


def lead(fit: "Fit") -> list[str]:
    """The first thing to know about a fit: how much of the target it explains."""
    candidates = _candidates(fit)
    names = _join_names(candidates)
    if _has_no_signal(fit):
        text = "NO SIGNAL: the target is only noise or rounding; do not interpret the strength of"
        return [f"{text} {names}."]
    explained = min(max(fit.explained, 0.0), 1.0)
    verb = "explains" if len(candidates) == 1 else "explain"
    sentences = [f"{names} {verb} {percent(explained)} of the target."]
    if explained < MIN_EXPLAINED:
        sentences.append("Strengths in parentheses describe only that part of the target.")
    return sentences


def title_lines(fit: "Fit", *remarks: str) -> list[str]:
    """The title of a figure: what the fit explains, and the kinds of its problems."""
    kinds = dict.fromkeys(str(problem.kind) for problem in fit.problems)
    problems = [f"Problems: {', '.join(kinds)}."] if kinds else []
    return [lead(fit)[0], *remarks, *problems]


def _candidates(fit: "Fit") -> list[str]:
    """The names of the strengths, with those of a curve, or of one of many strengths, as one."""
    groups, listed = column_groups(fit.equations), []
    for family, (label, columns) in zip(fit.equations.families, groups.items(), strict=True):
        if family.shape is not None:
            listed.append(f"{family.name} ({count_of(family.size, 'knots')})")
        elif family.size > MOST_LISTED:
            listed.append(f"{label} ({family.size} strengths)")
        else:
            listed += [fit.equations.names[column] for column in columns]
    return listed


def _join_names(names: Iterable[str]) -> str:
    names = list(names)
    if len(names) > MOST_LISTED:
        return shorten(names, most=MOST_LISTED)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def percent(part: float) -> str:
    """A part as a percentage, with more digits where one would round to 0 or 100.

    Of a target that is zero no part is known, which is a dash.
    """
    if math.isnan(part):
        return "–"
    for digits in (1, 2, 3):
        text = f"{100 * part:.{digits}f}"
        if float(text) not in (0.0, 100.0):
            return f"{text} %"
    return f"{100 * part:.1f} %"


def _has_no_signal(fit: "Fit") -> bool:
    return any(problem.kind == ProblemKind.NO_SIGNAL for problem in fit.problems)


def is_doubtful(fit: "Fit") -> bool:
    """Whether the strengths describe too little of the target to be interpreted."""
    return fit.explained < MIN_EXPLAINED or _has_no_signal(fit)


def _title(fit: "Fit") -> str:
    sources, first = fit.sources, fit.sources[0]
    modes = sorted({source.mode for source in sources})
    title = f"tacit: {' + '.join(modes)} equations"
    if len(sources) > 1:
        title += f", {len(sources)} stacked"
    if first.layer:
        title += f", layer {first.layer}"
    if fit.nonnegative:
        title += ", strengths ≥ 0"
    if fit.psd:
        title += ", Λ ⪰ 0"
    return title


def _facts(fit: "Fit") -> dict[str, str]:
    """What the equations are of, by label."""
    sources, first = fit.sources, fit.sources[0]
    modes = sorted({source.mode for source in sources})
    known = _common(
        ", ".join(f"{name} = {value:g}" for name, value in source.known.items()) or "no penalties"
        for source in sources
    )
    return {
        "target": "; ".join(TARGETS.get(mode, mode) for mode in modes),
        "loss": _loss(sources),
        first.unit: _common(f"{source.examples:,}" for source in sources),
        "parameters": (
            f"{first.parameters:,} used in {first.tensors} tensor{'s' * (first.tensors != 1)}, "
            f"{first.frozen:,} frozen, "
            f"{first.tied} tied; {first.dtype}{_unreached(sources)}"
        ),
        "equations": f"{fit.rows:,}" + (f" over {first.steps} steps" if first.steps > 1 else ""),
        "known": known,
    }


def _unreached(sources: Sequence["Source"]) -> str:
    """Parameters that the loss does not reach, of all sources, on a line of their own."""
    names = list(dict.fromkeys(name for source in sources for name in source.unreached))
    return f";\nnot reached by the loss: {shorten(names)}" if names else ""


def _common(texts: Iterable[str]) -> str:
    """The text of all sources, or the first few if they differ."""
    different = list(dict.fromkeys(texts))
    return different[0] if len(different) == 1 else "differ: " + shorten(different, most=3)


def _loss(sources: Sequence["Source"]) -> str:
    values = [source.loss_value for source in sources if source.loss_value is not None]
    mean = f", mean {sum(values) / len(values):.6g}" if values else ""
    return f"{sources[0].loss}{mean}"


def _table(fit: "Fit", most: int) -> Table:
    names, bars = list(fit.strengths), shown_bars(fit)
    errors_by_kind = {kind: each.standard_errors for kind, each in bars.items()}
    columns = (
        Column("regularizer", 11, "left"),
        Column("strength", 14),
        *(Column(f"±{kind}", 11, optional=True) for kind in bars),
        Column("share", 10),
        Column("inflation", 11),
    )
    rows: list[tuple[str, ...]] = []
    for name in names[:most]:
        strength = f"{fit.strengths[name]:.6g}"
        errors = (_error(by_name[name], kind) for kind, by_name in errors_by_kind.items())
        shown = f"({strength})" if is_doubtful(fit) else strength
        share, inflation = f"{fit.shares[name]:z.4f}", write_number(fit.inflation[name])
        rows.append((name, shown, *errors, share, inflation))
    if len(names) > most:
        rows.append((f"… and {len(names) - most} more (Fit.strengths has all)",))
    return Table(columns, tuple(rows))


def shown_bars(fit: "Fit") -> dict[str, ErrorBars]:
    """All error bars, but those of layers only if some strength is in two or more of them."""
    return {
        kind: bars
        for kind, bars in fit.error_bars.items()
        if kind != "layers" or any(map(math.isfinite, bars.standard_errors.values()))
    }


def _error(value: float, kind: str) -> str:
    """A standard error; layers say nothing about a strength that only one of them determines."""
    return "–" if kind == "layers" and math.isinf(value) else write_number(value)


def _error_bars(fit: "Fit") -> list[Note]:
    """One entry per kind: the source of randomness, what it was computed from, the intervals."""
    shown, hint = shown_bars(fit), []
    scored = fit.sources[0].mode in ("endpoint", "difference")
    scored = scored and not fit.psd_binds
    if fit.equations.origin is not None and scored and not {*shown} - {"layers"}:
        hint = [Note("tacit.score_examples(fit) adds the sampling of examples.", is_detail=True)]
    if not shown and fit.nonnegative and not any(fit.strengths.values()):
        return [Note("± none: λ ≥ 0 holds every strength at zero.")]
    if not shown and fit.psd_binds:
        text = "± none: Λ ⪰ 0 holds an eigenvalue at zero; Fit.unconstrained has error bars."
        return [Note(text)]
    if not shown:
        where = "a single point" if fit.error_bars else "a single point of a single layer"
        return [Note(f"± none: {where} does not show its own uncertainty."), *hint]
    notes = []
    for kind, bars in shown.items():
        text = f"standard errors for {KINDS[kind]}, from {bars.basis}.{_coverage(bars)}"
        if kind == "layers":
            text = (
                f"how far {bars.basis} disagree on one strength (leaving out one at a time). It "
                "does not say how precisely the strength is known."
            )
        notes.append(Note(f"±{kind}: {text}"))
        notes += [] if kind == "layers" else _intervals(fit, bars)
    return [*notes, *hint]


def _step_errors(fit: "Fit") -> list[Note]:
    """What the finite step changes, or how to find out, where steps were compared with a flow."""
    scale = fit.sources[0].scale
    sized = scale is not None or any(source.step_sizes for source in fit.sources)
    if not sized or fit.sources[0].layer:
        return []
    size, how = "step size", "Trajectory.halved() and Fit.with_halved() estimate it"
    if scale is not None:
        size, how = scale.name, "Fit.with_halved() estimates it"
    text = f"Error bars hold no error of the finite {size}: {how}."
    if fit.halved is not None:
        scaled = scaled_strengths(fit, fit.halved.strengths)
        shown = shorten(
            f"{name} {fit.halved.strengths[name]:.6g} (distance "
            f"{abs(strength - scaled[name]):.2g}, error of the {size} about {error:.2g})"
            for (name, strength), error in zip(
                fit.strengths.items(), fit.step_errors.values(), strict=True
            )
        )
        text = f"At half the {size}: {shown}."
    return [Note(text)]


def _coverage(bars: ErrorBars) -> str:
    """A warning if intervals like these covered the truth less often than they promise."""
    return (
        f" In tests, 95 % intervals like these covered the truth {bars.measured}."
        if bars.measured
        else ""
    )


def _intervals(fit: "Fit", bars: ErrorBars) -> list[Note]:
    intervals = bars.intervals(fit.strengths)
    if all(low == high for low, high in intervals.values()):
        return []
    if len(intervals) > MAX_INTERVALS:
        text = f"Fit.standard_errors[{bars.kind!r}] and Fit.intervals() have the numbers."
        return [Note(text, is_detail=True)]
    shown = ", ".join(
        f"{name} –" if math.isnan(low) else f"{name} {show_interval(low, high)}"
        for name, (low, high) in intervals.items()
    )
    return [Note(f"95 % intervals: {shown}", is_detail=True)]


def _numbers(fit: "Fit") -> tuple[tuple[tuple[str, str], ...], ...]:
    norms = [source.parameter_norm for source in fit.sources]
    size = math.sqrt(sum(value**2 for value in norms) / len(norms))
    return (
        (
            ("explained", f"{fit.explained:z.4f}"),
            ("cosine", f"{fit.cosine:z.4f}"),
            ("residual ratio", f"{fit.residual_ratio:.2g}"),
            ("condition", write_number(fit.condition)),
        ),
        (
            ("‖∇L‖", f"{fit.gradient_norm:.4g}"),
            ("‖θ‖", f"{size:.4g}"),
            ("rank", f"{fit.rank} of {len(fit.strengths)}"),
        ),
    )


def merge_similar(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Problems of one kind and with one remedy as one."""
    similar: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        similar.setdefault((problem.kind, problem.remedy), []).append(problem)
    merged = []
    for alike in similar.values():
        message = " ".join(problem.message for problem in alike[:MAX_SIMILAR])
        names = tuple(dict.fromkeys(name for problem in alike for name in problem.names))
        if len(alike) > MAX_SIMILAR:
            further = [name for problem in alike[MAX_SIMILAR:] for name in problem.names]
            message += f" The same holds for {shorten(further)}."
        merged.append(replace(alike[0], message=message, names=names))
    return tuple(merged)


def write_number(value: float) -> str:
    """Three digits, ∞, or a dash where there is no number."""
    if math.isnan(value):
        return "–"
    return f"{value:.3g}" if math.isfinite(value) else "∞"


def jsonable(value: Any) -> Any:
    """The value as types that JSON has; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
