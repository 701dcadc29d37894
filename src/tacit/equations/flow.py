"""Reference displacements: where the flow dθ/dt = −M⁻¹∇(L + Σ known) would go.

M is a metric: the identity for gradient flow, rates of their own for groups of parameters, or
Adam's, which rescales every coordinate.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tacit.errors import InputError, check_number, check_type, check_whole
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, check_finite, same_buffers, shorten, to_float64
from tacit.regularizers.family import Regularizer, weighted_gradient


class Differentiable(Protocol):
    """What a reference follows: anything with a gradient, such as an `Objective`."""

    def gradient(self, params: Mapping[str, Tensor], /) -> Params:
        """The gradient at a point, as new tensors in float64."""
        ...


Reference = Callable[[Any, Params, float, int], Params]
"""reference(objective, params, time, step): from what it follows (`Differentiable`), a point, a
time and the number of the step to a displacement, in float64."""

MetricOfGradient = Callable[[Params], Params]
"""From the gradient at a point to the metric there, by parameter."""
Metric = Mapping[str, Tensor | float] | MetricOfGradient
"""A number or a tensor for every parameter; or a function of the gradient."""


def adam_flow(eps: float) -> MetricOfGradient:
    """The metric of Adam's own flow, M_j = √(g_j² + ε), that is dθ_j/dt = −g_j/√(g_j² + ε).

    It is where steps of Adam go as their size goes to zero, with ε inside of the root. For torch's
    Adam, whose eps is outside, pass its square; both differ where |g_j| is not far above eps.
    """
    check_number("eps", eps, least=0)
    return lambda gradient: {n: (g.square() + eps).sqrt() for n, g in gradient.items()}


class SeenGradients:
    """What is remembered of the gradients that a reference asked for."""

    def __init__(self, metric: Params):
        self.any = False
        self.metric = metric
        """M at the first point; empty for the identity."""
        self._reached: set[str] = set()

    def add(self, reached: set[str], metric: Params) -> None:
        """Remember one more gradient, by the parameters that it reaches, and the metric there."""
        self.metric = self.metric if self.any else metric
        self.any = True
        self._reached |= reached

    def unreached(self, params: Params) -> tuple[str, ...]:
        """Parameters that no gradient has reached; none if there was none."""
        return tuple(n for n in params if self.any and n not in self._reached)


class Flow:
    """L + Σ s_k R_k of an objective and known penalties, as references follow it in a metric.

    Its gradient is M⁻¹∇(L + Σ s_k R_k). Without known penalties and metric it also has all else
    that an objective has.
    """

    def __init__(
        self,
        objective: Objective,
        known: Mapping[Regularizer, float],
        metric: Params | MetricOfGradient | None = None,
    ):
        self._objective, self._known, self._metric = objective, known, metric or {}
        self.seen = SeenGradients({} if callable(self._metric) else self._metric)

    def on(self, objective: Objective) -> "Flow":
        """The flow of another loss, such as that of one batch, in place of this one's."""
        other = Flow(objective, self._known, self._metric)
        other.seen = self.seen
        return other

    def value_and_gradient(
        self, params: Mapping[str, Tensor] | None = None, *, draws: Sequence[int] | None = None
    ) -> tuple[float, Params]:
        """Value and gradient of the sum, from one pass over the data."""
        point = self._objective.point(params)
        result = self._objective.differentiate(point, draws=draws)
        value, total = result.value, result.derivative
        reached = total.keys() - set(result.unreached)
        if self._known:
            penalties = weighted_gradient(self._known, point)
            total = {n: g.add_(penalties[n].to(g)) for n, g in total.items()}
            value += sum(s * float(r.value(point)[0]) for r, s in self._known.items())
        metric = self._metric
        if callable(metric):
            metric = _check_values(metric({n: g.clone() for n, g in total.items()}), total)
        self.seen.add(reached, metric)
        if metric:
            total = {n: divide_by(g, metric[n]) for n, g in total.items()}
        return value, total

    def gradient(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """Gradient of the sum, in float64."""
        return self.value_and_gradient(params)[1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._known or self._metric:
            raise InputError(
                f"the reference reads {name!r} of the objective, which has no known penalties and "
                "no metric in it: with known= or a metric, a reference may use gradient and "
                "value_and_gradient."
            )
        return getattr(self._objective, name)


def divide_by(vector: Tensor, metric: Tensor) -> Tensor:
    """M⁻¹v; zero where v is, as for a coordinate that neither has a gradient nor a metric."""
    return torch.where(vector == 0, vector, vector / metric.to(vector))


def euler(objective: Differentiable, params: Params, time: float, step: int = 0) -> Params:
    """One explicit step, −time·∇L: the reference for what is added to plain gradient descent."""
    return {n: g.mul_(-time) for n, g in objective.gradient(params).items()}


@dataclass(frozen=True, eq=False)
class OnBatches:
    """One explicit step on the batch of each step; see `on_batches`."""

    objectives: Sequence[Objective]

    def __call__(self, objective: Any, params: Params, time: float, step: int) -> Params:
        """−time·∇L_t."""
        if step >= len(self.objectives):
            raise InputError(
                f"step {step} has no batch: on_batches was given {len(self.objectives)} "
                "objectives. Pass one for each step of the trajectory, in order."
            )
        batch = self.objectives[step]
        return euler(objective.on(batch) if isinstance(objective, Flow) else batch, params, time)


def on_batches(objectives: Sequence[Objective]) -> Reference:
    """One explicit step on the batch of step t, −time·∇L_t: what was added to a step of plain SGD.

    The noise of the batches is then in the reference as well as in the step, and cancels: SGD with
    a technique is compared with SGD without it, coupled by their batches.

    Args:
        objectives: the plain objective of the batch of each step, as in
            [tacit.Objective(model, loss, batch) for batch in batches].
    """
    check_type("objectives", objectives, Sequence, "a list with one objective for each step")
    for number, objective in enumerate(objectives):
        check_objective(objective, what=f"objective {number} of on_batches")
    return OnBatches(tuple(objectives))


def is_one_step(reference: Reference) -> bool:
    """Whether a reference is one explicit step from its point, and no flow."""
    return reference is euler or isinstance(reference, OnBatches)


def rk4(substeps: int = 10) -> Reference:
    """Gradient flow by classical Runge–Kutta: the reference for what discrete steps add to it.

    Costs 4·substeps gradients per step. Trap: an Euler reference of k substeps instead would bias
    the strength of ‖∇L‖² by exactly 1 − 1/k.
    """
    check_whole("substeps", substeps)

    def reference(objective: Differentiable, params: Params, time: float, step: int = 0) -> Params:
        start = {n: to_float64(p) for n, p in params.items()}
        displacement = {n: p.new_zeros(p.shape) for n, p in start.items()}
        h = time / substeps

        def velocity(ahead: float, direction: Params) -> Params:
            """−∇L at the current point plus ahead·direction."""
            point = {n: p + displacement[n] + ahead * direction[n] for n, p in start.items()}
            gradient = objective.gradient(same_buffers(point, params))
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


def check_reference(reference: Any) -> None:
    """Refuse what cannot be called as a reference."""
    given = f"reference is {reference!r}"
    if callable(reference) and reference is not rk4:
        try:
            inspect.signature(reference).bind("objective", "params", "time", "step")
            return
        except TypeError as error:
            given = f"the reference cannot be called with four arguments ({error})"
    raise InputError(
        f"{given}: pass tacit.equations.euler, tacit.rk4(substeps=10), or a function "
        "reference(objective, params, time, step) that returns a displacement."
    )


def check_metric(metric: Metric, params: Params) -> Params | MetricOfGradient:
    """A metric with a tensor for every parameter, in float64; anything else is refused."""
    if not isinstance(metric, Mapping) and callable(metric):
        try:
            inspect.signature(metric).bind("gradient")
        except TypeError as error:
            raise InputError(
                f"the metric cannot be called with a gradient ({error}): pass "
                "tacit.equations.adam_flow(eps), or another function of the gradient."
            ) from error
        return metric
    tensors = _check_values(metric, params)
    if zero := [n for n, tensor in tensors.items() if bool((tensor == 0).any())]:
        raise InputError(f"metric is zero for {shorten(zero)}: pass numbers above zero.")
    return tensors


def _check_values(metric: Any, params: Params) -> Params:
    """The values of a metric in float64, or those that a function of the gradient returned.

    The latter may be zero, as Adam's is where the gradient is.
    """
    needed = (
        "a dictionary from parameter to a positive number or tensor, or tacit.equations.adam_flow, "
        "or another function of the gradient that returns such a dictionary"
    )
    check_type("metric", metric, Mapping, needed)
    missing = [n for n in params if n not in metric]
    unknown = [n for n in metric if n not in params]
    if missing or unknown:
        raise InputError(
            f"metric has no value for {shorten(missing) or 'nothing'}, and unknown names "
            f"{shorten(unknown) or 'nothing'}: pass one for each of {shorten(params)}."
        )
    for name, value in metric.items():
        if not isinstance(value, Tensor):
            check_number(f"metric[{name!r}]", value)
    tensors = {n: to_float64(torch.as_tensor(metric[n])).to(p.device) for n, p in params.items()}
    check_finite(tensors, what="metric")
    for name, tensor in tensors.items():
        if tensor.shape not in ((), params[name].shape) or bool((tensor < 0).any()):
            raise InputError(
                f"metric[{name!r}] has shape {tuple(tensor.shape)} and smallest value "
                f"{float(tensor.min()):g}: pass a number above zero, or a tensor of them of shape "
                f"{tuple(params[name].shape)}."
            )
    return tensors
