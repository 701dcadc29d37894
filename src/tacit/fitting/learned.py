"""A regularizer that is any module of the parameters, fitted to several endpoints."""

import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.equations.points import TargetPoint
from tacit.equations.target import Target
from tacit.errors import InputError, Problem, ProblemKind, check_type, check_whole
from tacit.fitting.evidence import WELL_EXPLAINED
from tacit.fitting.solving import between_groups
from tacit.fitting.summary import WIDTH, jsonable
from tacit.objective import derivatives
from tacit.objective.params import Params, Scope, select, shorten, to_float64
from tacit.regularizers.custom import regularizer
from tacit.regularizers.family import Regularizer

EVERY = 4
"""By default the last of every four endpoints is held out."""
MEMORISED, TOLERATED = 3.0, 0.01
"""A module memorised if it leaves more of held-out endpoints unexplained than TOLERATED plus
MEMORISED times what it leaves of the others."""
RESTARTS, ROUNDS, ITERATIONS, HISTORY = 2, 8, 100, 30
"""L-BFGS runs at most so often, each for so many rounds of so many iterations, and remembers so
many of them."""
PROGRESS = 0.03
"""Part by which a round has to lower the loss for another round."""
DIRECTIONS, STEPS = 3, (1e-4, 1e-5)
"""Directions and relative steps of the finite differences that a module's derivative is compared
with."""
GOOD, EXACT = 1e-3, 1e-6
"""Unexplained parts below which there is no further start, and no further round."""


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


