"""Reference displacements: where the gradient flow dθ/dt = −∇L − Σ known would go."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from tacit.errors import InputError, check_whole
from tacit.objective.objective import Objective
from tacit.objective.params import Params, same_buffers, to_float64
from tacit.regularizers.family import Regularizer, weighted_gradient


class Differentiable(Protocol):
    """What a reference follows: anything with a gradient, such as an `Objective`."""

    def gradient(self, params: Mapping[str, Tensor], /) -> Params:
        """The gradient at a point, as new tensors in float64."""
        ...


Reference = Callable[[Any, Params, float], Params]
"""From what it follows (`Differentiable`), a point and a time to a displacement, in float64."""


class Flow:
    """L + Σ s_k R_k of an objective and known penalties, as references follow it.

    It has the derivatives of the sum; without known penalties also all else that an objective has.
    """

    def __init__(self, objective: Objective, known: Mapping[Regularizer, float]):
        self._objective, self._known = objective, known
        self.followed = False
        """Whether a gradient was asked for."""
        self._reached: set[str] = set()

    def unreached(self, params: Params) -> tuple[str, ...]:
        """Parameters that no gradient of the loss has reached; none if none was asked for."""
        return tuple(n for n in params if self.followed and n not in self._reached)

    def value_and_gradient(
        self, params: Mapping[str, Tensor] | None = None, *, draws: Sequence[int] | None = None
    ) -> tuple[float, Params]:
        """Value and gradient of the sum, from one pass over the data."""
        point = self._objective.point(params)
        result = self._objective.differentiate(point, draws=draws)
        self.followed = True
        self._reached |= result.derivative.keys() - set(result.unreached)
        if not self._known:
            return result.value, result.derivative
        penalties = weighted_gradient(self._known, point)
        total = {n: g.add_(penalties[n].to(g)) for n, g in result.derivative.items()}
        value = result.value + sum(s * float(r.value(point)[0]) for r, s in self._known.items())
        return value, total

    def gradient(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """Gradient of the sum, in float64."""
        return self.value_and_gradient(params)[1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._known:
            raise InputError(
                f"the reference reads {name!r} of the objective, which has no known penalties in "
                "it: with known= a reference may use gradient and value_and_gradient."
            )
        return getattr(self._objective, name)


def euler(objective: Differentiable, point: Params, time: float) -> Params:
    """One explicit step, −time·∇L: the reference for what is added to plain gradient descent."""
    return {n: g.mul_(-time) for n, g in objective.gradient(point).items()}


def rk4(substeps: int = 10) -> Reference:
    """Gradient flow by classical Runge–Kutta: the reference for what discrete steps add to it.

    Costs 4·substeps gradients per step. Trap: an Euler reference of k substeps instead would bias
    the strength of ‖∇L‖² by exactly 1 − 1/k.
    """
    check_whole("substeps", substeps)

    def reference(objective: Differentiable, point: Params, time: float) -> Params:
        start = {n: to_float64(p) for n, p in point.items()}
        displacement = {n: p.new_zeros(p.shape) for n, p in start.items()}
        h = time / substeps

        def velocity(ahead: float, direction: Params) -> Params:
            """−∇L at the current point plus ahead·direction."""
            params = {n: p + displacement[n] + ahead * direction[n] for n, p in start.items()}
            gradient = objective.gradient(same_buffers(params, point))
            return {n: g.neg_() for n, g in gradient.items()}

        for _ in range(substeps):
            k1 = velocity(0, displacement)
            k2 = velocity(h / 2, k1)
            k3 = velocity(h / 2, k2)
            k4 = velocity(h, k3)
            for n, total in displacement.items():
                total.add_(k1[n] + 2 * k2[n] + 2 * k3[n] + k4[n], alpha=h / 6)
        return displacement

    return reference
