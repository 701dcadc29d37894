"""Directions in parameter space that a fit reads gradients along, built tensor by tensor."""

from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from tacit.equations.rows import CHUNK, BoundCandidates
from tacit.objective.params import Params, to_float64

HELD = 2**26
"""Entries of all directions together up to which they are kept."""


class Directions(Sequence[Params]):
    """Combinations of the columns ∇R_k: direction j is Φ·combinations[:, j].

    Zero on rows that are in no equation: at kinks, and out of `rows` (whose names are left out).
    Tensors are as the parameters are. Where all directions together are large, each is made anew
    whenever it is asked for, so that they are never held at once.
    """

    def __init__(
        self, params: Params, bound: BoundCandidates, rows: Sequence[str], combinations: Tensor
    ):
        self.params, self.bound, self.rows = params, bound, rows
        self.combinations = combinations
        size = sum(params[n].numel() for n in rows) * combinations.shape[1]
        self._held = self._made(combinations) if size <= HELD else None

    def __len__(self) -> int:
        return self.combinations.shape[1]

    @overload
    def __getitem__(self, index: int) -> Params: ...
    @overload
    def __getitem__(self, index: slice) -> list[Params]: ...
    def __getitem__(self, index: int | slice) -> Params | list[Params]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._held is not None:
            return self._held[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._made(self.combinations[:, [index]])[0]

    def _made(self, combinations: Tensor) -> list[Params]:
        count = combinations.shape[1]
        found: list[Params] = [{} for _ in range(count)]
        for name in self.rows:
            tensor = self.params[name]
            whole = torch.zeros(count, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            active = list(self.bound.columns.active.get(name, ()))
            for part in _parts(tensor, len(active)) if active else ():
                values = self.bound.columns.rows(name, part)
                values = values @ combinations[active].to(values)
                whole[:, part] = _without(values, name, part, self.bound).T.to(whole)
            for direction, values in zip(found, whole, strict=True):
                direction[name] = values.view(tensor.shape)
        return found


def signs(params: Params, bound: BoundCandidates, rows: Sequence[str], *, seed: int) -> Params:
    """A random sign for every row in the equations, zero elsewhere.

    Over such signs z, the variance of ⟨z, g⟩ is tr Cov(g) on average (Hutchinson).
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in rows:
        tensor = params[name]
        ones = torch.randint(0, 2, (tensor.numel(),), generator=generator, dtype=torch.int8)
        values = (2 * ones.to(tensor) - 1)[:, None]
        for part in _parts(tensor, 1):
            values[part] = _without(values[part], name, part, bound)
        found[name] = values.view(tensor.shape)
    return found


def balanced(count: int, *, seed: int) -> Tensor:
    """Random signs, as many of one as of the other, one an example; one is 0 where n is odd.

    Over them, ‖Σ s_i g_i‖² is n·tr Cov(g) on average: the mean of the gradients cancels.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    signs = torch.zeros(count, dtype=torch.float64)
    signs[order[: count // 2]] = 1
    signs[order[count // 2 : 2 * (count // 2)]] = -1
    return signs


def square_of_rows(
    vector: Mapping[str, Tensor], params: Params, bound: BoundCandidates, rows: Sequence[str]
) -> float:
    """‖vector‖² over the rows in the equations."""
    total = 0.0
    for name in rows:
        flat = to_float64(vector[name]).flatten()[:, None]
        for part in _parts(params[name], 1):
            total += float(_without(flat[part], name, part, bound).square().sum())
    return total


def residual(
    params: Params,
    bound: BoundCandidates,
    rows: Sequence[str],
    target: Mapping[str, Tensor],
    fitted: Tensor,
) -> Params:
    """What a fit leaves: target − known penalties − Φ·fitted, on the rows in the equations."""
    found = {}
    for name in rows:
        tensor = params[name]
        left = to_float64(target[name]).flatten().clone()[:, None]
        active = list(bound.columns.active.get(name, ()))
        for part in _parts(tensor, len(active)):
            for strength, known in bound.known:
                if name in known.active:
                    left[part] -= strength * known.rows(name, part).to(left)
            if active:
                values = bound.columns.rows(name, part).to(left)
                left[part] -= values @ fitted[active, None].to(left)
            left[part] = _without(left[part], name, part, bound)
        found[name] = left.view(tensor.shape).to(tensor)
    return found


def known_force(params: Params, bound: BoundCandidates, directions: Sequence[Params]) -> Tensor:
    """Σ strength·⟨∇R_known, v_j⟩ for every direction: what known penalties take off the target."""
    total = torch.zeros(len(directions), dtype=torch.float64)
    for j in range(len(directions)) if bound.known else ():
        for name, along in directions[j].items():
            flat = to_float64(along).flatten()
            for strength, known in bound.known:
                for part in _parts(params[name], 1) if name in known.active else ():
                    column = known.rows(name, part)[:, 0]
                    total[j] += strength * float((column * flat[part].to(column)).sum())
    return total


def _parts(tensor: Tensor, width: int) -> list[slice]:
    height = max(1, CHUNK // max(1, width))
    return [slice(i, min(i + height, tensor.numel())) for i in range(0, tensor.numel(), height)]


def _without(values: Tensor, name: str, part: slice, bound: BoundCandidates) -> Tensor:
    """The values with zeros at kinks, which are in no equation."""
    for columns in (bound.columns, *(known for _, known in bound.known)):
        mask = columns.kinks(name, part) if name in columns.active else None
        if mask is not None:
            values = values.masked_fill(mask.to(values.device)[:, None], 0)
    return values
