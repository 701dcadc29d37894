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
    for dtype, dashes in _dtypes(models):
        line = select(models, "parameters", dtype=dtype).sort_values("parameters")
        axes.plot(line.parameters, line.plain_seconds / line.batches, **PLAIN)
        axes.plot(line.parameters, line.estimate_seconds / line.batches, dashes, **ESTIMATE)
        axes.plot(line.parameters, line.layerwise_seconds / line.batches, **LAYERWISE)
        last = line.iloc[-1]
        ratio = float(passes(line, "estimate").iloc[-1])
        end = (last.parameters, last.estimate_seconds / last.batches)
        _label(axes, end, f"{dtype}\n{ratio:.2f} passes", plots.BLUE)
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
    axes.set_xlim(right=12 * rows.parameters.max())


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
        for sums, colour in SUMS.items():
            part = line[line.sums == sums]
            if len(part):
                style = {**ESTIMATE, "color": colour}
                axes.plot(part.parameters, part.estimate_bytes / GIB, dashes, **style)
    for row in select(rows, "largest").itertuples():
        end = (row.parameters, row.estimate_bytes / GIB)
        axes.plot(row.parameters, row.plain_bytes / GIB, "o", color=plots.GREY, ms=9, alpha=0.6)
        axes.plot(*end, "*", color=SUMS[row.sums], ms=10)
        _label(axes, end, f"{row.dtype}\n{end[1]:.0f} GiB", SUMS[row.sums])
    axes.plot([], [], **PLAIN, label="one plain gradient pass")
    for sums, colour in SUMS.items():
        axes.plot([], [], **{**ESTIMATE, "color": colour}, label=f"estimate, sums in {sums}")
    for dtype, dashes in _dtypes(models):
        axes.plot([], [], dashes, color="black", lw=1.2, label=f"{dtype} model")
    axes.legend(loc="upper left")
    axes.set(xscale="log", yscale="log", ylabel="GiB")
    axes.set_xlim(right=12 * rows.parameters.max())


def _draw_tokens(axes: Any, line: Table) -> None:
    """Seconds of a plain pass and an estimate by the number of tokens."""
    line = line.sort_values("batches")
    tokens = line.batches * line.tokens_per_batch
    axes.plot(tokens, line.plain_seconds, **PLAIN)
    axes.plot(tokens, line.estimate_seconds, **ESTIMATE)
    ratios = passes(line, "estimate").tolist()
    for position in (0, -1):
        point = (tokens.iloc[position], line.estimate_seconds.iloc[position])
        text = f"{ratios[position]:.2f} passes"
        _label(axes, point, text, plots.BLUE, below=position == -1)
    _label(axes, (tokens.iloc[0], line.plain_seconds.iloc[0]), "plain", plots.GREY, below=True)
    axes.set(title="C  Time by examples (tokens)", xscale="log", yscale="log", xlabel="tokens")
    axes.set_ylabel(f"seconds, {_describe(line)}")
    axes.set_xlim(right=3 * tokens.max())


def _draw_candidates(axes: Any, rows: Table) -> None:
    """Seconds of an estimate by the number of candidates, beside a plain pass."""
    line = select(rows, "candidates").sort_values("candidates")
    plain = float(line.plain_seconds.iloc[0])
    axes.axhline(plain, **PLAIN)
    axes.plot(line.candidates, line.estimate_seconds, **ESTIMATE)
    axes.text(
        0.98, plain, "one plain gradient pass", color=plots.GREY, size=8, ha="right", va="top",
        transform=axes.get_yaxis_transform(),
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
    axes: Any, point: tuple[float, float], text: str, colour: str, *, below: bool = False
) -> None:
    """Text to the right of a point, or below it."""
    offset = (4, -14) if below else (8, 0)
    axes.annotate(
        text, point, xytext=offset, textcoords="offset points", color=colour, size=8, va="center"
    )
