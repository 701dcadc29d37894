"""What a regularizer is: named columns ∇R_j(θ), read a few rows at a time, and values R_j(θ)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.params import Params, Scope, select, to_float64

if TYPE_CHECKING:
    from tacit.objective.objective import Objective


from tacit.objective.params import layer_of

FamilyKind = Literal["", "l2", "smooth_l1", "diagonal", "symmetric"]


@dataclass(frozen=True, eq=False)
class Columns:
    """The gradients of a family at given parameters: one column a coefficient.

    `active` maps a tensor to the columns that are not zero on it. `rows(tensor, part)` gives those
    columns on a slice of the flattened tensor, in float64, shape (rows, active columns).
    `kinks(tensor, part)` marks rows where R has no gradient (its condition there is an
    inequality), or is None where there can be none.
    """

    names: tuple[str, ...]
    active: dict[str, tuple[int, ...]]
    rows: Callable[[str, slice], Tensor]
    kinks: Callable[[str, slice], Tensor | None] = lambda tensor, part: None


class Entry(NamedTuple):
    """A family that treats every entry alike: R(θ) = Σ_i value(θ_i), ∇R(θ)_i = slope(θ_i).

    Both act on tensors of any shape, so that parameters of many models can be stacked.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Regularizer:
    """A family of penalties R(θ) = Σ_j λ_j R_j(θ), linear in its strengths λ.

    Most have one coefficient, and their column bears their name. Regularizers compare by
    identity, so that they can be keys of `known=`.

    Args:
        name: what strengths are listed under.
        bind: the columns ∇R_j at given parameters.
        value: R_j(θ) for every j, a 1-D tensor that autograd can differentiate (for retraining).
        separable: R is a sum over tensors, so that it can be split by layer.
        kind: what diagnoses and `Fit.matrix()` must know of it; a name can be chosen freely.
        entry: the function of one entry, where R is its sum over entries.
        influence: of a penalty that is read from data, influence(params, directions): how much each
            example moves ⟨∇R_j, v⟩ for every direction v, up to the mean over examples, of shape
            (examples, directions, columns).
        objective: the data that it is read from.
    """

    name: str
    bind: Callable[[Params], Columns] = field(repr=False)
    value: Callable[[Params], Tensor] = field(repr=False)
    separable: bool = False
    kind: FamilyKind = ""
    entry: Entry | None = field(default=None, repr=False)
    influence: Callable[[Params, Sequence[Params]], Tensor] | None = field(default=None, repr=False)
    objective: "Objective | None" = field(default=None, repr=False)

    def gradient(self, params: Params, names: Iterable[str] | None = None) -> dict[str, Params]:
        """Every column as a dictionary of whole tensors, restricted to the named ones.

        For looking at and for tests: estimators read `bind(params)` in slices instead.
        """
        columns = self.bind(params)
        chosen = params if names is None else {n: params[n] for n in names}
        dense = {
            c: {n: torch.zeros_like(to_float64(p)) for n, p in chosen.items()}
            for c in columns.names
        }
        for name, tensor in chosen.items():
            if name not in columns.active:
                continue
            values = columns.rows(name, slice(0, tensor.numel()))
            for position, column in enumerate(columns.active[name]):
                dense[columns.names[column]][name] = values[:, position].reshape(tensor.shape)
        return dense


def join(parts: Sequence[Columns]) -> Columns:
    """The columns of several families side by side."""
    offsets = list(accumulate((len(p.names) for p in parts), initial=0))
    names = tuple(name for part in parts for name in part.names)
    tensors = dict.fromkeys(t for part in parts for t in part.active)
    active = {
        t: tuple(o + j for p, o in zip(parts, offsets, strict=False) for j in p.active.get(t, ()))
        for t in tensors
    }

    def rows(tensor: str, piece: slice) -> Tensor:
        return torch.cat([p.rows(tensor, piece) for p in parts if tensor in p.active], dim=1)

    def kinks(tensor: str, piece: slice) -> Tensor | None:
        masks = [p.kinks(tensor, piece) for p in parts if tensor in p.active]
        masks = [mask for mask in masks if mask is not None]
        return torch.stack(masks).any(0) if masks else None

    return Columns(names, active, rows, kinks)


class Slope(NamedTuple):
    """∇R of one tensor, flattened: at a slice of it, and where in the slice it does not exist."""

    at: Callable[[slice], Tensor]
    kinks: Callable[[slice], Tensor] | None = None


