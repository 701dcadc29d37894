"""The endpoint equations: which penalty would make this point an optimum?"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tacit.equations.equations import Equations, Source
from tacit.equations.rows import check_candidates, describe, point_of, rounding_norms, write_blocks
from tacit.objective.objective import Objective
from tacit.objective.params import Scope, norm, select
from tacit.regularizers import Regularizer


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
    params = point_of(objective, params)
    chosen = select(params, rows, what="rows")
    bound = candidates.bind(params)
    floors = rounding_norms(objective, params)
    value, gradient = objective.value_and_gradient(params)
    length = norm(gradient)
    for tensor in gradient.values():
        tensor.neg_()
    blocks = write_blocks(params, bound, [gradient], floors=floors, rows=chosen)
    source = Source(
        mode="endpoint",
        loss_value=value,
        gradient_norm=length,
        **describe(objective, params, chosen, candidates),
    )
    return Equations(bound.families, bound.columns.names, 1, tuple(blocks), (source,))
