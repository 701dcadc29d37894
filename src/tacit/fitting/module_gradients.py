"""Gradients of modules: R_φ at endpoints, ∇R_φ as a function of φ, and what is refused."""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.equations.points import TargetPoint
from tacit.equations.target import Target
from tacit.errors import InputError, check_type
from tacit.objective.params import Params, Scope, select, shorten, to_float64
from tacit.objective.ranks import check_alone

DIRECTIONS, STEPS = 3, (1e-4, 1e-5)
"""Directions and relative steps of the finite differences that a module's derivative is compared
with."""
TOGETHER = 1_000_000
"""Most parameters of endpoints whose gradients are computed at the same time."""


class ScaledModule(nn.Module):
    """scale · module(params): the fitted R_φ, in the units of the loss."""

    scale: Tensor

    def __init__(self, module: nn.Module, scale: float):
        super().__init__()
        self.module = module
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, params: Params) -> Tensor:
        """R_φ of these parameters; what is no scalar is refused."""
        penalty = self.module(params)
        if not isinstance(penalty, Tensor) or penalty.numel() != 1:
            shape = tuple(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
            raise InputError(
                f"the module returned {shape}: a scalar tensor is needed. Sum over its entries."
            )
        return self.scale * penalty.reshape(())


class Endpoint(NamedTuple):
    """Parameters, and what ∇R_φ has to be there, by group of draws."""

    params: Params
    vectors: list[Params]
    mean: Tensor
    """The mean over the groups, as one vector."""
    names: tuple[str, ...]
    """The parameters whose equations are used."""
    stacked: bool = False
    """Whether the parameters are those of several endpoints, along their first dimension."""

    @property
    def rows(self) -> int:
        """The number of equations."""
        return sum(self.params[n].numel() for n in self.names)


def endpoints_of(targets: Any, rows: Scope) -> list[Endpoint]:
    """All points of all targets; wrong ones are refused."""
    if isinstance(targets, Target):
        targets = [targets]
    needed = "a target, or a list of targets as endpoint_target returns"
    check_type("targets", targets, Sequence, needed)
    endpoints = []
    for target in targets:
        check_type("one of the targets", target, Target, "what endpoint_target returns")
        check_alone(target.ranks, "a module of the parameters", shards_only=True)
        if target.setting.mode not in ("endpoint", "difference"):
            raise InputError(
                f"one of the targets is of a {target.setting.mode}: its equations average or "
                "scale columns along a path. Pass targets of endpoint_target or difference_target."
            )
        endpoints += [_endpoint(point, rows) for point in target.points]
    if not endpoints:
        raise InputError(f"targets has no endpoints: pass {needed}.")
    return endpoints


def _endpoint(point: TargetPoint, rows: Scope) -> Endpoint:
    if not point.vectors:
        raise InputError(
            "a target has no vectors: they are not kept with equations and fits. Pass what "
            "endpoint_target returned, or Target.load of a file."
        )
    point.check_unchanged()
    names = select(point.params, rows, what="rows")
    names = tuple(n for n in names if n not in point.facts.unreached)
    params = {n: to_float64(p.detach()) for n, p in point.params.items()}
    vectors = [{n: to_float64(v[n]).to(params[n].device) for n in names} for v in point.vectors]
    if not names or not any(bool(v[n].any()) for v in vectors for n in names):
        raise InputError(
            "a target is zero: there is nothing to explain. Leave that endpoint out, or choose "
            "other rows."
        )
    mean = torch.stack([flatten(v, names) for v in vectors]).mean(0)
    return Endpoint(params, vectors, mean, names)


def prepare(
    module: nn.Module, endpoints: list[Endpoint]
) -> tuple[ScaledModule, list[nn.Parameter]]:
    """A copy of the module, scaled to the targets, and what it has to learn."""
    device = next(iter(endpoints[0].params.values())).device
    scaled = ScaledModule(copy.deepcopy(module).to(device=device, dtype=torch.float64), 1.0)
    scaled.to(device)
    learned = [p for p in scaled.parameters() if p.requires_grad]
    if not learned:
        raise InputError(
            "the module has no parameters that require a gradient: there is nothing to fit. For a "
            "penalty without any use tacit.regularizer, which is fitted by its strength."
        )
    first = gradient_of(scaled, endpoints[0])
    _check_dependence(first, learned)
    again = gradient_of(scaled, endpoints[0])
    check_finite(first, endpoints[0])
    if not first.equal(again):
        raise InputError(
            "the module's gradient is random: it differs between two calls. Call module.eval(), or "
            "take random parts such as dropout out."
        )
    gradients = [gradient_of(scaled, endpoint).detach() for endpoint in endpoints]
    for gradient, endpoint in zip(gradients, endpoints, strict=True):
        check_finite(gradient, endpoint)
    wanted = math.hypot(*(float(endpoint.mean.norm()) for endpoint in endpoints))
    scaled.scale.fill_(wanted / (math.hypot(*(float(g.norm()) for g in gradients)) or 1.0))
    _check_derivative(scaled, learned, endpoints[0])
    return scaled, learned


def stack_endpoints(module: ScaledModule, endpoints: list[Endpoint]) -> list[Endpoint]:
    """The same equations in fewer endpoints: those of the same shapes are stacked.

    One call of the module by vmap then has the gradients of many. Where vmap fails, as at branches
    that depend on parameters, or where gradients would differ, endpoints stay as they are.
    """
    alike: dict[Any, list[Endpoint]] = {}
    for endpoint in endpoints:
        shapes = tuple((n, p.shape) for n, p in endpoint.params.items())
        alike.setdefault((shapes, endpoint.names), []).append(endpoint)
    result = []
    for group in alike.values():
        size = max(1, TOGETHER // sum(p.numel() for p in group[0].params.values()))
        for start in range(0, len(group), size):
            result += _stack(module, group[start : start + size])
    return result


def _stack(module: ScaledModule, endpoints: list[Endpoint]) -> list[Endpoint]:
    """One endpoint for several of the same shapes, if the module has the same gradients there."""
    first = endpoints[0]
    sizes = [first.params[n].numel() for n in first.names]

    def by_name(vectors: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten() for part in torch.stack(vectors).split(sizes, dim=1)])

    params = {n: torch.stack([e.params[n] for e in endpoints]) for n in first.params}
    whole = Endpoint(params, [], by_name([e.mean for e in endpoints]), first.names, stacked=True)
    try:
        together = gradient_of(module, whole).detach()
    except Exception:  # whatever it is, the module works one endpoint at a time
        return endpoints
    single = by_name([gradient_of(module, e).detach() for e in endpoints])
    same = float((together - single).norm()) <= 1e-9 * float(single.norm())
    return [whole] if same and len(endpoints) > 1 else endpoints


def _check_dependence(gradient: Tensor, learned: Sequence[Tensor]) -> None:
    """Refuse a module whose gradient does not depend on what is to be learned."""
    derivative: Sequence[Tensor | None] = []
    if gradient.requires_grad:
        derivative = _differentiate(gradient.square().sum() + gradient.sum(), learned)
    if all(d is None for d in derivative):
        raise InputError(
            "∇R_φ does not depend on the module's parameters: no value of them would explain "
            "more. They have to act on the penalty's derivative (a constant that is added to it "
            "does not), through operations that torch differentiates twice."
        )


def _check_derivative(module: ScaledModule, learned: Sequence[Tensor], endpoint: Endpoint) -> None:
    """Refuse a module whose ∇R_φ has another derivative by φ than torch computes.

    Differences of several sizes along a few directions decide. Where they do not agree with each
    other (a kink lies between), nothing is refused.
    """
    generator = torch.Generator().manual_seed(0)
    origin = [p.detach().clone() for p in learned]
    whole = float(endpoint.mean.square().sum())

    def loss() -> Tensor:
        return (gradient_of(module, endpoint) - endpoint.mean).square().sum() / whole

    computed = _differentiate(loss(), learned)
    derivative = [
        torch.zeros_like(p) if d is None else d for d, p in zip(computed, origin, strict=True)
    ]
    for _ in range(DIRECTIONS):
        direction = [changed_values(v, generator) - v for v in origin]
        expected = sum(float((d * v).sum()) for d, v in zip(derivative, direction, strict=True))
        differences = []
        for step in STEPS:
            ends = []
            for sign in (1, -1):
                moved = zip(origin, direction, strict=True)
                assign(learned, [p + sign * step * v for p, v in moved])
                ends.append(float(loss().detach()))
            differences.append((ends[0] - ends[1]) / (2 * step))
        assign(learned, origin)
        size = max(abs(expected), *map(abs, differences))
        agree = max(differences) - min(differences) <= 1e-3 * size
        if agree and size > 1e-6 and abs(differences[0] - expected) > 0.02 * size:
            raise InputError(
                "torch's derivative of ∇R_φ by the module's parameters is not its finite "
                "difference: the module cannot be differentiated twice. Use operations with a "
                "double backward pass, and no .detach(), .data or numpy on the module's parameters."
            )


def _differentiate(total: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(total, learned, allow_unused=True)
    except RuntimeError as error:
        raise InputError(
            f"the module cannot be differentiated twice ({str(error).splitlines()[0]}): fitting φ "
            "needs the derivative of ∇R_φ. Use operations with a double backward pass."
        ) from error


def gradient_of(module: nn.Module, endpoint: Endpoint) -> Tensor:
    """∇R_φ at an endpoint as a function of φ, in the rows that are used, as one vector."""
    leaves = {n: p.detach().requires_grad_() for n, p in endpoint.params.items()}
    penalty = torch.vmap(module)(leaves).sum() if endpoint.stacked else module(leaves)
    if not penalty.requires_grad:
        raise InputError(
            "the module's value does not depend on the parameters it is called with: compute it "
            "from those tensors, without .item(), .detach() or .data."
        )
    try:
        gradients = torch.autograd.grad(
            penalty, [leaves[n] for n in endpoint.names], create_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        raise InputError(f"the module has no gradient: {str(error).splitlines()[0]}.") from error
    if all(g is None for g in gradients):
        raise InputError(
            f"the module does not use {shorten(endpoint.names)}, whose equations are to be "
            "explained: use them, or choose other rows."
        )
    pairs = zip(endpoint.names, gradients, strict=True)
    return torch.cat(
        [(torch.zeros_like(leaves[n]) if g is None else g).flatten() for n, g in pairs]
    )


def check_finite(gradient: Tensor, endpoint: Endpoint) -> None:
    """Refuse ∇R_φ that is not finite, with the names of the tensors."""
    sizes = [endpoint.params[n].numel() for n in endpoint.names]
    parts = zip(endpoint.names, gradient.detach().split(sizes), strict=True)
    if infinite := [n for n, part in parts if not torch.isfinite(part).all()]:
        raise InputError(
            f"∇R_φ is not finite in {shorten(infinite)}: a square root or a norm has no derivative "
            "at zero, for example. Add a small constant inside, or take those parameters out."
        )


def changed_values(value: Tensor, generator: torch.Generator) -> Tensor:
    """Values of the same size elsewhere."""
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    size = value.square().mean().sqrt()
    return value + 0.5 * (size if size > 0 else 0.1) * noise


def assign(learned: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters these values, and no gradient."""
    with torch.no_grad():
        for parameter, value in zip(learned, values, strict=True):
            parameter.copy_(value)
            parameter.grad = None


def flatten(vector: Params, names: Sequence[str]) -> Tensor:
    """The named tensors as one vector."""
    return torch.cat([vector[n].flatten() for n in names])
