"""What the paper says about dropout at depth 1, with its verdict computed from the rows."""

from tacit_paper import Claim, Evidence, Table
from tacit_paper.dropout.selecting import select


def _one_layer(rows: Table) -> Evidence | None:
    networks = select(rows, kind="one layer")
    if not len(networks):
        return None
    by_seed = networks.groupby("seed").total_l2
    spread = float(((by_seed.max() - by_seed.min()) / by_seed.mean().abs()).max())
    layers, count = int(networks.dropout_layers.max()), networks.rate.nunique()
    return Evidence(
        f"{layers} dropout layers act at depth 1; λ̂ differs by {spread:.1g} between {count} rates",
        layers == 0 and count > 1 and spread < 1e-6,
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Depth 1 is left out to save space: the trends hold.",
        "App. I",
        "artefact",
        _one_layer,
        "Dropout follows every hidden layer but the last, so none acts at depth 1.",
    ),
)
