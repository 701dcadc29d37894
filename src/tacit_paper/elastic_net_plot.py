"""The picture of `elastic_net`, from its rows alone."""

from math import log10
from typing import TYPE_CHECKING, Any

from tacit_paper import Table, plots
from tacit_paper.elastic_net_check import errors, pick

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"l1": "λ₁", "l2": "λ₂"}
KINDS = {"last": "last weights", "drift": "epoch mean + drift"}


def plot(rows: Table) -> "Figure":
    """Recovered against true, error by cell, and where the published fit stops."""
    with plots.style():
        figure = plots.new_figure(12.5, 10.5)
        grid = figure.add_gridspec(3, 1, height_ratios=(1, 1, 1.1))
        panels: dict[str, Any] = {}
        for number, letters in enumerate(("AB", "CD", "EFGHIJ")):
            inner: Any = grid[number].subgridspec(1, len(letters))
            panels |= {a: figure.add_subplot(s) for a, s in zip(letters, inner, strict=True)}
        kinds = [(estimate, own) for estimate in KINDS for own in NAMES]
        for letter, (estimate, own) in zip("ABCD", kinds, strict=True):
            _recovered(panels[letter], pick(rows, estimate), own, "l2" if own == "l1" else "l1")
            panels[letter].set_title(f"{letter}  {NAMES[own]} recovered: {KINDS[estimate]}")
        image: Any = None
        for letter, (estimate, own) in zip("EFGH", kinds, strict=True):
            cells = errors(pick(rows, estimate))
            image = _cells(panels[letter], cells[f"{own}_error"], cells.flagged >= 0.5)
            panels[letter].set_title(f"{letter}  Error of λ̂{NAMES[own][1:]}:\n{KINDS[estimate]}")
        for letter, own in zip("IJ", NAMES, strict=True):
            cells = pick(rows, "published").groupby(["l1", "l2"])[f"{own}_distance"].median()
            _cells(panels[letter], cells, cells < 0)
            panels[letter].set_title(f"{letter}  Published fit of λ̂{NAMES[own][1:]}:\nfrom exact")
        bar = figure.colorbar(
            image, ax=[panels[letter] for letter in "EFGHIJ"], location="bottom", aspect=60
        )
        bar.set_label(
            "median over data sets of the relative error (E–H) or distance from the exact answer "
            "(I, J); hatched: a Problem in at least half of the data sets"
        )
        panels["E"].set_ylabel("true λ₁")
    return figure


def _recovered(axes: Any, rows: Table, own: str, other: str) -> None:
    """Median over data sets against the true value, a line a value of the other.

    Bars are one run's interval where it has one (its median ends), else the middle half of all.
    """
    import matplotlib as mpl

    values = sorted(rows[other].unique())
    shades = mpl.colormaps["viridis"]
    truth = sorted(rows[own].unique())
    axes.plot(truth, truth, color="black", ls="--", lw=1, label="exact", zorder=1)
    low = min(truth) / 30
    for i, value in enumerate(values):
        colour = shades(0.92 * i / max(1, len(values) - 1))
        part = rows[rows[other] == value].groupby(own)
        quartiles = part[f"{own}_hat"].quantile([0.25, 0.5, 0.75]).unstack()
        flagged = part.problems.agg(lambda kinds: (kinds != "").mean()) >= 0.5
        shift = 1.13 ** (i - (len(values) - 1) / 2)
        x, middle = quartiles.index.to_numpy() * shift, quartiles[0.5].to_numpy()
        above = middle > 0
        ends = quartiles[[0.25, 0.75]].to_numpy().T
        if rows.estimate.iloc[0] == "drift":
            ends = part[[f"{own}_low", f"{own}_high"]].median().to_numpy().T
        under, over = (end[above].clip(low) for end in ends)
        axes.vlines(x[above], under, over, color=colour, lw=1.2)
        axes.plot(
            x[above], middle[above], color=colour, lw=0.9, label=f"{NAMES[other]} = {value:g}"
        )
        for mark, chosen in (("o", above & ~flagged.to_numpy()), ("w", above & flagged.to_numpy())):
            face = colour if mark == "o" else "white"
            axes.plot(x[chosen], middle[chosen], "o", ms=4.5, mfc=face, mec=colour, ls="none")
        if not above.all():
            axes.plot(x[~above], [low] * (~above).sum(), "x", color=colour, ms=6, clip_on=False)
    axes.set(xscale="log", yscale="log", xlabel=f"true {NAMES[own]}", ylabel=f"λ̂{NAMES[own][1:]}")
    axes.set_ylim(low, max(truth) * 60)
    axes.plot([], [], "o", mfc="white", mec="black", ms=4.5, label="carries a Problem")
    axes.plot([], [], "x", color="black", ms=6, label="below zero")
    axes.legend(ncols=3, fontsize=7, loc="upper left")


def _cells(axes: Any, values: Table, hatched: Table) -> Any:
    """One number a cell of true strengths, on a logarithmic colour scale."""
    from matplotlib.colors import LogNorm

    table, marked = values.unstack(), hatched.unstack()
    image = axes.imshow(
        table.clip(1e-3, 10), norm=LogNorm(1e-3, 10), cmap="RdYlBu_r", origin="lower", aspect="auto"
    )
    for i, line in enumerate(table.to_numpy()):
        for j, value in enumerate(line):
            colour = "white" if value < 4e-3 or value > 3 else "black"
            axes.text(j, i, _short(value), ha="center", va="center", fontsize=6, color=colour)
            if marked.iloc[i, j]:
                axes.add_patch(_hatch(j, i))
    axes.set(xticks=range(len(table.columns)), yticks=range(len(table.index)))
    axes.set_xticklabels(map(_power, table.columns))
    axes.set_yticklabels(map(_power, table.index))
    axes.tick_params(labelsize=6.5)
    axes.set_xlabel("true λ₂")
    axes.grid(visible=False)
    return image


def _short(value: float) -> str:
    """A relative error in three characters or so."""
    if value < 0.0095:
        return "<1%"
    return f"{value:.0%}" if value < 9.5 else ">9×"


def _power(value: float) -> str:
    """A strength in few characters."""
    return f"{value:g}" if value >= 0.01 else f"$10^{{{round(log10(value))}}}$"


def _hatch(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", lw=0, ec="black", alpha=0.35
    )
