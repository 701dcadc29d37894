"""The contract of a regularizer as one check, for the families of tacit and for your own."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.params import (
    Params,
    Scope,
    check_finite,
    describe,
    same_buffers,
    select,
    shorten,
    to_float64,
)
from tacit.regularizers.by_layer import layerwise
from tacit.regularizers.contract_case import (
    Case,
    dense_rows,
    kink_mask,
    value_gradients,
    whole_slice,
)
from tacit.regularizers.family import Cost, FamilyKind, Regularizer

STEPS = (1e-3, 1e-4, 1e-5, 1e-6)
"""Steps of finite differences, as parts of the largest weight. A gradient is right if it agrees at
one of them: large steps cross kinks, and small ones drown in rounding."""
TOLERANCE = 1e-5
"""Relative error at which a column and a finite difference agree."""
SAME = 1e-9
"""Relative error at which two computations of the same column agree."""
SINGLE = 1e-3
"""Relative error at which columns of weights in float32 and in float64 agree."""
NOISE = 30.0
"""Times their noise by which columns and gradients from different random probes may differ."""
COORDINATES = {"weights": 32, "pass": 2, "second-order": 2}
"""Single entries per tensor along which the value is differenced, besides a random direction."""


def check_contract(
    regularizer: Regularizer, params: Mapping[str, Tensor], *, scope: Scope = None
) -> None:
    """Check that a regularizer keeps the contract of `Regularizer`; list every clause it violates.

    The clauses are: unique names, and one value per name; columns in float64, equal to the finite
    differences of the value, at these parameters, and to its gradient by autograd; slices equal to
    the whole; zeros outside the scope; the same numbers at every call and for every layout in
    memory; finite numbers at zero weights; kinks and subspaces of the right shape; and what the
    regularizer says of itself (separable, entrywise, definition, cost, influence).

    Trap: a derivative is tested at these parameters only. Take weights of ordinary size, random
    rather than trained, and call it again at weights where the penalty is special.

    >>> import tacit
    >>> check_contract(tacit.l2(), {"w": torch.tensor([1.0, -2.0])})

    Args:
        regularizer: the regularizer. One that reads an objective needs a model in float64.
        params: the parameters to check at; they are converted to float64.
        scope: the scope that the regularizer was made with.

    Raises:
        InputError: with one line per violated clause.
    """
    check_type("regularizer", regularizer, Regularizer, "a tacit.Regularizer")
    check_type("params", params, Mapping, "a dictionary of named tensors")
    point = same_buffers({n: to_float64(p.detach()).clone() for n, p in params.items()}, params)
    check_finite(point, what="the value")
    _check_precision(regularizer)
    case = Case(regularizer, point, select(point, scope, what="scope"))
    violations = [f"{clause}: {words}" for clause, words in _violations(case)]
    if violations:
        listed = "\n".join(f"- {violation}" for violation in violations)
        raise InputError(f"{regularizer.name!r} does not keep the contract:\n{listed}")


Violations = Iterator[str]


class _Clause(NamedTuple):
    """A function from a case to what is violated, and the clauses that it makes sense after."""

    check: Callable[[Case], Violations]
    after: tuple[str, ...] = ()


def _violations(case: Case) -> Iterator[tuple[str, str]]:
    """Clause and violation; a clause that raises an error is violated by it.

    Clauses that only make sense after one that is violated, or was left out, are left out.
    """
    stopped = set()
    for name, clause in CLAUSES.items():
        if stopped.intersection(clause.after):
            stopped.add(name)
            continue
        for words in _run(clause.check, case):
            stopped.add(name)
            yield name, words


def _run(check: Callable[[Case], Violations], case: Case) -> Violations:
    try:
        yield from check(case)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        yield f"raised {type(error).__name__}: {message}"


def _check_precision(regularizer: Regularizer) -> None:
    objective = regularizer.objective
    if objective is None:
        return
    coarse = [n for n, p in objective.params.items() if p.dtype != torch.float64]
    if coarse:
        raise InputError(
            f"the objective of {regularizer.name!r} has {shorten(coarse)} below float64, where "
            "finite differences cannot tell: make it of a copy of the model in double precision."
        )


BOTH = ("names", "columns", "one value per name")


def _names(case: Case) -> Violations:
    """Columns have unique names, and belong to tensors that there are."""
    names, active = case.columns.names, case.columns.active
    if not names:
        yield "there are no columns."
    if len(set(names)) < len(names):
        yield f"the names {shorten(names)} are not unique."
    if not all(isinstance(n, str) and n.startswith(case.regularizer.name) for n in names):
        yield f"column names ({shorten(map(str, names))}) do not start with the regularizer's name."
    if unknown := [n for n in active if n not in case.params]:
        yield f"columns are active on {shorten(unknown)}, which is no parameter."
    for tensor_name, columns in active.items():
        if not all(0 <= column < len(names) for column in columns):
            yield f"active columns {columns} of {tensor_name!r} are not among {len(names)} names."


def _value(case: Case) -> Violations:
    """There is one value per name."""
    value = case.regularizer.value(case.params)
    count = len(case.columns.names)
    if not isinstance(value, Tensor) or value.shape != (count,):
        given = describe(value) if isinstance(value, Tensor) else type(value).__name__
        yield f"value(params) is {given}: a tensor of shape ({count},), one per name, is needed."


def _numbers(case: Case) -> Violations:
    """Values are finite, in float64, and autograd can differentiate them."""
    with torch.enable_grad():
        value = case.regularizer.value(derivatives.leaves(case.params))
    if not value.isfinite().all():
        yield "value(params) is not finite."
    if value.dtype != torch.float64:
        yield f"value(params) is {value.dtype} for parameters in float64."
    if not value.requires_grad:
        yield "value(params) cannot be differentiated by autograd, which retraining needs."


def _columns(case: Case) -> Violations:
    """Rows have one column for each that is active, and are finite."""
    for tensor_name, active in case.columns.active.items():
        rows = case.columns.rows(tensor_name, whole_slice(case.params[tensor_name]))
        shape = (case.params[tensor_name].numel(), len(active))
        if rows.shape != shape:
            yield f"rows of {tensor_name!r} have shape {tuple(rows.shape)}: {shape} is needed."
        elif not rows.isfinite().all():
            yield f"rows of {tensor_name!r} are not finite."


def _finite_differences(case: Case) -> Violations:
    """Every column is the derivative of its value, along random directions and single entries."""
    value = case.regularizer.value(case.params).detach().cpu()
    for tensor_name in case.in_scope:
        wrong: dict[str, None] = {}
        for direction in _directions(case, tensor_name):
            wrong |= dict.fromkeys(_disagreeing(case, tensor_name, direction, value))
        if wrong:
            yield (
                f"on {tensor_name!r} the gradient of {shorten(wrong)} is not the finite difference "
                "of its value."
            )


def _directions(case: Case, tensor_name: str) -> Iterator[Tensor]:
    """Directions of one tensor, flattened, in which the penalty is differentiable."""
    generator = torch.Generator().manual_seed(0)
    size, device = case.params[tensor_name].numel(), case.params[tensor_name].device
    chosen = torch.randperm(size, generator=generator)[: COORDINATES.get(case.regularizer.cost, 2)]
    drawn = torch.randn(1, size, generator=generator, dtype=torch.float64)
    single = torch.zeros(len(chosen), size, dtype=torch.float64)
    single[torch.arange(len(chosen)), chosen] = 1
    space = case.columns.subspace(tensor_name) if tensor_name in case.columns.active else None
    for direction in torch.cat([drawn, single]).to(device):
        direction = direction * case.smooth[tensor_name].to(device)
        if space is not None:
            direction = space.project(direction[:, None])[:, 0]
        if direction.any():
            yield direction / direction.norm()


def _disagreeing(case: Case, tensor_name: str, direction: Tensor, value: Tensor) -> list[str]:
    """Names of the columns whose derivative along a direction is not a difference of values."""
    tensor, rows = case.params[tensor_name], case.derivatives[tensor_name]
    exact = (rows.T @ direction.to(rows)).cpu()
    size = (rows * (direction != 0).to(rows)[:, None]).norm(dim=0).cpu()
    wrong = torch.ones(len(exact), dtype=torch.bool)
    for step in STEPS:
        h = step * case.step
        ends = []
        for sign in (1, -1):
            moved = tensor + sign * h * direction.to(tensor).reshape(tensor.shape)
            ends.append(case.regularizer.value(case.at({**case.params, tensor_name: moved})))
        quotient = (ends[0] - ends[1]).detach().cpu() / (2 * h)
        rounding = 100 * torch.finfo(torch.float64).eps * value.abs() / h
        wrong &= ~((quotient - exact).abs() <= TOLERANCE * size + rounding)
        if not wrong.any():
            break
    return [case.columns.names[i] for i in wrong.nonzero()[:, 0].tolist()]


def _probes(case: Case) -> Violations:
    """Deviations of groups of probes fit the columns, and these the gradient up to their noise."""
    columns, groups = case.columns, case.columns.groups
    differences, noise = torch.zeros(len(columns.names)), torch.zeros(len(columns.names))
    for tensor_name, rows in case.rows.items() if columns.noisy else ():
        noisy = columns.noisy_on(tensor_name)
        if not noisy:
            continue
        deviations = columns.deviations(tensor_name, whole_slice(case.params[tensor_name]))
        if deviations.shape != (shape := (len(rows), groups, len(noisy))):
            yield f"deviations of {tensor_name!r} have shape {tuple(deviations.shape)}, not {shape}"
            return
        if not _close(deviations.mean(1) + 1, torch.ones_like(deviations[:, 0])):
            yield f"deviations of {tensor_name!r} do not sum to zero over the groups."
        changed = case.derivatives[tensor_name] - rows
        differences += changed.square().sum(0).cpu()
        noise[noisy] += deviations.square().sum((0, 1)).cpu().float() / (groups * (groups - 1))
    if wrong := [
        n for n, d, e in zip(columns.names, differences, noise, strict=True) if d > NOISE * e
    ]:
        yield f"the gradient of {shorten(wrong)} is further from its value's than probes scatter."


def _autograd(case: Case) -> Violations:
    """Autograd's gradient of the value is the column, where there is one."""
    wrong: dict[str, None] = {}
    for number, column in enumerate(case.columns.names[: COORDINATES["weights"]]):
        gradients = {} if number in case.columns.noisy else value_gradients(case, number)
        for tensor_name, gradient in gradients.items():
            if tensor_name in case.in_scope and not _same_gradient(
                case, tensor_name, number, gradient
            ):
                wrong[f"{column} on {tensor_name!r}"] = None
    if wrong:
        yield f"autograd's gradient of the value is not the column: {shorten(wrong)}."


