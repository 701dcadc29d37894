"""Estimates of the dropout figure: a ridge strength, and what dropout adds to the gradient."""

from collections.abc import Iterator, Mapping

from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble
from tacit.equations.equations import Equations
from tacit.fitting.fits import fit
from tacit.objective.params import Params
from tacit.regularizers import Regularizer, l2, layerwise
from tacit_paper import Row
from tacit_paper.dropout.columns import dropout_columns
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.training import Images
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.published_fit import FitSettings, fit_as_published, gradient_products

FAMILIES = ("l2", "weighted_l2", "explicit_dropout")
"""Families that every marginal effect is fitted with, one at a time and jointly."""


def total_effects(config: Config, ensemble: Ensemble, images: Images) -> Iterator[Row]:
    """The ridge strength of every member, exactly and by the published fit."""
    problem = (ensemble, F.cross_entropy, images.train, [l2()])
    exact_fits = ensembles.fits(ensembles.endpoint_equations(*problem))
    products = gradient_products(*problem, batch_size=config.batch_size, shuffles=config.shuffles)
    settings = FitSettings(
        config.fit_rate, config.fit_epochs, config.fit_patience, config.fit_plateau
    )
    published = fit_as_published(products, settings)
    for m, exact in enumerate(exact_fits):
        yield {
            "total_l2": exact.strengths["l2"],
            "total_explained": exact.explained,
            "total_problems": join_kinds(exact.problems),
            "gradient_norm": exact.gradient_norm,
            "published_l2": float(published.strengths[m, 0]),
            "published_epochs": int(published.epochs[m]),
            "published_loss": float(published.losses[m]),
        }


def marginal_effects(
    config: Config,
    ensemble: Ensemble,
    images: Images,
    rates: list[float],
    seeds: list[int],
    *,
    extra: Mapping[Regularizer, Params] | None = None,
) -> Iterator[Row]:
    """What dropout adds to the gradient of every member, and how well each family explains it.

    Args:
        config: the settings.
        ensemble: the networks.
        images: the images.
        rates: one dropout rate per member.
        seeds: one seed per member, for its masks.
        extra: columns of further families, each of one column.
    """
    extra = extra or {}
    columns = {**dropout_columns(ensemble, images.train), **extra}
    marginal = ensembles.dropout_equations(
        ensemble, F.cross_entropy, images.train, [l2(), layerwise(l2()), *columns],
        dropout=rates, seeds=seeds, noise=config.noise, columns=columns,
    )  # fmt: skip
    for m, equations in enumerate(marginal.equations):
        yield {
            "theory": rates[m] / (1 - rates[m]),
            "draws": marginal.draws[m],
            "noise": marginal.noise[m],
            **_family_columns(equations),
            **_joint_columns(equations, "joint", FAMILIES),
            **_extra_columns(equations, [family.name for family in extra]),
        }


def _family_columns(equations: Equations) -> Row:
    """Strength, explained fraction and problems of each family when it is the only candidate."""
    row: Row = {}
    for name in FAMILIES:
        row |= _single_columns(equations, name)
    for name in ("l2", "weighted_l2"):
        layers = [i for i, column in enumerate(equations.names) if column.startswith(f"{name}[")]
        row[f"layerwise_{name}_explained"] = fit(equations.select_columns(layers)).explained
    return row


def _extra_columns(equations: Equations, names: list[str]) -> Row:
    """Each further family as the only candidate, and all of them jointly with the others."""
    row: Row = {}
    for name in names:
        row |= _single_columns(equations, name)
    return row | _joint_columns(equations, "joint_all", (*FAMILIES, *names)) if names else row


def _single_columns(equations: Equations, name: str) -> Row:
    family_fit = fit(equations.select_columns([equations.names.index(name)]))
    return {
        f"{name}_strength": family_fit.strengths[name],
        f"{name}_explained": family_fit.explained,
        f"{name}_problems": join_kinds(family_fit.problems),
    }


def _joint_columns(equations: Equations, prefix: str, names: tuple[str, ...]) -> Row:
    """Strengths of several families in one fit, with the fraction that they explain together."""
    joint = fit(equations.select_columns([equations.names.index(name) for name in names]))
    return {
        **{f"{prefix}_{name}_strength": joint.strengths[name] for name in names},
        f"{prefix}_explained": joint.explained,
        f"{prefix}_problems": join_kinds(joint.problems),
    }
