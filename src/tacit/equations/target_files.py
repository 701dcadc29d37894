"""Targets on disk: their vectors and the points they were taken at, without the objective."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.equations.files import TARGET, read_file, write_file
from tacit.equations.points import MODES, Setting, TargetPoint
from tacit.equations.sources import PointFacts
from tacit.errors import InputError
from tacit.objective.params import Params, Point, to_float64
from tacit.objective.scale import Scale
from tacit.plain import check_plain


@dataclass(frozen=True)
class _Description:
    """What `Objective.describe` returns."""

    loss: str
    examples: int
    unit: str
    ignored: float
    uneven: bool
    frozen: int
    tied: int
    dtype: str
    parameter_norm: float


@dataclass(frozen=True)
class _PointHead:
    """The plain values of one point, and which tensors it has: names by part."""

    tensors: dict[str, tuple[str, ...]]
    """Names of parameters or buffers, by part: params, vector 0, …, metric, weights, start."""
    floors: dict[str, float]
    gradient_norm: float
    loss_value: float | None
    facts: PointFacts
    time: float
    description: _Description


@dataclass(frozen=True)
class _Head:
    """The plain values of a file."""

    mode: str
    groups: int
    epochs: bool
    sampled: bool
    piece: int
    every: int
    in_target: dict[str, float] | None
    scale: Scale | None
    points: tuple[_PointHead, ...] = field(default_factory=tuple)


def save_target(
    setting: Setting, points: Sequence[TargetPoint], path: str | os.PathLike[str]
) -> None:
    """Write a target; see `Target.save`."""
    if any(point.averaged for point in points):
        raise InputError(
            "the target has columns that were averaged while training, which belong to "
            "regularizers and are not stored: save the equations instead (Equations.save)."
        )
    write_file(path, *target_content(setting, points), TARGET)


def target_content(
    setting: Setting, points: Sequence[TargetPoint]
) -> tuple[dict[str, Any], list[Tensor]]:
    """The plain values and the tensors of a target, without averaged columns."""
    heads, tensors = [], []
    for point in points:
        point.check_unchanged()
        parts = _parts_of(point)
        tensors += [tensor for part in parts.values() for tensor in part.values()]
        heads.append(
            {
                "tensors": {part: tuple(named) for part, named in parts.items()},
                "floors": dict(point.floors),
                "gradient_norm": point.gradient_norm,
                "loss_value": point.loss_value,
                "facts": vars(point.facts),
                "time": point.time,
                "description": setting.describe(point),
            }
        )
    header = {
        "mode": setting.mode,
        "groups": setting.groups,
        "epochs": setting.epochs,
        "sampled": setting.sampled,
        "piece": setting.piece,
        "every": setting.every,
        "in_target": setting.in_target,
        "scale": None if setting.scale is None else vars(setting.scale),
        "points": heads,
    }
    return header, tensors


def _parts_of(point: TargetPoint) -> dict[str, Params]:
    """All tensors of a point, by part."""
    parts = {"params": dict(point.params)}
    if isinstance(point.params, Point):
        parts["buffers"] = point.params.buffers
    if isinstance(point.start, Point):
        parts["buffers of the start"] = point.start.buffers
    for group, vector in enumerate(point.vectors):
        parts[f"vector {group}"] = {name: to_float64(tensor) for name, tensor in vector.items()}
    others = {"metric": point.metric, "weights": point.weights, "start": point.start or {}}
    return parts | {part: tensors for part, tensors in others.items() if tensors}


def load_target(path: str | os.PathLike[str]) -> tuple[Setting, tuple[TargetPoint, ...]]:
    """Read a target that `save_target` wrote; a file that is damaged or made up is refused."""
    try:
        return read_content(*read_file(path, TARGET))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}. Write the target again.") from error


def read_content(
    header: dict[str, Any], tensors: Sequence[Tensor]
) -> tuple[Setting, tuple[TargetPoint, ...]]:
    """What `target_content` gave; a ValueError says what it cannot have given."""
    head: _Head = check_plain(_Head, header, "the head")
    if head.mode not in MODES or not head.points or not 0 < head.groups <= len(tensors):
        raise ValueError(
            f"it is of mode {head.mode[:40]!r}, with {len(head.points)} points and "
            f"{head.groups} groups"
        )
    remaining = iter(tensors)
    points = tuple(_read_point(point, head.groups, remaining) for point in head.points)
    if next(remaining, None) is not None:
        raise ValueError("it has more tensors than its points")
    setting = Setting(
        head.mode, None, groups=head.groups, epochs=head.epochs, sampled=head.sampled,
        piece=head.piece, every=max(1, head.every), in_file=head.in_target,
        scale_in_file=head.scale,
    )  # fmt: skip
    return setting, points


def _read_point(head: _PointHead, groups: int, tensors: Iterator[Tensor]) -> TargetPoint:
    parts: dict[str, Params] = {}
    for part, names in head.tensors.items():
        read = [next(tensors, None) for _ in names]
        if any(tensor is None for tensor in read) or len({*names}) != len(names):
            raise ValueError("tensors are missing, or have the same name")
        parts[part] = {n: t for n, t in zip(names, read, strict=True) if t is not None}
    params = parts.pop("params", {})
    buffers, start_buffers = (parts.pop(n, None) for n in ("buffers", "buffers of the start"))
    vectors = [parts.pop(f"vector {group}", {}) for group in range(groups)]
    metric, weights, start = (parts.pop(name, {}) for name in ("metric", "weights", "start"))
    if not params or parts:
        raise ValueError(f"a point has no parameters, or unknown parts {', '.join(parts)[:80]!r}")
    for vector in vectors:
        _check_alike(vector, params, "a vector", dtype=torch.float64)
    if start:
        _check_alike(start, params, "the start")
    for scale in (metric, weights):
        _check_scale(scale, params)
    if head.floors.keys() != params.keys() or min(head.floors.values()) < 0:
        raise ValueError("its rounding floors are negative, or not those of its parameters")
    return TargetPoint(
        params if buffers is None else Point(params, buffers),
        vectors,
        head.floors,
        head.gradient_norm,
        head.loss_value,
        facts=head.facts,
        metric=metric,
        time=head.time,
        weights=weights,
        start=(start if start_buffers is None else Point(start, start_buffers)) or None,
        description=vars(head.description),
    )


def _check_alike(
    tensors: Params, params: Params, what: str, *, dtype: torch.dtype | None = None
) -> None:
    """Refuse tensors that are not finite, or not of the parameters' names and shapes."""
    if tensors.keys() != params.keys():
        raise ValueError(f"{what} has not the names of the parameters")
    for name, tensor in tensors.items():
        if tensor.shape != params[name].shape or dtype not in (None, tensor.dtype):
            raise ValueError(f"{what} of {name[:40]!r} has another shape or dtype")
        if not torch.isfinite(tensor).all() or not torch.isfinite(params[name]).all():
            raise ValueError(f"{what} or the parameter {name[:40]!r} is not finite")


def _check_scale(scale: Mapping[str, Tensor], params: Params) -> None:
    """Refuse a metric or weights of other shapes, or below zero."""
    for name, tensor in scale.items():
        shapes: Sequence[Any] = ((), params[name].shape) if name in params else ()
        if tensor.shape not in shapes or not (torch.isfinite(tensor) & (tensor >= 0)).all():
            raise ValueError(f"the metric or a weight of {name[:40]!r} is not one")
