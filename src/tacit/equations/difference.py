"""The difference equations: what does a technique add to the loss?"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tacit.equations.equations import Equations, Source
from tacit.equations.rows import (
    check_candidates,
    check_objective,
    describe,
    point_of,
    rounding_norms,
    write_blocks,
)
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, norm, select
from tacit.objective.randomness import split_draws
from tacit.regularizers import Regularizer

GROUPS = 8
"""Groups of draws by default: the spread of so few is known to a quarter, at t of 7 degrees."""


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
    params = point_of(technique, params)
    check_objective(plain)
    chosen = select(params, rows, what="rows")
    bound = candidates.bind(params)
    floors = rounding_norms(technique, params)
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
    blocks = write_blocks(params, bound, targets, floors=floors, rows=chosen)
    source = Source(
        mode="difference",
        loss_value=sum(value for value, _ in with_it) / len(with_it),
        gradient_norm=length,
        **describe(technique, params, chosen, candidates),
    )
    return Equations(bound.families, bound.columns.names, count, tuple(blocks), (source,))


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
    shared = split_draws(objective.draws, groups, paired=objective.paired)
    return [objective.value_and_gradient(params, draws=own) for own in shared]


def _independent_draws(objective: Objective) -> int:
    """Draws that are independent of each other: all, or one of each mirrored pair."""
    return objective.draws // 2 if objective.paired else objective.draws