def _same_gradient(case: Case, tensor_name: str, column: int, gradient: Tensor) -> bool:
    rows = case.rows[tensor_name][:, column]
    actual = gradient.detach().flatten().to(rows)
    difference = torch.where(case.smooth[tensor_name].to(rows.device), actual - rows, 0.0)
    active = tensor_name in case.columns.active
    if active and (space := case.columns.subspace(tensor_name)) is not None:
        difference = space.project(difference[:, None])[:, 0]
    most = max(float(r[:, column].abs().max()) for r in case.rows.values() if len(r))
    rounding = 1e-12 * abs(float(case.regularizer.value(case.params)[column])) / case.step
    return bool((difference.abs() <= SAME * most + rounding).all())


def _slices(case: Case) -> Violations:
    """Slices put together are the whole, for rows and for the mask of kinks."""
    for params in (case.params, case.at(_with_zeros(case.params))):
        columns = case.regularizer.bind(params)
        for tensor_name in columns.active:
            whole = whole_slice(params[tensor_name])
            length = max(1, math.ceil(whole.stop / 3))
            starts = range(0, whole.stop, length)
            parts = [slice(start, min(start + length, whole.stop)) for start in starts]
            rows = torch.cat([columns.rows(tensor_name, part) for part in parts])
            if not _close(rows, columns.rows(tensor_name, whole)):
                yield f"rows of slices of {tensor_name!r} are not those of the whole tensor."
            masks = torch.cat([kink_mask(columns, tensor_name, part) for part in parts])
            if not torch.equal(masks, kink_mask(columns, tensor_name, whole)):
                yield f"kinks of slices of {tensor_name!r} are not those of the whole tensor."


