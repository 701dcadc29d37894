"""A fit as text: how much it explains, a regression table, error bars, and problems."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tacit.errors import Problem, ProblemKind
from tacit.fitting.error_bars import KINDS, ErrorBars
from tacit.fitting.evidence import MIN_EXPLAINED
from tacit.fitting.halving import scaled_strengths
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.equations.sources import Source
    from tacit.fitting.fits import Fit

WIDTH = 88
MAX_ROWS = 40
MAX_INTERVALS = 6
MAX_SIMILAR = 2
"""Problems of one kind that are written out in full."""

TARGETS = {
    "endpoint": "−∇L at one point",
    "difference": "∇L with the technique − ∇L without",
    "trajectory": "(reference − observed displacement)/time",
    "accumulated": "−∫∇L over the path",
}


def write_summary(fit: "Fit") -> str:
    """What is explained, header, one row per regularizer, error bars, footer and problems."""
    rule = "─" * WIDTH
    bars = [*_error_bars(fit), *_step_errors(fit)]
    parts = (_header(fit), _table(fit), bars, _footer(fit), _notes(fit))
    lines = [*_lead(fit), *(line for part in parts for line in (rule, *part))]
    return "\n".join(lines)


def _lead(fit: "Fit") -> list[str]:
    """The first thing to know about a fit: how much of the target it explains."""
    candidates = _curves_by_name(fit)
    names = _join_names(candidates)
    if _has_no_signal(fit):
        text = "NO SIGNAL: the target is only noise or rounding; do not interpret the strength of"
        return textwrap.wrap(f"{text} {names}.", WIDTH)
    explained = min(max(fit.explained, 0.0), 1.0)
    verb = "explains" if len(candidates) == 1 else "explain"
    lines = textwrap.wrap(f"{names} {verb} {_percent(explained)} of the target.", WIDTH)
    if explained < MIN_EXPLAINED:
        lines.append("Strengths in parentheses describe only that part of the target.")
    return lines


def _curves_by_name(fit: "Fit") -> list[str]:
    """The names of the strengths, with those of a curve as one."""
    names, listed = list(fit.strengths), []
    for family in fit.equations.families:
        own, names = names[: family.size], names[family.size :]
        listed += (
            own
            if family.shape is None
            else [f"{family.name} ({family.size} knot{'s' * (family.size > 1)})"]
        )
    return listed


def _join_names(names: Iterable[str]) -> str:
    names = list(names)
    if len(names) > 3:
        return shorten(names, most=3)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _percent(part: float) -> str:
    """A part as a percentage, with more digits where one would round to 0 or 100."""
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


def _header(fit: "Fit") -> list[str]:
    sources = fit.sources
    first = sources[0]
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
    known = _common(
        ", ".join(f"{name} = {value:g}" for name, value in source.known.items()) or "no penalties"
        for source in sources
    )
    entries = {
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
    lines = [f"{label:<11}{text}" for label, text in entries.items()]
    return [title, *(part for line in lines for part in line.split("\n"))]


def _unreached(sources: Sequence["Source"]) -> str:
    """Parameters that the loss does not reach, of all sources, on lines of their own."""
    names = list(dict.fromkeys(name for source in sources for name in source.unreached))
    text = f"not reached by the loss: {shorten(names)}"
    lines = textwrap.wrap(text, WIDTH - 11, break_on_hyphens=False) if names else []
    return "".join([";" * bool(names), *(f"\n{'':<11}{line}" for line in lines)])


def _common(texts: Iterable[str]) -> str:
    """The text of all sources, or the first few if they differ."""
    different = list(dict.fromkeys(texts))
    return different[0] if len(different) == 1 else "differ: " + shorten(different, most=3)


def _loss(sources: Sequence["Source"]) -> str:
    values = [source.loss_value for source in sources if source.loss_value is not None]
    mean = f", mean {sum(values) / len(values):.6g}" if values else ""
    return f"{sources[0].loss}{mean}"


def _table(fit: "Fit") -> list[str]:
    names = list(fit.strengths)
    width = max([11, *(min(34, len(name)) for name in names[:MAX_ROWS])])
    room = (WIDTH - width - 14 - 10 - 11) // 11
    kinds = list(_shown_bars(fit))[: max(1, room)]
    head = ["strength", *(f"±{kind}" for kind in kinds), "share", "inflation"]
    sizes = [14, *[11] * len(kinds), 10, 11]
    lines = [f"{'regularizer':<{width}}" + align(head, sizes)]
    errors_by_kind = [fit.error_bars[kind].standard_errors for kind in kinds]
    for name in names[:MAX_ROWS]:
        strength = f"{fit.strengths[name]:.6g}"
        cells = [
            f"({strength})" if is_doubtful(fit) else strength,
            *(
                _error(errors[name], kind)
                for kind, errors in zip(kinds, errors_by_kind, strict=True)
            ),
            f"{fit.shares[name]:.4f}",
            write_number(fit.inflation[name]),
        ]
        lines.append(f"{fit_name(name, width):<{width}}" + align(cells, sizes))
    if len(names) > MAX_ROWS:
        lines.append(f"… and {len(names) - MAX_ROWS} more (Fit.strengths has all)")
    return lines


def fit_name(name: str, width: int) -> str:
    """A name in that width; layers' names differ at their ends, so the middle is cut."""
    half = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - half]}…{name[-half:]}"


