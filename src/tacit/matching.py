"""Gradient matching: three ways to write equations in the strengths, for three questions.

- endpoint: which penalty would make this point an optimum?
- difference: what does this technique add to the loss?
- trajectory: what force besides the loss gradient moved the weights?
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.assembly import Candidates, assemble, check_candidates
from tacit.equations import Block, Equations, Source
from tacit.errors import InputError
from tacit.fitting import Fit, fit
from tacit.flow import Reference, euler, rk4
from tacit.losses import Loss
from tacit.noise import dealt
from tacit.objective import Objective
from tacit.params import Params, Scope, norm, select, square_norm, wide
from tacit.probes import coarsest
from tacit.regularizers import Regularizer
from tacit.trajectory import Trajectory, check_alike
from tacit.uncertainty.scores import with_sampling

GROUPS = 8
"""Groups of draws by default: the spread of so few is known to a quarter, at t of 7 degrees."""


def estimate(
    model: nn.Module,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, float] | None = None,
    nonnegative: bool = False,
    population: float | None = None,
) -> Fit:
    """Strengths λ that make a trained model an optimum: ∇L + Σ λ_k ∇R_k = 0, by least squares.

    The short way through `Objective`, `endpoint_equations` and `fit`: one pass over the data. With
    `population`, how many examples the data was drawn from (math.inf for no end of them), a second
    pass adds error bars for which examples were drawn, as `score_examples` does.

    >>> import tacit
    >>> X, y = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(y.T / 1.5)  # the optimum of mse_loss + 0.25 ‖θ‖²
    >>> found = estimate(model, torch.nn.functional.mse_loss, (X, y), [tacit.l2()])
    >>> round(found.strengths["l2"], 12), round(found.explained, 12)
    (0.25, 1.0)
    """
    objective = Objective(model, loss, data)
    equations = endpoint_equations(objective, regularizers, known=known)
    found = fit(equations, nonnegative=nonnegative)
    return with_sampling(found, objective, regularizers, known=known, population=population)


def endpoint_equations(
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ) = −∇L(θ) at one point: the total effect of everything.

    Assumes that θ is a stationary point of L + R. Where training stopped early or noisily, λ
    mixes regularization with unfinished optimisation.

    Args:
        objective: the loss, without any penalty.
        regularizers: candidates whose strengths are estimated.
        params: the point; by default the model's parameters as they are.
        known: penalties that training did apply, with their strengths; they move to the target.
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, known)
    params = _point(objective, params)
    chosen = select(params, rows, what="rows")
    bound = candidates.bind(params)
    floors = _rounding_norms(objective, params)
    value, gradient = objective.value_and_gradient(params)
    length = norm(gradient)
    for tensor in gradient.values():
        tensor.neg_()
    blocks = assemble(params, bound, [gradient], floors=floors, rows=chosen)
    source = Source(
        mode="endpoint",
        loss_value=value,
        gradient_norm=length,
        **_described(objective, params, chosen, candidates),
    )
    return Equations(bound.families, bound.columns.names, 1, tuple(blocks), (source,))


def difference_equations(
    technique: Objective,
    plain: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    groups: int | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ) = ∇L_technique(θ) − ∇L_plain(θ): the technique's own effect.

    Holds at any weights. A technique with randomness (dropout masks) is averaged over its draws
    in `groups` independent groups, one target column each, so that the explained fraction can be
    freed of the draws' noise, and that noise gives error bars. By default there are 8, or as many
    as draws allow; mirrored draws stay together, two at a time. Each group holds one vector of the
    parameters' size in float64: pass groups=2 where memory is short.
    """
    if groups is not None and (
        isinstance(groups, bool) or not isinstance(groups, int) or groups < 1
    ):
        raise InputError(f"groups is {groups!r}: pass a whole number, at least 1.")
    candidates = check_candidates(regularizers, None)
    params = _point(technique, params)
    _check_objective(plain)
    chosen = select(params, rows, what="rows")
    bound = candidates.bind(params)
    floors = _rounding_norms(technique, params)
    if groups is None:
        random = [_independent_draws(o) for o in (technique, plain) if o.training]
        groups = max(2, min([GROUPS, *random]))  # one draw alone hides its noise: refused below
    without = _group_gradients(plain, params, groups)
    with_it = _group_gradients(technique, params, groups)
    length, count = norm(without[0][1]), max(len(with_it), len(without))
    # In place, in the longer list: a group's gradient is not needed beside its target.
    longer, sign = (with_it, 1) if len(with_it) == count else (without, -1)
    shorter = without if longer is with_it else with_it
    targets = [gradient for _, gradient in longer]
    for group, target in enumerate(targets):
        for name, tensor in target.items():
            tensor.sub_(shorter[group % len(shorter)][1][name]).mul_(sign)
    blocks = assemble(params, bound, targets, floors=floors, rows=chosen)
    source = Source(
        mode="difference",
        loss_value=sum(value for value, _ in with_it) / len(with_it),
        gradient_norm=length,
        **_described(technique, params, chosen, candidates),
    )
    return Equations(bound.families, bound.columns.names, count, tuple(blocks), (source,))


