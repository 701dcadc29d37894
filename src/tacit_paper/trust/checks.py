"""False alarms and power of the trust figure, from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most

MINIMUM_REPLICATES = 250
"""Replicates from which a rate is compared with its bound."""
FALSE_ALARMS, POWER = 0.05, 0.9
"""The largest rate of false alarms and the least power of any problem."""


def trust_table(rows: Table) -> Table:
    """One row per problem, in the order of the table of problems.

    `reported` is the fraction of fits with the listed kind; of well-specified problems, with any
    Problem. `estimate` is the median strength.
    """
    kinds = rows.problems.str.split(", ")
    any_kind = rows.problems != ""
    listed = [kind in reported for kind, reported in zip(rows.listed, kinds, strict=True)]
    table = rows.assign(reported=any_kind.where(rows.listed == "", listed), silent=~any_kind)
    return (
        table.groupby(["problem", "listed"], sort=False)
        .agg(
            replicates=("reported", "size"),
            reported=("reported", "mean"),
            silent=("silent", "mean"),
            truth=("truth", "first"),
            estimate=("estimate", "median"),
            explained=("explained", "median"),
        )
        .reset_index()
    )


def markdown_table(rows: Table) -> str:
    """The table for the documentation."""
    lines = [
        "| problem | applied | median estimate | listed Problem | reported |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.problem} | {row.truth:g} | {row.estimate:.3g} | {row.listed or 'none'} | "
        f"{row.reported:.1%} |"
        for row in trust_table(rows).itertuples()
    ]
    return "\n".join(lines)


def check(rows: Table) -> list[Check]:
    """The rate of every problem against its bound, where there are enough replicates."""
    table = trust_table(rows)
    if table.replicates.min() < MINIMUM_REPLICATES:
        well = table.listed == ""
        label = "(too few replicates for more)"
        return [
            at_most(f"mean rate of false alarms {label}", table.reported[well].mean(), 0.2),
            at_least(f"mean power {label}", table.reported[~well].mean(), 0.8),
        ]
    return [
        at_least(f"power, {row.problem}: {row.listed}", row.reported, POWER)
        if row.listed
        else at_most(f"false alarms, {row.problem}", row.reported, FALSE_ALARMS)
        for row in table.itertuples()
    ]