def _kinks_and_subspaces(case: Case) -> Violations:
    """Masks are boolean, one per row, and projections of subspaces are projections."""
    for params in (case.params, case.at(_with_zeros(case.params))):
        columns = case.regularizer.bind(params)
        for tensor_name in columns.active:
            size = params[tensor_name].numel()
            mask = columns.kinks(tensor_name, slice(0, size))
            if mask is not None and (mask.dtype != torch.bool or mask.shape != (size,)):
                yield (
                    f"kinks of {tensor_name!r} are {mask.dtype} of shape {tuple(mask.shape)}: one "
                    "bool per row is needed."
                )
            space = columns.subspace(tensor_name)
            if space is not None:
                rows = columns.rows(tensor_name, slice(0, size))
                once = space.project(rows)
                if not 0 <= space.dimension < size or not _close(space.project(once), once):
                    yield f"the subspace of {tensor_name!r} is no projection to fewer dimensions."
                elif not _close(once, rows):
                    yield f"the columns on {tensor_name!r} do not lie in their subspace."


def _scope(case: Case) -> Violations:
    """There are zeros outside of the scope."""
    outside = [n for n in case.params if n not in case.in_scope and case.rows[n].any()]
    if outside:
        yield f"the columns are not zero on {shorten(outside)}, outside of the scope."
    if not any(case.rows[n].any() for n in case.in_scope):
        yield "all columns are zero at these parameters: pass others, or correct the scope."


