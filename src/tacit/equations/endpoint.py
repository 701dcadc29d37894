"""The endpoint equations: which penalty would make this point an optimum?"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tacit.equations.equations import Equations
from tacit.equations.rows import check_candidates
from tacit.equations.target import Setting, Target, TargetPoint, write_equations
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Scope, norm
from tacit.regularizers.family import Regularizer


def endpoint_target(objective: Objective, *, params: Mapping[str, Tensor] | None = None) -> Target:
    """−∇L(θ) at one point, by default at the model's current parameters: one pass over the data."""
    params = check_objective(objective).point(params)
    floors = objective.rounding(params)
    value, gradient = objective.value_and_gradient(params)
    gradient_norm = norm(gradient)
    vector = {name: tensor.neg_() for name, tensor in gradient.items()}
    point = TargetPoint(params, [vector], floors, gradient_norm, loss_value=value)
    return Target(Setting("endpoint", objective), (point,))


def endpoint_equations(
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ) = −∇L(θ) at one point: the total effect of everything.

    The short form of `endpoint_target(objective).equations(regularizers)`.

    Trap: they assume that θ is a stationary point of L + R. Where training stopped early or
    noisily, λ mixes regularization with unfinished optimisation.

    Args:
        objective: the loss, without any penalty.
        regularizers: candidates whose strengths are estimated.
        params: the point; by default the model's current parameters.
        known: penalties that training did apply, with their strengths; their gradients are
            subtracted from the target.
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, known)  # before the pass over the data
    target = endpoint_target(objective, params=params)
    return write_equations(target.setting, target.points, candidates, rows)
