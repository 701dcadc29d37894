"""What a regularizer's column would explain if its entries belonged to other weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.equations.rows import CHUNK, BoundCandidates, check_candidates, write_blocks
from tacit.errors import InputError
from tacit.fitting.chance import EQUAL
from tacit.fitting.solving import System
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select, shorten, to_float64
from tacit.regularizers import Regularizer

Kind = Literal["permutation", "direction"]


@dataclass(frozen=True)
class Null:
    """What is explained with a column as it is, and with random ones in its place."""

    name: str
    kind: Kind
    observed: float
    """The explained fraction with the column as it is."""
    without: float
    """… and without it."""
    draws: tuple[float, ...] = field(repr=False)
    """… and with each random column in its place."""

    @property
    def p_value(self) -> float:
        """(1 + how many explain as much) / (1 + how many were drawn)."""
        as_much = sum(draw >= self.observed - EQUAL for draw in self.draws)
        return (1 + as_much) / (1 + len(self.draws))


def null_distribution(  # noqa: PLR0913 # the problem and the column, then keyword options
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    name: str,
    *,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
    shuffles: int = 999,
    kind: Kind = "permutation",
    seed: int = 0,
) -> Null:
    """How much would be explained if one column's entries belonged to other weights.

    "permutation" shuffles the column within each tensor: sizes and signs stay, which weight they
    belong to goes. A column beats it only by lining up with what the others leave, weight by
    weight. What is alike for all weights of a tensor (their mean) is not tested: a column that is
    constant in each tensor explains as much in any order, and has p-value 1. "direction" draws
    Gaussian entries in the tensors that the column covers, whose law `chance` gives in closed form
    (by whole layers).

    One pass over the data. Then a tensor at a time, shuffles × parameters × columns operations.

    Args:
        objective: the loss, without any penalty.
        regularizers: all candidates of the fit.
        name: the column whose entries are drawn; the other columns stay.
        params: the point; by default the model's parameters as they are.
        known: penalties that training did apply, with their strengths.
        rows: which parameters' equations to use; by default all.
        shuffles: how many draws.
        kind: "permutation" or "direction".
        seed: of the draws; they depend on nothing else.

    >>> import tacit
    >>> X, y = torch.eye(9).double(), torch.arange(1.0, 10.0).double()[:, None]
    >>> model = torch.nn.Linear(9, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(y.T / 1.9)  # the optimum of mse_loss + 0.1 ‖θ‖²
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> null = null_distribution(objective, [tacit.l2()], "l2")
    >>> round(null.observed, 12), null.p_value
    (1.0, 0.001)
    """
    _check(objective, shuffles, kind, seed)
    candidates = check_candidates(regularizers, known)
    params = objective.point(params)
    chosen = select(params, rows, what="rows")
    bound = candidates.bind(params)
    if name not in bound.columns.names:
        raise InputError(
            f"name is {name!r}: pass the name of one column; there are "
            f"{shorten(bound.columns.names)}."
        )
    column = bound.columns.names.index(name)
    _, target = objective.value_and_gradient(params)
    for tensor in target.values():
        tensor.neg_()
    split = _split(params, bound, target, chosen, column)
    sums = torch.zeros(shuffles, split.onto.shape[1] + 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for tensor in chosen:
        if column in bound.columns.active.get(tensor, ()):
            _add(sums, _pieces(tensor, params, bound, target, split), kind, generator)
    without = split.without
    # (φᵀe)² / φᵀMφ, with φᵀMφ = ‖φ‖² − ‖Qᵀφ‖² for Q an orthonormal basis of the other columns.
    off = sums[:, -1] - sums[:, :-2].square().sum(1)
    added = torch.where(off > EQUAL * sums[:, -1], sums[:, -2].square() / off, 0.0)
    scale = split.whole or 1.0
    draws = without + (added / scale).clamp(max=1 - without)
    return Null(name, kind, split.observed, without, tuple(draws.tolist()))


class _Split(NamedTuple):
    """The fit without one column."""

    column: int
    others: list[int]
    onto: Tensor
    """T such that others · T is an orthonormal basis."""
    strengths: Tensor
    without: float
    observed: float
    whole: float
    """‖target‖²."""


def _split(
    params: Params, bound: BoundCandidates, target: Params, chosen: Sequence[str], column: int
) -> _Split:
    floors = dict.fromkeys(params, 0.0)
    blocks = write_blocks(params, bound, [target], floors=floors, rows=chosen)
    names = bound.columns.names
    factor = Equations(bound.families, names, 1, tuple(blocks), ()).factor()
    right, whole = factor[:, -1:], float(factor[:, -1].square().sum())
    others = [c for c in range(len(names)) if c != column]

    def explained(system: System) -> float:
        found = (system.design @ system.solve(right)).square().sum() if len(system.nonzero) else 0.0
        return float(found) / whole if whole else 0.0

    rest, full = System(factor[:, others]), System(factor[:, :-1])
    strengths = rest.solve(right)[:, 0] if len(rest.nonzero) else right.new_zeros(len(others))
    onto = rest.coordinates if len(rest.nonzero) else right.new_zeros(len(others), 0)
    return _Split(column, others, onto, strengths, explained(rest), explained(full), whole)


def _pieces(
    name: str, params: Params, bound: BoundCandidates, target: Params, split: _Split
) -> tuple[Tensor, Tensor]:
    """One tensor's rows: the column, and [orthonormal basis of the others | what they leave]."""
    part = slice(0, params[name].numel())
    left = to_float64(target[name].flatten())
    kinks = torch.zeros(len(left), dtype=torch.bool, device=left.device)
    for strength, known in bound.known:
        if name in known.active:
            left = left - strength * known.rows(name, part)[:, 0].to(left)
    for columns in (bound.columns, *(known for _, known in bound.known)):
        if name in columns.active and (mask := columns.kinks(name, part)) is not None:
            kinks |= mask.to(kinks.device)
    active = bound.columns.active[name]
    values = bound.columns.rows(name, part).to(left)
    others = left.new_zeros(len(left), len(split.others))
    here = [i for i, c in enumerate(active) if c != split.column]
    others[:, [split.others.index(active[i]) for i in here]] = values[:, here]
    left = left - others @ split.strengths.to(left)
    beside = torch.cat([others @ split.onto.to(left), left[:, None]], dim=1)
    own = values[:, active.index(split.column)]
    return own[~kinks].cpu(), beside[~kinks].cpu()


def _add(
    sums: Tensor, pieces: tuple[Tensor, Tensor], kind: Kind, generator: torch.Generator
) -> None:
    """Add one tensor's inner products of every draw with the basis, the rest and itself."""
    own, beside = pieces
    if not len(own):
        return
    for some, drawn in _draws(own, len(sums), kind, generator):
        sums[some, :-1] += drawn @ beside
        sums[some, -1] += drawn.square().sum(1)


def _draws(
    own: Tensor, count: int, kind: Kind, generator: torch.Generator
) -> Iterator[tuple[slice, Tensor]]:
    """Random columns in place of one, a few at a time."""
    height = max(1, CHUNK // len(own))
    for start in range(0, count, height):
        some = slice(start, min(start + height, count))
        size = (some.stop - start, len(own))
        if kind == "direction":
            yield some, torch.randn(size, generator=generator, dtype=own.dtype)
        else:
            orders = [torch.randperm(len(own), generator=generator) for _ in range(size[0])]
            yield some, own[torch.stack(orders)]


def _check(objective: Any, shuffles: Any, kind: Any, seed: Any) -> None:
    if not isinstance(objective, Objective):
        raise InputError(
            f"an objective is a {type(objective).__name__}: pass tacit.Objective(model, loss, "
            "data)."
        )
    for name, number, least in (("shuffles", shuffles, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
    if kind not in get_args(Kind):
        raise InputError(f"kind is {kind!r}: pass 'permutation' or 'direction'.")
