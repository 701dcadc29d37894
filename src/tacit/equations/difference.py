"""The difference equations: what does a technique add to the loss?"""

from collections.abc import Mapping, Sequence
from itertools import permutations

from torch import Tensor

from tacit.equations.candidates import check_candidates
from tacit.equations.equations import Equations
from tacit.equations.sources import PointFacts
from tacit.equations.target import (
    Setting,
    Target,
    TargetPoint,
    group_gradients,
    independent_draws,
    write_equations,
)
from tacit.equations.trajectory import GROUPS
from tacit.errors import InputError, check_whole
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, Scope, norm, shorten
from tacit.objective.ranks import on_its_ranks
from tacit.regularizers.family import Regularizer


@on_its_ranks
def difference_target(
    technique: Objective,
    plain: Objective,
    *,
    params: Mapping[str, Tensor] | None = None,
    groups: int | None = None,
) -> Target:
    """∇L_technique(θ) − ∇L_plain(θ) at one point, one vector per group of draws.

    Args:
        technique: the objective with the technique, such as Objective(…, training=True, draws=64).
        plain: the objective without it, at the same weights.
        params: the point; by default the model's current parameters.
        groups: groups of draws; by default 8, or as many as there are draws (pairs of draws, where
            they are mirrored). Each group takes one float64 vector of the parameters' size: pass
            groups=2 where memory is short.
    """
    for objective in (technique, plain):
        check_objective(objective)
    _check_same_parameters(technique, plain)
    if groups is None:
        draws = [independent_draws(o) for o in (technique, plain) if o.random]
        groups = max(2, min([GROUPS, *draws]))  # with one draw, two groups are refused below
    else:
        check_whole("groups", groups)
    params = technique.point(params)
    floors = technique.rounding(params)
    plain_groups = group_gradients(plain, params, groups)
    technique_groups = group_gradients(technique, params, groups)
    all_groups = [*plain_groups, *technique_groups]
    gradient_norm = norm(plain_groups[0].derivative)
    vectors = _subtract_in_place(
        [group.derivative for group in technique_groups],
        [group.derivative for group in plain_groups],
    )
    loss = sum(group.value for group in technique_groups) / len(technique_groups)
    unreached = tuple(n for n in params if all(n in group.unreached for group in all_groups))
    facts = PointFacts(unreached=unreached)
    point = TargetPoint(params, vectors, floors, gradient_norm, loss, facts=facts)
    return Target(Setting("difference", technique, plain, len(vectors)), (point,))


def difference_equations(
    technique: Objective,
    plain: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    groups: int | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ) = ∇L_technique(θ) − ∇L_plain(θ): only the technique's effect.

    The short form of `difference_target(technique, plain).equations(regularizers)`. They hold at
    any weights. A technique with randomness (dropout masks) is averaged over its draws in
    independent groups, one target column each. The disagreement between groups measures the noise
    of the draws: the explained fraction is corrected for it, and error bars follow.

    Args:
        technique: the objective with the technique.
        plain: the objective without it, at the same weights.
        regularizers: candidates whose strengths are estimated.
        params: the point; by default the model's current parameters.
        groups: groups of draws; see `difference_target`.
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, None)  # before the passes over the data
    target = difference_target(technique, plain, params=params, groups=groups)
    return write_equations(target.setting, target.points, candidates, rows)


def _check_same_parameters(technique: Objective, plain: Objective) -> None:
    """Refuse objectives that train different parameters."""
    pair = {"technique": technique.params, "plain": plain.params}
    for (one, names), (other, others) in permutations(pair.items()):
        if lacking := [n for n in names if n not in others]:
            raise InputError(
                f"the {one} objective trains {shorten(lacking)}, and the {other} one does not: "
                "pass objectives of the same model, with the same parameters frozen."
            )


def _subtract_in_place(technique: Sequence[Params], plain: Sequence[Params]) -> Sequence[Params]:
    """Differences of group gradients; the longer list is overwritten to save memory.

    An objective without randomness has a single gradient, which all groups share.
    """
    longer, shorter, sign = technique, plain, 1
    if len(plain) > len(technique):
        longer, shorter, sign = plain, technique, -1
    for group, target in enumerate(longer):
        for name, tensor in target.items():
            tensor.sub_(shorter[group % len(shorter)][name]).mul_(sign)
    return longer
