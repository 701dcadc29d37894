"""Intervals of training for elastic nets whose true strengths are known."""

from collections.abc import Iterator

from tacit_paper import Row
from tacit_paper.coverage.estimates import interval_rows
from tacit_paper.elastic_net.config import Config as ElasticNetConfig
from tacit_paper.elastic_net.training import Member, Sweep
from tacit_paper.training_coverage.config import Config


def network_rows(config: Config, device: str, *, seeds: range) -> Iterator[Row]:
    """Two rows per network, one per strength, for all cells on the data sets of these seeds."""
    settings = ElasticNetConfig(epochs=config.epochs, kept=config.kept)
    members = [Member(*cell, seed) for cell in config.cells for seed in seeds]
    sweep = Sweep(settings, members, device)
    _, fits = sweep.fits(sweep.train())
    for member, fit in zip(members, fits, strict=True):
        label = f"elastic net, λ₁ = {member.l1:g}, λ₂ = {member.l2:g}"
        replicate = {"kind": "training", "problem": label, "replicate": member.seed}
        yield from interval_rows(replicate, fit, {"smooth_l1": member.l1, "l2": member.l2})
