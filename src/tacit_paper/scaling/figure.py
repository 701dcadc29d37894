"""The scaling figure, drawn from its rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.scaling.checks import GIB, passes, seconds_per_candidate, select

PLAIN = {"color": plots.GREY, "lw": 6, "alpha": 0.4, "solid_capstyle": "round"}
"""A thick line, on which the points of tacit lie where they take as long."""
ESTIMATE = {"color": plots.BLUE, "marker": "o", "ms": 5, "lw": 1.2}
LAYERWISE = {"color": plots.ORANGE, "marker": "D", "ms": 4, "mfc": "none", "ls": "none"}
SUMS = {"float64": plots.BLUE, "float32": plots.GREEN}


def plot(rows: Table) -> "plots.Figure":
    """Time and memory by parameters, time by tokens and by candidates."""
    with plots.style():
        figure = plots.new_figure(9.6, 7.4)
        (times, memory), (tokens, candidates) = figure.subplots(2, 2)
        _draw_times(times, rows)
        _draw_memory(memory, rows)
        _draw_tokens(tokens, select(rows, "batches"))
        _draw_candidates(candidates, rows)
        name = rows.device_name.iloc[0]
        figure.supxlabel(f"{name}, torch {rows.torch.iloc[0]}", fontsize=8, color=plots.GREY)
    return figure


def _draw_times(axes: Any, rows: Table) -> None:
    """Seconds per batch of a plain pass, an estimate and an estimate by layers."""
    models = select(rows, "parameters", sums="float64")
    for above, (dtype, dashes) in zip((5, -5), _dtypes(models), strict=False):
        line = select(models, "parameters", dtype=dtype).sort_values("parameters")
        axes.plot(line.parameters, line.plain_seconds / line.batches, **PLAIN)
        axes.plot(line.parameters, line.estimate_seconds / line.batches, dashes, **ESTIMATE)
        axes.plot(line.parameters, line.layerwise_seconds / line.batches, **LAYERWISE)
        last = line.iloc[-1]
        ratio = float(passes(line, "estimate").iloc[-1])
        end = (last.parameters, last.estimate_seconds / last.batches)
        _label(axes, end, f"{dtype}: {ratio:.2f} passes", plots.BLUE, above=above)
    for row in select(rows, "largest").itertuples():
        seconds = row.estimate_seconds / row.batches
        axes.plot(row.parameters, row.plain_seconds / row.batches, "o", color=plots.GREY, ms=9)
        axes.plot(row.parameters, seconds, "*", color=plots.BLUE, ms=10)
        _label(axes, (row.parameters, seconds), f"{row.dtype}, {row.batches} batches", plots.BLUE)
    axes.plot([], [], **PLAIN, label="one plain gradient pass")
    axes.plot([], [], **ESTIMATE, label="estimate, two candidates")
    axes.plot([], [], **LAYERWISE, label="estimate, one strength per layer")
    axes.legend(loc="upper left")
    axes.set(title="A  Time by parameters", xscale="log", yscale="log", xlabel="parameters")
    axes.set_ylabel(f"seconds per batch of {models.tokens_per_batch.iloc[0]:,} tokens")
    _set_limits(axes, rows.parameters, right=0.4, top=0.35)


def _draw_memory(axes: Any, rows: Table) -> None:
    """GiB above the model, of a plain pass and of estimates by the precision of their sums."""
    axes.set(title="B  Peak memory above the model", xlabel="parameters")
    if "plain_bytes" not in rows:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "measured only on a GPU", ha="center", transform=axes.transAxes)
        return
    models = select(rows, "parameters")
    for dtype, dashes in _dtypes(models):
        line = select(models, "parameters", dtype=dtype).sort_values("parameters")
        plain = line.drop_duplicates("parameters")
        axes.plot(plain.parameters, plain.plain_bytes / GIB, **PLAIN)
        for sums in line.sums.unique():
            _draw_peaks(axes, line[line.sums == sums], dashes, labelled=dashes == "-")
    for row in select(rows, "largest").itertuples():
        end = (row.parameters, row.estimate_bytes / GIB)
        axes.plot(row.parameters, row.plain_bytes / GIB, "o", color=plots.GREY, ms=9, alpha=0.6)
        axes.plot(*end, "*", color=SUMS[row.sums], ms=10)
        _label(axes, end, f"{end[1]:.0f} GiB, {row.dtype}", SUMS[row.sums])
    axes.plot([], [], **PLAIN, label="one plain gradient pass")
    for sums, colour in SUMS.items():
        axes.plot([], [], **{**ESTIMATE, "color": colour}, label=f"estimate, sums in {sums}")
    for dtype, dashes in _dtypes(models):
        axes.plot([], [], dashes, color="black", lw=1.2, label=f"{dtype} model")
    axes.legend(loc="upper left")
    axes.set(xscale="log", yscale="log", ylabel="GiB")
    _set_limits(axes, rows.parameters, right=0.4, top=0.45)


def _draw_peaks(axes: Any, line: Table, dashes: str, *, labelled: bool) -> None:
    """The line of an estimate's memory in one precision of sums, perhaps with its last value."""
    sums = line.sums.iloc[0]
    peaks = line.estimate_bytes / GIB
    axes.plot(line.parameters, peaks, dashes, **{**ESTIMATE, "color": SUMS[sums]})
    if labelled:
        text = f"{sums} sums: {peaks.iloc[-1]:.0f} GiB"
        above = 18 if sums == "float64" else -20
        _label(axes, (line.parameters.iloc[-1], peaks.iloc[-1]), text, SUMS[sums], above=above)