def _precision(case: Case) -> Violations:
    """Columns are float64, and the same for weights in float32 and in float64."""
    single = case.at({n: p.float() for n, p in case.params.items()})
    for tensor_name, rows in dense_rows(case.regularizer.bind(single), single).items():
        dtypes = {rows.dtype, case.rows[tensor_name].dtype}
        if dtypes != {torch.float64}:
            yield f"rows of {tensor_name!r} are {shorten(map(str, dtypes))}: float64 is needed."
        elif not _close(rows, case.rows[tensor_name], tolerance=SINGLE):
            yield f"rows of {tensor_name!r} for weights in float32 are not those in float64."


def _layout(case: Case) -> Violations:
    """Columns and values do not depend on how the entries of a tensor lie in memory."""
    moved = case.at({n: _in_other_order(p) for n, p in case.params.items()})
    for tensor_name, rows in dense_rows(case.regularizer.bind(moved), moved).items():
        if not _close(rows, case.rows[tensor_name]):
            yield (
                f"rows of {tensor_name!r} are others where its entries lie in memory in another "
                "order, as in channels_last: read them by flatten() or reshape()."
            )
    if not _close(case.regularizer.value(moved), case.regularizer.value(case.params)):
        yield "value(params) is another where entries lie in memory in another order."


def _in_other_order(tensor: Tensor) -> Tensor:
    """The same tensor, in memory with its first dimension last, and with gaps."""
    dimensions = range(tensor.ndim - 1, -1, -1)
    turned = tensor.permute(*dimensions)
    return torch.stack([turned, torch.zeros_like(turned)], dim=-1)[..., 0].permute(*dimensions)


def _at_zero(case: Case) -> Violations:
    """Columns and values are finite where all weights are zero, or they are refused there."""
    zeros = case.at({n: torch.zeros_like(p) for n, p in case.params.items()})
    try:
        columns = case.regularizer.bind(zeros)
    except InputError:
        if case.regularizer.objective is None:
            raise
        return  # a penalty of a gradient that vanishes there
    for tensor_name, rows in dense_rows(columns, zeros).items():
        if not rows.isfinite().all():
            yield f"rows of {tensor_name!r} are not finite at zero weights."
    if not case.regularizer.value(zeros).isfinite().all():
        yield "value(params) is not finite at zero weights."


def _repeatable(case: Case) -> Violations:
    """A second call gives the same numbers, and the parameters are left as they are."""
    before = {n: p.clone() for n, p in case.params.items()}
    again = dense_rows(case.regularizer.bind(case.params), case.params)
    first, second = (case.regularizer.value(case.params) for _ in range(2))
    if not all(_close(again[n], rows) for n, rows in case.rows.items()):
        yield "a second bind(params) gives other columns: draw random numbers from a fixed seed."
    if not _close(first, second):
        yield "a second value(params) gives another number: draw random numbers from a fixed seed."
    if not all(torch.equal(p, before[n]) for n, p in case.params.items()):
        yield "it changes the parameters that it is called with."