def align(cells: Sequence[str], sizes: Sequence[int]) -> str:
    """Cells of a table, each at the right of its width."""
    return "".join(f" {text:>{size - 1}}" for text, size in zip(cells, sizes, strict=True))


def _shown_bars(fit: "Fit") -> dict[str, ErrorBars]:
    """All error bars, but those of layers only if some strength is in two or more of them."""
    return {
        kind: bars
        for kind, bars in fit.error_bars.items()
        if kind != "layers" or any(map(math.isfinite, bars.standard_errors.values()))
    }


def _error(value: float, kind: str) -> str:
    """A standard error; layers say nothing about a strength that only one of them determines."""
    return "–" if kind == "layers" and math.isinf(value) else write_number(value)


def _error_bars(fit: "Fit") -> list[str]:
    """One entry per kind: the source of randomness, what it was computed from, the intervals."""
    shown, hint = _shown_bars(fit), []
    scored = fit.sources[0].mode in ("endpoint", "difference")
    scored = scored and not fit.psd_binds
    if fit.equations.origin is not None and scored and not {*shown} - {"layers"}:
        hint = ["  tacit.score_examples(fit) adds the sampling of examples."]
    if not shown and fit.nonnegative and not any(fit.strengths.values()):
        return ["± none: λ ≥ 0 holds every strength at zero."]
    if not shown and fit.psd_binds:
        return ["± none: Λ ⪰ 0 holds an eigenvalue at zero; Fit.unconstrained has error bars."]
    if not shown:
        where = "a single point" if fit.error_bars else "a single point of a single layer"
        return [f"± none: {where} does not show its own uncertainty.", *hint]
    lines = []
    for kind, bars in shown.items():
        text = f"standard errors for {KINDS[kind]}, from {bars.basis}.{_coverage(bars)}"
        if kind == "layers":
            text = (
                f"how far {bars.basis} disagree on one strength (leaving out one at a time). It "
                "does not say how precisely the strength is known."
            )
        lines += textwrap.wrap(f"±{kind}: {text}", WIDTH, subsequent_indent="  ")
        lines += [] if kind == "layers" else _intervals(fit, bars)
    return [*lines, *hint]


def _step_errors(fit: "Fit") -> list[str]:
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
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _coverage(bars: ErrorBars) -> str:
    """A warning if intervals like these covered the truth less often than they promise."""
    return (
        f" In tests, 95 % intervals like these covered the truth {bars.measured}."
        if bars.measured
        else ""
    )


def _intervals(fit: "Fit", bars: ErrorBars) -> list[str]:
    intervals = bars.intervals(fit.strengths)
    if all(low == high for low, high in intervals.values()):
        return []
    if len(intervals) > MAX_INTERVALS:
        return [f"  Fit.standard_errors[{bars.kind!r}] and Fit.intervals() have the numbers."]
    shown = ", ".join(
        f"{name} –" if math.isnan(low) else f"{name} [{low:.4g}, {high:.4g}]"
        for name, (low, high) in intervals.items()
    )
    return textwrap.wrap(
        f"  95 % intervals: {shown}", WIDTH, subsequent_indent="    ", break_on_hyphens=False
    )


def _footer(fit: "Fit") -> list[str]:
    norms = [source.parameter_norm for source in fit.sources]
    size = math.sqrt(sum(value**2 for value in norms) / len(norms))
    return [
        f"explained {fit.explained:.4f}   cosine {fit.cosine:.4f}   "
        f"residual ratio {fit.residual_ratio:.2g}   condition {write_number(fit.condition)}",
        f"‖∇L‖ {fit.gradient_norm:.4g}   ‖θ‖ {size:.4g}   rank {fit.rank} of {len(fit.strengths)}",
    ]


def _notes(fit: "Fit") -> list[str]:
    """The problems, or that there are none, and the findings."""
    findings = [
        line
        for text in fit.findings
        for line in textwrap.wrap(f"Finding: {text}", WIDTH, subsequent_indent="  ")
    ]
    return [*write_problems(fit.problems), *findings]


def write_problems(problems: Sequence[Problem]) -> list[str]:
    """The problems by number, those of one kind together."""
    if not problems:
        return ["No problems found."]
    lines, similar = [], {}
    for problem in problems:
        similar.setdefault((problem.kind, problem.remedy), []).append(problem)
    for number, ((kind, remedy), problems) in enumerate(similar.items(), 1):
        messages = " ".join(problem.message for problem in problems[:MAX_SIMILAR])
        if len(problems) > MAX_SIMILAR:
            names = [name for problem in problems[MAX_SIMILAR:] for name in problem.names]
            messages += f" The same holds for {shorten(names)}."
        text = f"[{number}] {kind}: {messages} {remedy}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    return lines


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