def trajectory_equations(
    objective: Objective,
    trajectory: Trajectory,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    reference: Reference = euler,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ_t) = (reference − observed displacement)/time at every step.

    The reference says where the unregularised flow would have gone: `euler` for what a step adds
    to −η∇L, `rk4()` for what discrete steps add to gradient flow. The signal is a small
    difference: in float32 it drowns in rounding at small steps, and the fit says so.
    """
    candidates = check_candidates(regularizers, known)
    if not isinstance(trajectory, Trajectory):
        raise InputError(
            f"trajectory is a {type(trajectory).__name__}: pass tacit.Trajectory(points, "
            "displacements, times), Trajectory.from_positions, or recorder.trajectory()."
        )
    if not callable(reference) or reference is rk4:
        raise InputError(f"reference is {reference!r}: pass tacit.euler or tacit.rk4(substeps=10).")
    blocks: list[Block] = []
    lengths: list[float] = []
    params = _point(objective, None)
    families, names = (), ()
    chosen = select(params, rows, what="rows")
    steps = zip(trajectory.points, trajectory.displacements, trajectory.times, strict=True)
    for step, (point, moved, time) in enumerate(steps):
        params = objective.point(point, what="a trajectory's point")
        bound = candidates.bind(params)
        families, names = bound.families, bound.columns.names
        ahead = reference(objective, params, time)
        check_alike(ahead, params, "the reference displacement")
        lengths.append(norm(ahead) / time)
        target = {
            n: (wide(ahead[n]) - wide(moved[n].detach()).to(wide(ahead[n]).device)) / time
            for n in params
        }
        eps = torch.finfo(coarsest(*params.values(), *point.values())).eps
        floors = {n: eps * math.sqrt(square_norm(p)) / time for n, p in params.items()}
        blocks += assemble(params, bound, [target], floors=floors, rows=chosen, step=step)
    source = Source(
        mode="trajectory",
        steps=len(lengths),
        gradient_norm=math.sqrt(sum(length**2 for length in lengths) / len(lengths)),
        **_described(objective, params, chosen, candidates),
    )
    return Equations(families, names, 1, tuple(blocks), (source,))


def _point(objective: Objective, params: Mapping[str, Tensor] | None) -> Params:
    _check_objective(objective)
    return objective.point(params)


def _check_objective(given: Objective) -> None:
    if not isinstance(given, Objective):
        raise InputError(
            f"an objective is a {type(given).__name__}: pass tacit.Objective(model, loss, data)."
        )


def _rounding_norms(objective: Objective, params: Params) -> dict[str, float]:
    return {n: math.sqrt(square_norm(t)) for n, t in objective.rounding(params).items()}


def _group_gradients(
    objective: Objective, params: Params, groups: int
) -> list[tuple[float, Params]]:
    """L and ∇L averaged over each group of draws; once where there is nothing to draw."""
    if not objective.training:
        return [objective.value_and_gradient(params)]
    if _independent_draws(objective) < groups:
        least = 2 * groups if objective.paired else groups
        raise InputError(
            f"{objective.draws} draws cannot make {groups} groups"
            f"{' of mirrored pairs' if objective.paired else ''}: pass "
            f"Objective(…, training=True, draws={least}) or more, or fewer groups."
        )
    shared = dealt(objective.draws, groups, paired=objective.paired)
    return [objective.value_and_gradient(params, draws=own) for own in shared]


def _independent_draws(objective: Objective) -> int:
    """Draws that are independent of each other: all, or one of each mirrored pair."""
    return objective.draws // 2 if objective.paired else objective.draws


def _described(
    objective: Objective, params: Params, chosen: Sequence[str], candidates: Candidates
) -> dict[str, Any]:
    """What a source says of the model, the data and the known penalties."""
    model = objective.model
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    return {
        "loss": objective.loss_name,
        "examples": objective.count,
        "parameters": sum(params[n].numel() for n in chosen),
        "tensors": len(chosen),
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "tied": len(names) - len(list(model.parameters())),
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params.values()})),
        "parameter_norm": norm(params),
        "known": {r.name: float(strength) for r, strength in candidates.known.items()},
    }
