"""How a fit was computed: its equations, candidates, data, and what is random."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from tacit.fitting.summary import summarize
from tacit.regularizers.overview import CATALOGUE
from tacit.reporting.parts import Section, pairs, paragraph

if TYPE_CHECKING:
    from tacit.equations.sources import Family
    from tacit.fitting.fits import Fit
    from tacit.objective.objective import Objective

QUESTIONS = {
    "endpoint": "Which penalty would make these weights an optimum?",
    "difference": "What does the technique add to the loss, at these weights?",
    "trajectory": "What force besides the loss gradient moved the weights?",
    "accumulated": "Which potential does the whole path follow?",
}
"""What each kind of equations asks."""
IN_WORDS = {
    "endpoint": "−∇L at these weights, the pull of the loss that something must have resisted",
    "difference": "how the technique changes the gradient of the loss",
    "trajectory": "how the weights moved beyond what the gradient of the loss makes them",
    "accumulated": "the pull of the loss along the path",
}
"""The target of each kind of equations, for readers who see it for the first time."""
EQUATIONS = {
    "endpoint": "∇L(θ) + Σ λₖ ∇Rₖ(θ) = 0",
    "difference": "Σ λₖ ∇Rₖ(θ) = ∇L with the technique − ∇L without it, at the same θ",
    "trajectory": "Σ λₖ ∇Rₖ(θ) = (reference − observed displacement) / time, at every step",
    "accumulated": "Σ λₖ ∫∇Rₖ = −∫∇L, along the path",
}
MOST_CANDIDATES = 40


def modes_of(fit: "Fit") -> list[str]:
    """The kinds of equations that a fit is of."""
    return sorted({source.mode for source in fit.sources})


def question(fit: "Fit") -> str:
    """What a fit answers."""
    return " ".join(QUESTIONS[mode] for mode in modes_of(fit))


def target_sentence(fit: "Fit") -> str:
    """What the target of a fit is, in words."""
    targets = "; ".join(IN_WORDS[mode] for mode in modes_of(fit))
    return f"The target is what the penalties are to explain: {targets}."


def method_section(fit: "Fit") -> Section:
    """Equations, candidates with their formulas, and the facts of the summary."""
    equations = "".join(f'<p class="equation">{escape(EQUATIONS[m])}</p>' for m in modes_of(fit))
    explained = (
        "L is the mean loss without any penalty, θ the parameters, Rₖ the candidate penalties and "
        "λₖ their strengths. One equation per parameter; solved by least squares in float64"
        f"{_constraints(fit)}."
    )
    families = fit.equations.families
    candidates = [(family.name, _formula(family)) for family in families[:MOST_CANDIDATES]]
    if len(families) > MOST_CANDIDATES:
        candidates.append(("…", f"and {len(families) - MOST_CANDIDATES} more"))
    facts = [*summarize(fit).facts, *_randomness(fit)]
    content = [
        equations,
        paragraph(explained),
        "<h3>Candidates</h3>",
        pairs(candidates, "candidates and their formulas"),
        "<h3>Data and model</h3>",
        pairs(facts, "data and model"),
    ]
    return Section("method", "How it was computed", "\n".join(content))


def _constraints(fit: "Fit") -> str:
    texts = [", under λ ≥ 0"] if fit.nonnegative else []
    return "".join([*texts, ", under Λ ⪰ 0"] if fit.psd else texts)


def _formula(family: "Family") -> str:
    """R of a family, where the catalogue knows it."""
    call = family.definition or family.kind
    name = call.partition("(")[0]
    formula = next((entry.formula for entry in CATALOGUE if entry.name == name), "")
    shown = f"R = {formula}" if formula else "a penalty of your own"
    return f"{shown}   ({call})" if "(" in call and formula else shown


def _randomness(fit: "Fit") -> Iterator[tuple[str, str]]:
    """Mode, draws and seeds of the objectives, while these are in memory."""
    if fit.equations.origin is None:
        return
    setting = fit.equations.origin.setting
    objectives = {"": setting.computed_from}
    if setting.plain is not None:
        objectives = {"with the technique": setting.computed_from, "without": setting.plain}
    for label, objective in objectives.items():
        if objective is not None:
            yield f"loss {label}".strip() if label else "evaluated", _describe_mode(objective)


def _describe_mode(objective: "Objective") -> str:
    parts = ["in training mode" if objective.training else "in evaluation mode"]
    if objective.batch_norm is not None:
        parts.append(f'batch norm with "{objective.batch_norm}" statistics')
    if objective.random:
        parts.append(f"{objective.draws} draws")
    parts.append(f"seed {objective.seed}" if objective.random else "nothing random")
    return ", ".join(parts)