def _draw_tokens(axes: Any, line: Table) -> None:
    """Seconds of a plain pass and an estimate by the number of tokens."""
    line = line.sort_values("batches")
    tokens = line.batches * line.tokens_per_batch
    axes.plot(tokens, line.plain_seconds, **PLAIN)
    axes.plot(tokens, line.estimate_seconds, **ESTIMATE)
    ratios = passes(line, "estimate").tolist()
    for position, above in ((0, 12), (-1, -4)):
        point = (tokens.iloc[position], line.estimate_seconds.iloc[position])
        _label(axes, point, f"{ratios[position]:.2f} passes", plots.BLUE, above=above)
    middle = len(line) // 2
    point = (tokens.iloc[middle], line.plain_seconds.iloc[middle])
    _label(axes, point, "plain pass", plots.GREY, above=-10)
    axes.set(title="C  Time by examples (tokens)", xscale="log", yscale="log", xlabel="tokens")
    axes.set_ylabel(f"seconds, {_describe(line)}")
    _set_limits(axes, tokens, right=0.2, top=0.1)


def _draw_candidates(axes: Any, rows: Table) -> None:
    """Seconds of an estimate by the number of candidates, beside a plain pass."""
    line = select(rows, "candidates").sort_values("candidates")
    plain = float(line.plain_seconds.iloc[0])
    axes.axhline(plain, **PLAIN)
    axes.plot(line.candidates, line.estimate_seconds, **ESTIMATE)
    axes.text(
        0.98, 0.94 * plain, "one plain gradient pass", color=plots.GREY, size=8, ha="right",
        va="top", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    share = seconds_per_candidate(rows) / plain
    axes.text(
        0.04, 0.95, f"one more candidate: {share:.1%} of a pass".replace("%", " %"), va="top",
        color=plots.BLUE, size=8, transform=axes.transAxes,
    )  # fmt: skip
    axes.set(title="D  Time by candidates", xscale="log", xlabel="candidates k")
    axes.set_xticks(line.candidates, [f"{count}" for count in line.candidates], minor=False)
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 1.2 * max(plain, float(line.estimate_seconds.max())))
    axes.set_ylabel(f"seconds, {_describe(line)}")


def _describe(line: Table) -> str:
    return f"{line['size'].iloc[0]} parameters, {line.dtype.iloc[0]}"


def _dtypes(rows: Table) -> list[tuple[str, str]]:
    """The dtypes of the rows, each with its dashes."""
    return list(zip(rows.dtype.unique(), ("-", "--"), strict=False))


def _label(
    axes: Any, point: tuple[float, float], text: str, colour: str, *, above: float = 0
) -> None:
    """Text to the right of a point, and so many points above it."""
    place: Any = {"xytext": (8, above), "textcoords": "offset points"}
    axes.annotate(text, point, **place, color=colour, size=8, va="center")


def _set_limits(axes: Any, values: Table, *, right: float, top: float) -> None:
    """Room for labels and the legend, as parts of the ranges of both logarithmic axes."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** top)
    spread = max(10.0, axes.dataLim.x1 / values.min())
    axes.set_xlim(values.min() / spread**0.05, axes.dataLim.x1 * spread**right)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter("")
