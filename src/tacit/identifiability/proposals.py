"""Candidates for a screen: every family of the catalogue that applies, in sensible scopes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.equations.target import Target
from tacit.errors import InputError, check_choice
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, entries, largest_entry, matrices, norm
from tacit.objective.ranks import current_ranks
from tacit.regularizers.activations import activation_norm
from tacit.regularizers.data_dependent import mean_penalty
from tacit.regularizers.dropout.moments import dropout_moments
from tacit.regularizers.dropout.penalty import explicit_dropout
from tacit.regularizers.elementwise import distance_to, hypentropy, l1, l2, power, smooth_l1
from tacit.regularizers.family import ZERO_WIDTH, Columns, Cost, Regularizer
from tacit.regularizers.hessian import hessian_trace
from tacit.regularizers.input_derivatives import input_jacobian, input_laplacian
from tacit.regularizers.loss_gradients import gradient_norm, gradient_variance
from tacit.regularizers.matrices import (
    group_l2,
    is_matrix,
    nuclear_norm,
    orthogonality,
    schatten,
    spectral_norm,
    stable_rank,
)
from tacit.regularizers.units import balance
from tacit.regularizers.weight_decay import optimizer_penalties, ridge_in_metric
from tacit.techniques.labels import smoothing_penalty

SMALLEST_BETA = 0.01
"""Widths of `smooth_l1` are powers of ten, from this part of a typical weight to the largest."""
MOST_WORK = 2**31
"""Σ rows·columns·min(rows, columns) of matrices up to which their singular values are computed:
of larger ones they take longer than passes over the data."""
NOT_SCREENED = {
    "spline": "fits any penalty of single weights",
    "spectral_spline": "fits any penalty of singular values",
    "diagonal": "fits any target",
    "symmetric": "fits any target",
    "regularizer": "is your own",
    "mean_of": "needs an objective of its own; for cross-entropy, label smoothing is screened",
    "layerwise": "splits a family; look at screen.fit.layers",
    "gradient_l1": "needs eps, and is much like gradient_norm",
}
"""Families of the catalogue that are no candidates, and why."""


@dataclass(frozen=True)
class Candidate:
    """One regularizer of a screen: its family, and the scope of its sum."""

    regularizer: Regularizer
    family: str
    scope: str = ""
    """"matrices", "biases" or an optimizer's weight decay; "" for all parameters."""


class Proposals(NamedTuple):
    """The candidates of a screen, and what was left out."""

    candidates: tuple[Candidate, ...]
    left_out: dict[str, str]
    """By family, why it is no candidate."""


def propose(
    target: Target,
    *,
    start: Mapping[str, Tensor] | None,
    optimizer: Optimizer | None,
    cost: Cost,
) -> Proposals:
    """The candidates for a target, each tried at its first point.

    Args:
        target: what is to be explained.
        start: parameters, the distance to which is a candidate.
        optimizer: what its weight decay applied is a candidate.
        cost: "weights" for families that need no data, "pass" for those that take one more pass
            over the data too, "second-order" for all.
    """
    check_choice("cost", cost, get_args(Cost))
    point, setting = target.points[0], target.setting
    makers = _of_weights(point.params)
    if setting.computed_from is not None and cost != "weights":
        makers |= _of_data(setting.plain or setting.computed_from, cost)
    asked_for: Makers = {}
    if start is not None:
        asked_for |= _scoped("distance_to", lambda **scope: distance_to(start, **scope))
    if point.metric:
        asked_for |= _scoped(
            "metric_ridge",
            lambda scope=None, name="": ridge_in_metric(point.metric, scope, name=name),
        )
    if optimizer is not None:
        asked_for |= _of_optimizer(optimizer, setting.objective.model)
    candidates = [
        Candidate(_bound_once(make()), *key) for key, make in asked_for.items()
    ]  # what the caller passed is not left out where it is wrong
    left_out = dict(NOT_SCREENED)
    for (family, scope), make in makers.items():
        try:
            candidate = Candidate(_bound_once(make()), family, scope)
            _check_rows_suffice(candidate.regularizer)
            candidate.regularizer.bind(point.params)
        except InputError as error:
            left_out[_name(family, scope)] = str(error)
        else:
            candidates.append(candidate)
    candidates = [c for c in candidates if c.regularizer.bind(point.params).active]
    candidates, conflicts = _without_conflicts(candidates, point.params)
    return Proposals(tuple(candidates), left_out | conflicts)


Makers = dict[tuple[str, str], Callable[[], Regularizer]]
"""By family and scope, what makes a candidate."""


def _scoped(family: str, make: Callable[..., Regularizer], *scopes: str) -> Makers:
    """A family over everything, over matrices, and over the other scopes that are named."""
    by_name: dict[str, Scope] = {"": None, "matrices": matrices, "biases": _biases}
    return {
        (family, scope): lambda scope=scope: make(scope=by_name[scope], name=_name(family, scope))
        for scope in ("", "matrices", *scopes)
    }


def _name(family: str, scope: str) -> str:
    return f"{family}[{scope}]" if scope else family


def _biases(name: str, tensor: Tensor) -> bool:
    """Vectors: biases, and scales and shifts of norm layers."""
    return not matrices(name, tensor)


