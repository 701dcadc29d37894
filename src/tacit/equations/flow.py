"""Reference displacements: where the unregularised gradient flow dθ/dt = −∇L would go."""

from collections.abc import Callable

from tacit.errors import check_whole
from tacit.objective.objective import Objective
from tacit.objective.params import Params, to_float64

Reference = Callable[[Objective, Params, float], Params]
"""From an objective, a point and a time to a displacement, in float64."""


def euler(objective: Objective, point: Params, time: float) -> Params:
    """One explicit step, −time·∇L: the reference for what is added to plain gradient descent."""
    return {n: g.mul_(-time) for n, g in objective.gradient(point).items()}


def rk4(substeps: int = 10) -> Reference:
    """Gradient flow by classical Runge–Kutta: the reference for what discrete steps add to it.

    Costs 4·substeps gradients per step. Trap: an Euler reference of k substeps instead would bias
    the strength of ‖∇L‖² by exactly 1 − 1/k.
    """
    check_whole("substeps", substeps)

    def reference(objective: Objective, point: Params, time: float) -> Params:
        start = {n: to_float64(p) for n, p in point.items()}
        displacement = {n: p.new_zeros(p.shape) for n, p in start.items()}
        h = time / substeps

        def velocity(ahead: float, direction: Params) -> Params:
            """−∇L at the current point plus ahead·direction."""
            params = {n: p + displacement[n] + ahead * direction[n] for n, p in start.items()}
            return {n: g.neg_() for n, g in objective.gradient(params).items()}

        for _ in range(substeps):
            k1 = velocity(0, displacement)
            k2 = velocity(h / 2, k1)
            k3 = velocity(h / 2, k2)
            k4 = velocity(h, k3)
            for n, total in displacement.items():
                total.add_(k1[n] + 2 * k2[n] + 2 * k3[n] + k4[n], alpha=h / 6)
        return displacement

    return reference
