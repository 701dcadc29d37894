"""What the `dropout` figure estimates at given weights: a ridge strength, and dropout's effect."""

from collections.abc import Iterator, Sequence

from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble
from tacit.equations.equations import Equations
from tacit.fitting.fits import Fit, fit
from tacit.regularizers import l2, layerwise
from tacit_paper import Row
from tacit_paper.dropout_columns import dropout_columns
from tacit_paper.dropout_training import Config, Images
from tacit_paper.published_fit import Protocol, published_fit, statistics


def total(config: Config, ensemble: Ensemble, images: Images) -> Iterator[Row]:
    """One ridge strength at the last weights, exactly and by the published fit."""
    ridge = [l2()]
    exact = ensembles.fits(
        ensembles.endpoint_equations(ensemble, F.cross_entropy, images.train, ridge)
    )
    given = statistics(
        ensemble, F.cross_entropy, images.train, ridge,
        batch_size=config.batch_size, shuffles=config.shuffles,
    )  # fmt: skip
    published = published_fit(
        given,
        Protocol(config.fit_rate, config.fit_epochs, config.fit_patience, config.fit_plateau),
    )
    for m, found in enumerate(exact):
        yield {
            "total_l2": found.strengths["l2"],
            "total_explained": found.explained,
            "total_problems": _kinds(found),
            "gradient_norm": found.gradient_norm,
            "published_l2": float(published.strengths[m, 0]),
            "published_epochs": int(published.epochs[m]),
            "published_loss": float(published.losses[m]),
        }


def marginal(
    config: Config,
    ensemble: Ensemble,
    images: Images,
    rates: Sequence[float],
    seeds: Sequence[int],
) -> Iterator[Row]:
    """What dropout adds at these weights, and what every family explains of it."""
    known = dropout_columns(ensemble, images.train)
    candidates = [l2(), layerwise(l2()), *known.regularizers]
    found = ensembles.dropout_equations(
        ensemble, F.cross_entropy, images.train, candidates,
        dropout=rates, seeds=seeds, noise=config.noise, given=known.columns,
    )  # fmt: skip
    for m, equations in enumerate(found.equations):
        yield {
            "theory": rates[m] / (1 - rates[m]),
            "draws": found.draws[m],
            "noise": found.noise[m],
            **_families(equations),
        }


def _families(equations: Equations) -> Row:
    """Each family fitted on its own."""
    row: Row = {}
    for name in ("l2", "weighted_l2", "explicit_dropout"):
        own = fit(equations.select_columns([equations.names.index(name)]))
        row |= {f"{name}_strength": own.strengths[name], f"{name}_explained": own.explained}
        row[f"{name}_problems"] = _kinds(own)
    for name in ("l2", "weighted_l2"):
        layers = [i for i, column in enumerate(equations.names) if column.startswith(f"{name}[")]
        row[f"layerwise_{name}_explained"] = fit(equations.select_columns(layers)).explained
    return row


def _kinds(found: Fit) -> str:
    return ", ".join(problem.kind for problem in found.problems)