@dataclass(frozen=True, eq=False)
class RegularizerFit:
    """A fitted module, how much it explains, and every reason not to believe it."""

    module: nn.Module = field(repr=False)
    """The fitted copy as a module of the parameters' dictionary, in float64. The penalty is
    module(params) itself, in the units of the loss."""
    explained: float
    """Fraction of ‖target‖² that ∇R_φ explains on the endpoints it was fitted to."""
    held_out: Mapping[int, float]
    """The same fraction of every endpoint that was held out, by its place among all endpoints."""
    held_out_explained: float
    """The same over all endpoints that were held out; NaN if there are none."""
    matching_loss: float
    """‖∇L + ∇R_φ‖² / rows over the endpoints it was fitted to: Eq. 3 of the paper."""
    coefficients: int
    """How many numbers the module has to learn."""
    rows: int
    """The number of equations that they were fitted to."""
    problems: tuple[Problem, ...]

    def regularizer(self, name: str = "learned") -> Regularizer:
        """The fitted R_φ as a regularizer, of strength 1 where it was fitted.

        It can stand beside others in equations, and be validated by retraining.
        """

        def value(params: Params) -> Tensor:
            return self.module({n: to_float64(p) for n, p in params.items()})

        return regularizer(name, value)

    def summary(self) -> str:
        """What is explained, and the problems, ready to print."""
        held = "  ".join(f"{place}: {part:.4f}" for place, part in self.held_out.items())
        lines = [
            f"tacit: a module of {self.coefficients:,} coefficients, fitted to {self.rows:,} "
            "equations",
            f"explained      {self.explained:.4f}",
            f"on held out    {self.held_out_explained:.4f}" if self.held_out else "none held out",
            *textwrap.wrap(f"by endpoint    {held}", WIDTH, subsequent_indent=" " * 15),
            f"matching loss  {self.matching_loss:.4g}",
        ]
        for number, problem in enumerate(self.problems, 1):
            lines += textwrap.wrap(f"[{number}] {problem}", WIDTH, subsequent_indent="    ")
        return "\n".join(lines if self.problems else [*lines, "No problems found."])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the module as plain values, ready for JSON."""
        plain = {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "module"}
        plain["problems"] = [asdict(problem) for problem in self.problems]
        plain["held_out"] = {str(place): part for place, part in self.held_out.items()}
        return jsonable(plain)

    def __str__(self) -> str:
        return self.summary()


def fit_regularizer(
    targets: Target | Sequence[Target],
    module: nn.Module,
    *,
    held_out: Sequence[int] | None = None,
    rows: Scope = None,
    starts: int = 2,
    seed: int = 0,
) -> RegularizerFit:
    """R_φ, any module of the parameters, by matching gradients: min_φ Σ ‖∇L + ∇R_φ‖².

    The sum is over endpoints, which share φ. The module is called with a dictionary of named
    parameters and returns a scalar, such as Σ_j s_φ(θ_j) of a small network s_φ. A copy of it is
    fitted in float64 by L-BFGS, one endpoint at a time in memory; yours is not changed. Its scale
    need not be that of the loss: the copy is multiplied by a constant, so that ∇R_φ starts as long
    as the target.

    Traps: φ is not unique, and neither is R_φ where no weight is. What it explains of endpoints
    that were held out is the evidence, not what it explains of those it was fitted to. A network
    finds a kink of width 0.01 only if its inputs are scaled so that it can: θ/0.01, or arcsinh.

    Args:
        targets: of `endpoint_target` or `difference_target`, one per trained network, or one with
            several points.
        module: R_φ, with at least one parameter that requires a gradient.
        held_out: places of the endpoints that are held out, from 0; by default the last of every
            four, or of two or three. Pass () to hold none out.
        rows: which parameters' equations to use; by default all.
        starts: most starts, until one explains 99.9 %; all but the first from changed values of φ.
        seed: of those changes.
    """
    check_type("module", module, nn.Module, "a torch.nn.Module that is called with the parameters")
    check_whole("starts", starts)
    check_whole("seed", seed, least=0)
    endpoints = _endpoints(targets, rows)
    places = _held_out_places(held_out, len(endpoints))
    fitted = [e for place, e in enumerate(endpoints) if place not in places]
    # The module may be called where gradients are off, and may have attention in it.
    with torch.inference_mode(mode=False), torch.enable_grad(), derivatives.math_attention():
        scaled, learned = _prepare(module, fitted)
        converged = _minimise(scaled, learned, fitted, starts, seed)
        squares = [_squares(scaled, endpoint) for endpoint in endpoints]
    inside = [s for place, s in enumerate(squares) if place not in places]
    held = {place: _explained([squares[place]]) for place in places}
    equations = sum(endpoint.rows for endpoint in fitted)
    result = RegularizerFit(
        module=scaled,
        explained=_explained(inside),
        held_out=held,
        held_out_explained=_explained([squares[p] for p in places]) if places else math.nan,
        matching_loss=sum(max(0.0, s.residual) for s in inside) / equations,
        coefficients=sum(p.numel() for p in learned),
        rows=equations,
        problems=(),
    )
    object.__setattr__(result, "problems", tuple(_problems(result, converged)))
    return result


class _Endpoint(NamedTuple):
    """Parameters, and what ∇R_φ has to be there, by group of draws."""

    params: Params
    vectors: list[Params]
    mean: Tensor
    """The mean over the groups, as one vector."""
    names: tuple[str, ...]
    """The parameters whose equations are used."""

    @property
    def rows(self) -> int:
        return sum(self.params[n].numel() for n in self.names)


class _Squares(NamedTuple):
    """‖∇R_φ − target‖² and ‖target‖² of an endpoint, without the noise of draws on average."""

    residual: float
    target: float


def _endpoints(targets: Any, rows: Scope) -> list[_Endpoint]:
    """All points of all targets; wrong ones are refused."""
    if isinstance(targets, Target):
        targets = [targets]
    needed = "a target, or a list of targets as endpoint_target returns"
    check_type("targets", targets, Sequence, needed)
    endpoints = []
    for target in targets:
        check_type("one of the targets", target, Target, "what endpoint_target returns")
        if target.setting.mode not in ("endpoint", "difference"):
            raise InputError(
                f"one of the targets is of a {target.setting.mode}: its equations average or "
                "scale columns along a path. Pass targets of endpoint_target or difference_target."
            )
        endpoints += [_endpoint(point, rows) for point in target.points]
    if not endpoints:
        raise InputError(f"targets has no endpoints: pass {needed}.")
    return endpoints


def _endpoint(point: TargetPoint, rows: Scope) -> _Endpoint:
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
    mean = torch.stack([_flatten(v, names) for v in vectors]).mean(0)
    return _Endpoint(params, vectors, mean, names)


def _held_out_places(held_out: Any, count: int) -> list[int]:
    """The places of endpoints to hold out."""
    if held_out is None:
        return list(range(EVERY - 1, count, EVERY)) or ([count - 1] if count > 1 else [])
    check_type("held_out", held_out, Sequence, "a list of places, as in [0, 4], or ()")
    for place in held_out:
        check_whole("a place in held_out", place, least=0)
    places = sorted({*held_out})
    if len(places) < len(held_out) or (places and places[-1] >= count) or len(places) == count:
        raise InputError(
            f"held_out is {list(held_out)} for {count} endpoints: pass different places from 0 to "
            f"{count - 1}, not all of them."
        )
    return places


def _prepare(
    module: nn.Module, endpoints: list[_Endpoint]
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
    first = _gradient(scaled, endpoints[0])
    _check_dependence(first, learned)
    again = _gradient(scaled, endpoints[0])
    _check_finite(first, endpoints[0])
    if not first.equal(again):
        raise InputError(
            "the module's gradient is random: it differs between two calls. Call module.eval(), or "
            "take random parts such as dropout out."
        )
    gradients = [_gradient(scaled, endpoint).detach() for endpoint in endpoints]
    for gradient, endpoint in zip(gradients, endpoints, strict=True):
        _check_finite(gradient, endpoint)
    wanted = math.hypot(*(float(endpoint.mean.norm()) for endpoint in endpoints))
    scaled.scale.fill_(wanted / (math.hypot(*(float(g.norm()) for g in gradients)) or 1.0))
    _check_derivative(scaled, learned, endpoints[0])
    return scaled, learned


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


def _check_derivative(module: ScaledModule, learned: Sequence[Tensor], endpoint: _Endpoint) -> None:
    """Refuse a module whose ∇R_φ has another derivative by φ than torch computes.

    Differences of several sizes along a few directions decide. Where they do not agree with each
    other (a kink lies between), nothing is refused.
    """
    generator = torch.Generator().manual_seed(0)
    origin = [p.detach().clone() for p in learned]
    whole = float(endpoint.mean.square().sum())

    def loss() -> Tensor:
        return (_gradient(module, endpoint) - endpoint.mean).square().sum() / whole

    found = _differentiate(loss(), learned)
    derivative = [
        torch.zeros_like(p) if d is None else d for d, p in zip(found, origin, strict=True)
    ]
    for _ in range(DIRECTIONS):
        direction = [_changed(v, generator) - v for v in origin]
        expected = sum(float((d * v).sum()) for d, v in zip(derivative, direction, strict=True))
        differences = []
        for step in STEPS:
            ends = []
            for sign in (1, -1):
                moved = zip(origin, direction, strict=True)
                _assign(learned, [p + sign * step * v for p, v in moved])
                ends.append(float(loss().detach()))
            differences.append((ends[0] - ends[1]) / (2 * step))
        _assign(learned, origin)
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


def _gradient(module: nn.Module, endpoint: _Endpoint) -> Tensor:
    """∇R_φ at an endpoint as a function of φ, in the rows that are used, as one vector."""
    leaves = {n: p.detach().requires_grad_() for n, p in endpoint.params.items()}
    penalty = module(leaves)
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


def _check_finite(gradient: Tensor, endpoint: _Endpoint) -> None:
    sizes = [endpoint.params[n].numel() for n in endpoint.names]
    parts = zip(endpoint.names, gradient.detach().split(sizes), strict=True)
    if infinite := [n for n, part in parts if not torch.isfinite(part).all()]:
        raise InputError(
            f"∇R_φ is not finite in {shorten(infinite)}: a square root or a norm has no derivative "
            "at zero, for example. Add a small constant inside, or take those parameters out."
        )


def _minimise(
    module: ScaledModule,
    learned: Sequence[Tensor],
    endpoints: list[_Endpoint],
    starts: int,
    seed: int,
) -> bool:
    """Fit φ from several starts, keep the best, and say whether it stopped improving."""
    whole = sum(float(endpoint.mean.square().sum()) for endpoint in endpoints)
    origin = [p.detach().clone() for p in learned]
    best, smallest, converged = origin, math.inf, False
    generator = torch.Generator().manual_seed(seed)
    for start in range(starts):
        _assign(learned, origin if start == 0 else [_changed(v, generator) for v in origin])
        try:
            value, settled = _lbfgs(learned, lambda: _unexplained(module, endpoints, whole))
        except InputError:
            if start == 0:
                raise
            continue  # changed values for which the module is not finite
        if value < smallest:
            best, smallest, converged = [p.detach().clone() for p in learned], value, settled
        if smallest < GOOD:
            break
    _assign(learned, best)
    return converged


def _unexplained(module: nn.Module, endpoints: list[_Endpoint], whole: float) -> Tensor:
    """The unexplained fraction of the targets, whose gradient is added to that of φ."""
    total = torch.zeros((), dtype=torch.float64)
    for endpoint in endpoints:
        square = (_gradient(module, endpoint) - endpoint.mean).square().sum() / whole
        square.backward()
        total += square.detach().cpu()
    return total


def _assign(learned: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(learned, values, strict=True):
            parameter.copy_(value)
            parameter.grad = None


def _changed(value: Tensor, generator: torch.Generator) -> Tensor:
    """Values of the same size elsewhere."""
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    size = value.square().mean().sqrt()
    return value + 0.5 * (size if size > 0 else 0.1) * noise


def _lbfgs(learned: Sequence[Tensor], loss: Callable[[], Tensor]) -> tuple[float, bool]:
    """The loss after L-BFGS, restarted once where it stalls, and whether it stopped improving."""
    value, settled = math.inf, False
    for _ in range(RESTARTS):
        before = value
        value, settled = _lbfgs_from(learned, loss, before)
        if value < EXACT or not value < (1 - PROGRESS) * before:
            break
    if not math.isfinite(value):
        raise InputError("∇R_φ is not finite near the module's initial parameters: change them.")
    return value, settled


def _lbfgs_from(
    learned: Sequence[Tensor], loss: Callable[[], Tensor], value: float
) -> tuple[float, bool]:
    """One run of L-BFGS that ends at its lowest loss, and whether it stopped improving."""
    optimizer = torch.optim.LBFGS(
        list(learned),
        max_iter=ITERATIONS,
        history_size=HISTORY,
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        return loss()

    lowest, settled = [p.detach().clone() for p in learned], False
    for _ in range(ROUNDS):
        optimizer.step(closure)
        after = float(closure())
        settled = not after < (1 - PROGRESS) * value or after < EXACT
        if after < value:  # a line search can end higher, or where nothing is finite
            value, lowest = after, [p.detach().clone() for p in learned]
        if settled:
            break
    _assign(learned, lowest)
    return value, settled


def _squares(module: nn.Module, endpoint: _Endpoint) -> _Squares:
    """Squared norms of residual and target, from products of different groups of draws."""
    gradient = _gradient(module, endpoint).detach()
    _check_finite(gradient, endpoint)
    targets = torch.stack([_flatten(v, endpoint.names) for v in endpoint.vectors], dim=1)
    pairs = max(1, targets.shape[1] * (targets.shape[1] - 1))
    residuals = targets - gradient[:, None]
    return _Squares(
        between_groups(residuals, residuals) / pairs, between_groups(targets, targets) / pairs
    )


def _explained(squares: Sequence[_Squares]) -> float:
    whole = sum(s.target for s in squares)
    return 1 - sum(s.residual for s in squares) / whole if whole > 0 else 0.0


def _flatten(vector: Params, names: Sequence[str]) -> Tensor:
    return torch.cat([vector[n].flatten() for n in names])


def _problems(result: RegularizerFit, converged: bool) -> Iterator[Problem]:
    """Every reason not to believe the module, the gravest first."""
    if not result.held_out:
        yield Problem(
            ProblemKind.UNIDENTIFIED,
            "No endpoint was held out: a module that memorised the weights would look the same.",
            "Pass the targets of two or more networks, and hold one out.",
        )
    left, left_inside = 1 - result.held_out_explained, 1 - result.explained
    if result.held_out and left > TOLERATED + MEMORISED * left_inside:
        yield Problem(
            "memorised",
            f"The module explains {result.explained:.1%} of the endpoints it was fitted to, and "
            f"{result.held_out_explained:.1%} of those held out: it memorised.",
            "Fit more endpoints, or a module with fewer coefficients that treats weights alike.",
        )
    elif (result.held_out_explained if result.held_out else result.explained) < WELL_EXPLAINED:
        part = result.held_out_explained if result.held_out else result.explained
        yield Problem(
            ProblemKind.UNEXPLAINED,
            f"The module explains {part:.1%} of the target.",
            "Scale its inputs to the size of the weights, give it more coefficients or starts, or "
            "train the networks further.",
        )
    if result.coefficients >= result.rows:
        yield Problem(
            ProblemKind.UNIDENTIFIED,
            f"The module has {result.coefficients:,} coefficients for {result.rows:,} equations.",
            "Fit more endpoints, or a smaller module.",
        )
    if not converged and result.explained < WELL_EXPLAINED:
        yield Problem(
            ProblemKind.UNSETTLED,
            "The fit was still improving when it reached its limit of iterations.",
            "Pass the fitted module (result.module) again to continue.",
        )
