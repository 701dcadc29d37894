"""The endpoint equations: which penalty would make this point an optimum?"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tacit.equations.equations import Equations, Source
from tacit.equations.rows import check_candidates, write_equations
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Scope, norm
from tacit.regularizers.family import Regularizer


def endpoint_equations(
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ) = −∇L(θ) at one point: the total effect of everything.

    Trap: they assume that θ is a stationary point of L + R. Where training stopped early or
    noisily, λ mixes regularization with unfinished optimisation.

    Args:
        objective: the loss, without any penalty.
        regularizers: candidates whose strengths are estimated.
        params: the point; by default the model's current parameters.
        known: penalties that training did apply, with their strengths; they move to the target.
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, known)
    params = check_objective(objective).point(params)
    bound = candidates.bind(params, rows)
    floors = objective.rounding(params)
    value, gradient = objective.value_and_gradient(params)
    source = Source(
        mode="endpoint",
        loss_value=value,
        gradient_norm=norm(gradient),
        **objective.describe(params),
        **bound.describe(),
    )
    target = {name: tensor.neg_() for name, tensor in gradient.items()}
    return write_equations(bound, [target], floors=floors, source=source)