def _of_weights(params: Params) -> Makers:
    """Families that need only the weights."""
    largest, typical = largest_entry(params) or 1.0, norm(params) / entries(params) ** 0.5 or 1.0
    makers = _scoped("l2", l2, "biases") | _scoped("l1", l1)
    for beta in _powers_of_ten(SMALLEST_BETA * typical, largest):
        smooth = partial(smooth_l1, beta)
        makers |= _scoped(f"smooth_l1({beta:g})", smooth)
    others: dict[str, Callable[[], Regularizer]] = {
        "power(0.5)": lambda: power(0.5, name="power(0.5)"),
        "power(1.5)": lambda: power(1.5, name="power(1.5)"),
        "power(4)": lambda: power(4.0, name="power(4)"),
        "hypentropy": lambda: hypentropy(typical, name=f"hypentropy({typical:.2g})"),
        "group_l2": lambda: group_l2(scope=matrices),
        "orthogonality": orthogonality,
        "balance": balance,
    }
    of_singular_values: dict[str, Callable[[], Regularizer]] = {
        "nuclear_norm": nuclear_norm,
        "schatten(0.5)": lambda: schatten(0.5, name="schatten(0.5)"),
        "spectral_norm": spectral_norm,
        "stable_rank": stable_rank,
    }
    if _work(params) <= MOST_WORK:
        others |= of_singular_values
    return makers | {(family, ""): make for family, make in others.items()}


def _of_optimizer(optimizer: Optimizer, model: nn.Module) -> Makers:
    """What the weight decay of an optimizer applied, one candidate per strength."""
    return {
        ("metric_ridge" if penalty.in_metric else "l2", penalty.name): lambda r=penalty: r
        for penalty in optimizer_penalties(optimizer, model)
    }


def _of_data(objective: Objective, cost: Cost) -> Makers:
    """Families that depend on the data, within the cost."""
    makers: Makers = {
        ("label_smoothing", ""): lambda: mean_penalty(
            smoothing_penalty(objective),
            objective,
            scope=None,
            name="label_smoothing",
            cost="pass",
            compare=False,
        ),
        ("activation_norm", ""): lambda: activation_norm(objective),
    }
    if cost == "second-order":
        families = (
            gradient_norm, gradient_variance, hessian_trace, input_jacobian, input_laplacian,
            explicit_dropout, dropout_moments,
        )  # fmt: skip
        makers |= {(make.__name__, ""): lambda make=make: make(objective) for make in families}
    return makers


def _check_rows_suffice(regularizer: Regularizer) -> None:
    """Refuse what needs more than rows of tensors, where processes share the rows."""
    if current_ranks().shards is not None and regularizer.reads != "rows":
        raise InputError("needs whole matrices, of which each process has some rows")


def _powers_of_ten(low: float, high: float) -> list[float]:
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [float(f"1e{exponent}") for exponent in exponents]


def _work(params: Params) -> int:
    shapes = [p.flatten(1).shape for p in params.values() if is_matrix(p)]
    return sum(rows * columns * min(rows, columns) for rows, columns in shapes)


def _bound_once(regularizer: Regularizer) -> Regularizer:
    """The same, with the columns of the last point remembered: they may have taken a pass."""
    last: list[tuple[Params, Columns]] = []

    def bind(params: Params) -> Columns:
        if not last or last[0][0] is not params:
            last[:] = [(params, regularizer.bind(params))]
        return last[0][1]

    return replace(regularizer, bind=bind)


def _without_conflicts(
    candidates: Sequence[Candidate], params: Params
) -> tuple[list[Candidate], dict[str, str]]:
    """Candidates whose equations can be written together.

    Where weights of a matrix are zero, penalties with a kink there have no equations of these
    weights. Where a matrix has a low rank, penalties of singular values have equations along a part
    of the directions only. Where both, no equation of the matrix is left. Then one side is left
    out: the penalties with kinks, if the rank of any matrix is lower than zeros alone make it.
    """
    columns = {c.family: c.regularizer.bind(params) for c in candidates}
    singular, kinked, reasons, low = set(), set(), dict[str, str](), False
    for name, tensor in params.items():
        spaces = {f: c.subspace(name) for f, c in columns.items() if name in c.active}
        spaces = {f: s for f, s in spaces.items() if s is not None}
        kinks = {f: _kinks(c, name, tensor) for f, c in columns.items() if name in c.active}
        kinks = {f: mask for f, mask in kinks.items() if mask is not None and mask.any()}
        reasons = {f: s.reason for f, s in spaces.items()} | reasons
        if any(space.dimension for space in spaces.values()):
            zeros = torch.stack(
                [torch.zeros_like(tensor.flatten(), dtype=torch.bool), *kinks.values()]
            )
            low |= _has_lower_rank(tensor, zeros.any(0))
            if kinks:
                singular |= spaces.keys()
                kinked |= kinks.keys()
    why = "a matrix has zeros and a low rank, which is "
    left_out = dict.fromkeys(kinked, f"{why}not only due to them") if low else {}
    left_out |= {} if low else dict.fromkeys(singular, f"{why}due to them")
    first = next(iter(reasons.values()), "")
    left_out |= {
        f: f"has equations of {r}, others of {first}" for f, r in reasons.items() if r != first
    }
    return [c for c in candidates if c.family not in left_out], left_out


def _kinks(columns: Columns, name: str, tensor: Tensor) -> Tensor | None:
    return columns.kinks(name, slice(0, tensor.numel()))


def _has_lower_rank(tensor: Tensor, zeros: Tensor) -> bool:
    """Whether the rank of a matrix is lower than that of random entries with the same zeros."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import structural_rank

    kept = tensor.detach().double().cpu().flatten().masked_fill(zeros.cpu(), 0.0)
    matrix = kept.view(tensor.shape).flatten(1)
    rank = int(torch.linalg.matrix_rank(matrix, rtol=ZERO_WIDTH))
    return rank < int(structural_rank(csr_matrix(matrix.numpy())))
