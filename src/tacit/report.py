"""A fit as text: a table like a regression's, with its doubts below."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tacit.params import shorten

if TYPE_CHECKING:
    from tacit.equations import Source
    from tacit.fitting import Fit

WIDTH = 88
MOST_ROWS = 40

TARGETS = {
    "endpoint": "−∇L at one point",
    "difference": "∇L with the technique − ∇L without",
    "trajectory": "(reference − observed displacement)/time",
}


def summary(fit: "Fit") -> str:
    """Header, one row per regularizer, footer and notes."""
    rule = "─" * WIDTH
    lines = [rule, *_header(fit), rule, *_table(fit), rule, *_footer(fit), rule, *_notes(fit)]
    return "\n".join(lines)


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
    known = _agreed(
        ", ".join(f"{name} = {value:g}" for name, value in source.known.items()) or "no penalties"
        for source in sources
    )
    entries = {
        "target": "; ".join(TARGETS.get(mode, mode) for mode in modes),
        "loss": _loss(sources),
        "examples": _agreed(f"{source.examples:,}" for source in sources),
        "parameters": (
            f"{first.parameters:,} used in {first.tensors} tensor{'s' * (first.tensors != 1)}, "
            f"{first.frozen:,} frozen, "
            f"{first.tied} tied; {first.dtype}"
        ),
        "equations": f"{fit.rows:,}" + (f" over {first.steps} steps" if first.steps > 1 else ""),
        "known": known,
    }
    return [title, *(f"{label:<11}{text}" for label, text in entries.items())]


def _agreed(texts: Iterable[str]) -> str:
    """What all sources say, or each in turn where they differ."""
    different = list(dict.fromkeys(texts))
    return different[0] if len(different) == 1 else "differ: " + shorten(different, most=3)


def _loss(sources: Sequence["Source"]) -> str:
    values = [source.loss_value for source in sources if source.loss_value is not None]
    mean = f", mean {sum(values) / len(values):.6g}" if values else ""
    return f"{sources[0].loss}{mean}"


def _table(fit: "Fit") -> list[str]:
    names = list(fit.strengths)
    width = max([11, *(min(34, len(name)) for name in names[:MOST_ROWS])])
    head = ("strength", 14), ("std. error", 13), ("share", 10), ("inflation", 12)
    lines = [f"{'regularizer':<{width}}" + "".join(f"{text:>{size}}" for text, size in head)]
    for name in names[:MOST_ROWS]:
        label = name if len(name) <= width else name[: width - 1] + "…"
        lines.append(
            f"{label:<{width}}{fit.strengths[name]:>14.6g}{'–':>13}"
            f"{fit.shares[name]:>10.4f}{_number(fit.inflation[name]):>12}"
        )
    if len(names) > MOST_ROWS:
        lines.append(f"… and {len(names) - MOST_ROWS} more (Fit.strengths has all)")
    return lines


def _footer(fit: "Fit") -> list[str]:
    norms = [source.parameter_norm for source in fit.sources]
    size = math.sqrt(sum(value**2 for value in norms) / len(norms))
    return [
        f"explained {fit.explained:.4f}   cosine {fit.cosine:.4f}   "
        f"residual ratio {fit.residual_ratio:.2g}   condition {_number(fit.condition)}",
        f"‖∇L‖ {fit.gradient_norm:.4g}   ‖θ‖ {size:.4g}   rank {fit.rank} of {len(fit.strengths)}",
    ]


def _notes(fit: "Fit") -> list[str]:
    if not fit.problems:
        return ["No problems found. Standard errors are not estimated yet."]
    lines = []
    for number, problem in enumerate(fit.problems, 1):
        lines += textwrap.wrap(f"[{number}] {problem}", WIDTH, subsequent_indent="    ")
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "∞"


def jsonable(value: Any) -> Any:
    """A value as plain ones that JSON knows; what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {key: jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
