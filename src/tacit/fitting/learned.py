"""A regularizer that is any module of the parameters, fitted to several endpoints."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.display.text import WIDTH
from tacit.equations.target import Target
from tacit.errors import InputError, Problem, ProblemKind, check_type, check_whole
from tacit.fitting.evidence import WELL_EXPLAINED
from tacit.fitting.module_gradients import (
    Endpoint,
    ScaledModule,
    assign,
    changed_values,
    check_finite,
    endpoints_of,
    flatten,
    gradient_of,
    prepare,
    stack_endpoints,
)
from tacit.fitting.solving import between_groups
from tacit.fitting.summary import jsonable
from tacit.objective import derivatives
from tacit.objective.params import Params, Scope, to_float64
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
PROGRESS = 0.15
"""Part by which a round has to lower the loss for another round."""
GOOD, EXACT = 1e-3, 1e-6
"""Unexplained parts below which there is no further start, and no further round."""


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
        by_endpoint = "  ".join(f"{place}: {part:.4f}" for place, part in self.held_out.items())
        lines = [
            f"tacit: a module of {self.coefficients:,} coefficients, fitted to {self.rows:,} "
            "equations",
            f"explained      {self.explained:.4f}",
            f"on held out    {self.held_out_explained:.4f}" if self.held_out else "none held out",
            *textwrap.wrap(f"by endpoint    {by_endpoint}", WIDTH, subsequent_indent=" " * 15),
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
    fitted in float64 by L-BFGS; yours is not changed. Its scale need not be that of the loss: the
    copy is multiplied by a constant, so that ∇R_φ starts as long as the target. Large endpoints are
    in memory one at a time; small ones of the same shapes are computed together, by vmap.

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
    endpoints = endpoints_of(targets, rows)
    places = _held_out_places(held_out, len(endpoints))
    fitted = [e for place, e in enumerate(endpoints) if place not in places]
    # The module may be called where gradients are off, and may have attention in it.
    with torch.inference_mode(mode=False), torch.enable_grad(), derivatives.twice_differentiable():
        scaled, learned = prepare(module, fitted)
        together = stack_endpoints(scaled, fitted)
        converged = _minimise(scaled, learned, together, starts, seed)
        squares = [_squares(scaled, endpoint) for endpoint in endpoints]
    inside = [s for place, s in enumerate(squares) if place not in places]
    by_place = {place: _explained([squares[place]]) for place in places}
    equations = sum(endpoint.rows for endpoint in fitted)
    result = RegularizerFit(
        module=scaled,
        explained=_explained(inside),
        held_out=by_place,
        held_out_explained=_explained([squares[p] for p in places]) if places else math.nan,
        matching_loss=sum(max(0.0, s.residual) for s in inside) / equations,
        coefficients=sum(p.numel() for p in learned),
        rows=equations,
        problems=(),
    )
    object.__setattr__(result, "problems", tuple(_problems(result, converged)))
    return result


class _Squares(NamedTuple):
    """‖∇R_φ − target‖² and ‖target‖² of an endpoint, without the noise of draws on average."""

    residual: float
    target: float


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


def _minimise(
    module: ScaledModule,
    learned: Sequence[Tensor],
    endpoints: list[Endpoint],
    starts: int,
    seed: int,
) -> bool:
    """Fit φ from several starts, keep the best, and say whether it stopped improving."""
    whole = sum(float(endpoint.mean.square().sum()) for endpoint in endpoints)
    origin = [p.detach().clone() for p in learned]
    best, smallest, converged = origin, math.inf, False
    generator = torch.Generator().manual_seed(seed)
    for start in range(starts):
        assign(learned, origin if start == 0 else [changed_values(v, generator) for v in origin])
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
    assign(learned, best)
    return converged


def _unexplained(module: nn.Module, endpoints: list[Endpoint], whole: float) -> Tensor:
    """The unexplained fraction of the targets, whose gradient is added to that of φ."""
    total = torch.zeros((), dtype=torch.float64)
    for endpoint in endpoints:
        square = (gradient_of(module, endpoint) - endpoint.mean).square().sum() / whole
        square.backward()
        total += square.detach().cpu()
    return total


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
    assign(learned, lowest)
    return value, settled


def _squares(module: nn.Module, endpoint: Endpoint) -> _Squares:
    """Squared norms of residual and target, from products of different groups of draws."""
    gradient = gradient_of(module, endpoint).detach()
    check_finite(gradient, endpoint)
    targets = torch.stack([flatten(v, endpoint.names) for v in endpoint.vectors], dim=1)
    pairs = max(1, targets.shape[1] * (targets.shape[1] - 1))
    residuals = targets - gradient[:, None]
    return _Squares(
        between_groups(residuals, residuals) / pairs, between_groups(targets, targets) / pairs
    )


def _explained(squares: Sequence[_Squares]) -> float:
    whole = sum(s.target for s in squares)
    return 1 - sum(s.residual for s in squares) / whole if whole > 0 else 0.0


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
