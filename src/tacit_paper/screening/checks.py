"""Key numbers of the screening figure, from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most
from tacit_paper.screening.networks import PENALISED

CLAIMS = ("answer", "aligned")
"""Verdicts that claim something."""


def select(rows: Table, kind: str) -> Table:
    """The rows of one kind."""
    return rows[rows.kind == kind]


def right_parts(rows: Table) -> Table:
    """By kind of network with a penalty: the part of them that the screen has right."""
    networks = select(rows, "network")
    return networks[networks.network.isin([*PENALISED])].groupby("network").right.mean()


def claimed(rows: Table, network: str, *verdicts: str) -> float:
    """The part of the networks of one kind that have one of these verdicts."""
    chosen = select(rows, "network")
    return float(chosen[chosen.network == network].verdict.isin(verdicts).mean())


def check(rows: Table) -> list[Check]:
    """Networks that are right, false claims, and the cost."""
    right = right_parts(rows)
    simulated = select(rows, "simulation").set_index("method").picked
    cost = select(rows, "cost").iloc[0]
    early = select(rows, "network").query("network == 'stopped early'")
    return [
        at_least("kinds of networks that are right in most seeds", (right > 0.5).sum(), 9),
        at_least("part of all networks that are right", right.mean(), 0.9),
        at_most("claims at converged networks", claimed(rows, "converged", *CLAIMS), 0.05),
        at_most(
            "claims where a technique has no effect", claimed(rows, "no effect", *CLAIMS), 0.05
        ),
        at_most(
            "answers where training stopped early", claimed(rows, "stopped early", "answer"), 0
        ),
        at_most("largest part that aligns where it stopped early", early.explained.max(), 0.95),
        at_most("picks of the screen in the simulation", simulated["screen"], 0.07),
        at_most("passes over the data for all families, beside that for −∇L", cost.passes - 1, 3),
    ]