def _statements(case: Case) -> Violations:
    """What the regularizer says of itself can be true."""
    regularizer = case.regularizer
    if regularizer.cost not in get_args(Cost):
        yield f"cost is {regularizer.cost!r}: choose from {', '.join(get_args(Cost))}."
    if regularizer.objective is not None and regularizer.cost == "weights":
        yield "it reads an objective, so that its cost is not 'weights'."
    if regularizer.kind not in get_args(FamilyKind):
        yield f"kind is {regularizer.kind!r}: leave it empty."
    if not isinstance(regularizer.definition, str) or " at 0x" in regularizer.definition:
        yield "definition must be a string that is the same in every process."
    if regularizer.influence is not None and regularizer.objective is None:
        yield "influence needs objective=, whose examples it describes."


def _separable(case: Case) -> Violations:
    """A sum over tensors can be split by layer, and the parts sum to the whole."""
    if not case.regularizer.separable:
        return
    split = layerwise(case.regularizer)
    rows, value = dense_rows(split.bind(case.params), case.params), split.value(case.params)
    if not all(_close(rows[n].sum(1), whole.sum(1)) for n, whole in case.rows.items()):
        yield "it is separable, but the columns of its layers do not sum to its column."
    if not _close(value.sum(), case.regularizer.value(case.params).sum()):
        yield "it is separable, but the values of its layers do not sum to its value."


def _entrywise(case: Case) -> Violations:
    """A function of single entries gives the same columns and value."""
    function = case.regularizer.entrywise
    if function is None:
        return
    values = []
    for tensor_name in case.columns.active:
        theta, rows = case.params[tensor_name].flatten(), case.rows[tensor_name].sum(1)
        values.append(function.value(theta).sum())
        smooth = case.smooth[tensor_name].to(rows)
        if not _close(function.derivative(theta) * smooth, rows * smooth):
            yield f"the derivative of entrywise is not the column on {tensor_name!r}."
    if not _close(torch.stack(values).sum(), case.regularizer.value(case.params).sum()):
        yield "the values of entrywise do not sum to its value."


def _influence(case: Case) -> Violations:
    """The change with every example has one number per example, direction and column."""
    regularizer = case.regularizer
    if regularizer.influence is None or regularizer.objective is None:
        return
    directions = [case.params, {n: p.cos() for n, p in case.params.items()}]
    influence = regularizer.influence(case.params, directions)
    shape = (regularizer.objective.count, 2, len(case.columns.names))
    if influence.shape != shape or not influence.isfinite().all():
        yield f"influence has shape {tuple(influence.shape)}: finite numbers of {shape} are needed."


CLAUSES = {
    "names": _Clause(_names),
    "columns": _Clause(_columns, after=("names",)),
    "one value per name": _Clause(_value, after=("names",)),
    "values": _Clause(_numbers, after=("one value per name",)),
    "probes": _Clause(_probes, after=("columns",)),
    "gradient against finite differences": _Clause(_finite_differences, after=(*BOTH, "probes")),
    "gradient against autograd": _Clause(_autograd, after=(*BOTH, "values", "probes")),
    "slices": _Clause(_slices, after=("columns",)),
    "kinks": _Clause(_kinks_and_subspaces, after=("columns",)),
    "scope": _Clause(_scope, after=("columns",)),
    "precision": _Clause(_precision, after=("columns",)),
    "memory": _Clause(_layout, after=BOTH),
    "zero weights": _Clause(_at_zero, after=BOTH),
    "same numbers at every call": _Clause(_repeatable, after=BOTH),
    "statements": _Clause(_statements),
    "separable": _Clause(_separable, after=BOTH),
    "entrywise": _Clause(_entrywise, after=BOTH),
    "influence": _Clause(_influence, after=BOTH),
}


def _with_zeros(params: Params) -> Params:
    """The parameters with the first row of every matrix at zero, where there may be kinks."""
    zeroed = {n: p.clone() for n, p in params.items()}
    for tensor in zeroed.values():
        if tensor.ndim >= 2 and len(tensor) > 1:
            tensor[0] = 0
    return zeroed


def _close(actual: Tensor, expected: Tensor, tolerance: float = SAME) -> bool:
    """Whether two tensors agree, as parts of the largest entry."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if actual.shape != expected.shape:
        return False
    most = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((actual - expected).abs() <= tolerance * max(most, 1e-12)).all())
