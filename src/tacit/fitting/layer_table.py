"""The fits of single layers as one table: what each explains of its own target."""

from typing import TYPE_CHECKING

from tacit.display import Column, Note, Summary, Table
from tacit.fitting.fit_rows import layer_rows
from tacit.fitting.summary import percent

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

COLUMNS = (
    Column("layer", 11, "left"),
    Column("of target", 11),
    Column("explained", 11),
    Column("regularizer", 21, "left"),
    Column("strength", 14),
    Column("verdict", 17, "left"),
)
MAX_ROWS = 200
NOTES = (
    Note(
        "Each layer is fitted by itself. of target: the layer's part of the squared target. "
        "explained: what its strengths explain of the layer's own target."
    ),
)


def summarize_layers(fit: "Fit") -> Summary:
    """One row per layer and strength, of the fits in `Fit.layers`."""
    rows = layer_rows(fit)
    cells: list[tuple[str, ...]] = [
        (
            row["layer"],
            percent(row["target_share"]),
            percent(min(max(row["explained"], 0.0), 1.0)),
            row["name"],
            f"{row['strength']:.6g}",
            row["verdict"],
        )
        for row in rows[:MAX_ROWS]
    ]
    if len(rows) > MAX_ROWS:
        cells.append((f"… and {len(rows) - MAX_ROWS} more (Fit.to_frame('layer') has all)",))
    return Summary(
        f"tacit: {len(fit.layers)} layers, each fitted by itself",
        tables=(Table(COLUMNS, tuple(cells), NOTES),),
    )