def separable(
    name: str,
    *,
    scope: Scope,
    value: Callable[[Tensor, str], Tensor],
    slope: Callable[[Tensor, str], Slope],
    covers: Callable[[Tensor], bool] = lambda tensor: True,
    kind: FamilyKind = "",
    entry: Entry | None = None,
) -> Regularizer:
    """A one-coefficient family that is a sum over tensors.

    Args:
        name: the column's name.
        scope: which parameters it covers.
        value: R of one tensor, given its name.
        slope: ∇R of one tensor, given its name, in float64.
        covers: which tensors it is defined for at all.
        kind: what diagnoses must know of it.
        entry: the function of one entry, where every entry is treated alike.
    """
    check_name(name)

    def chosen(params: Params) -> tuple[str, ...]:
        names = select(params, scope, what=f"scope of {name}")
        fitting = tuple(n for n in names if covers(params[n]))
        if not fitting:
            raise InputError(
                f"{name} is defined for none of the parameters it covers: it needs tensors of two "
                "or more dimensions. Widen its scope, or leave it out."
            )
        return fitting

    def bind(params: Params) -> Columns:
        slopes = _one_at_a_time(params, slope)

        def kinks(tensor: str, part: slice) -> Tensor | None:
            find = slopes(tensor).kinks
            return None if find is None else find(part)

        return Columns(
            names=(name,),
            active=dict.fromkeys(chosen(params), (0,)),
            rows=lambda tensor, part: slopes(tensor).at(part).unsqueeze(1),
            kinks=kinks,
        )

    def values(params: Params) -> Tensor:
        return torch.stack([value(params[n], n) for n in chosen(params)]).sum().reshape(1)

    return Regularizer(name, bind, values, separable=True, kind=kind, entry=entry)


def _one_at_a_time(params: Params, slope: Callable[[Tensor, str], Slope]) -> Callable[[str], Slope]:
    """What a slope prepares for a tensor (norms of its rows, say), kept only until the next one."""
    kept: dict[str, Slope] = {}

    def prepared(tensor: str) -> Slope:
        if tensor not in kept:
            kept.clear()
            kept[tensor] = slope(params[tensor].detach(), tensor)
        return kept[tensor]

    return prepared


def check_name(name: str) -> None:
    """Refuse a name that could not be listed."""
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"a regularizer's name is {name!r}: pass a string that is not empty.")


def layerwise(family: Regularizer | Callable[[], Regularizer]) -> Regularizer:
    """The family with one strength a layer, named `l2[encoder.0]` and so on.

    A layer is the module that owns the parameters. Only sums over tensors can be split: `l2`,
    `l1`, `smooth_l1`, `distance_to`, `group_l2`, `nuclear_norm`.
    """
    base = family() if callable(family) else family
    if not isinstance(base, Regularizer) or not base.separable:
        raise InputError(
            f"layerwise was given {getattr(base, 'name', type(base).__name__)!r}, which is not a "
            "sum over tensors. Pass l2(), l1(), smooth_l1(beta), distance_to(params), group_l2() "
            "or nuclear_norm()."
        )

    def layers(columns: Columns) -> dict[str, int]:
        return {layer: i for i, layer in enumerate(dict.fromkeys(map(layer_of, columns.active)))}

    def bind(params: Params) -> Columns:
        columns = base.bind(params)
        position = layers(columns)
        return Columns(
            names=tuple(f"{base.name}[{layer}]" for layer in position),
            active={tensor: (position[layer_of(tensor)],) for tensor in columns.active},
            rows=columns.rows,
            kinks=columns.kinks,
        )

    def value(params: Params) -> Tensor:
        columns = base.bind(params)
        members: dict[str, Params] = {layer: {} for layer in layers(columns)}
        for tensor in columns.active:
            members[layer_of(tensor)][tensor] = params[tensor]
        return torch.cat([base.value(own) for own in members.values()])

    return Regularizer(base.name, bind, value, kind=base.kind, entry=base.entry)


def whole_column(name: str, gradient: Params) -> Columns:
    """One column from a gradient that is held whole."""
    return Columns(
        names=(name,),
        active=dict.fromkeys(gradient, (0,)),
        rows=lambda tensor, part: to_float64(gradient[tensor].flatten()[part]).unsqueeze(1),
    )
