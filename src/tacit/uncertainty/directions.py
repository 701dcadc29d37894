"""The rows of a fit's equations, read in slices, and the directions that are built from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from tacit.equations.rows import BoundCandidates, read_rows, slices
from tacit.objective.params import Params, to_float64

MAX_STORED_ENTRIES = 2**26
"""Directions with more entries than this in all are rebuilt at each access instead of stored."""


@dataclass(frozen=True, eq=False)
class EquationRows:
    """The rows of the equations at one point: one per entry of the tensors in `bound.rows`.

    Entries at a kink of a regularizer have no equation. Every vector built here is zero there.
    Tensors are read in slices, so that the design Φ (rows × strengths) is never stored.
    """

    bound: BoundCandidates

    def directions(self, combinations: Tensor, probe_seeds: Sequence[int] = ()) -> Sequence[Params]:
        """Φ·combinations, one direction per column, then one direction of random signs per seed.

        Each has the names, shapes, dtypes and devices of the parameters. A list, unless the
        combinations of columns are too large to be stored together.
        """
        probes = [self.random_signs(seed) for seed in probe_seeds]
        parameters = sum(self.bound.params[name].numel() for name in self.bound.rows)
        if parameters * combinations.shape[1] <= MAX_STORED_ENTRIES:
            return [*self.combine_columns(combinations), *probes]
        return _RebuiltDirections(self, combinations, probes)

    def combine_columns(self, combinations: Tensor) -> list[Params]:
        """Φ·combinations, one direction per column of `combinations`."""
        params, count = self.bound.params, combinations.shape[1]
        flat = {
            name: params[name].new_zeros(count, params[name].numel()) for name in self.bound.rows
        }
        for name, part in self._slices(with_columns=True):
            active = list(self.bound.columns.active.get(name, ()))
            design, _, kinks = read_rows(self.bound, name, part, [])
            values = design @ combinations[active].to(design)
            flat[name][:, part] = _zero(values, kinks).T.to(flat[name])
        return [
            {name: values[j].view(params[name].shape) for name, values in flat.items()}
            for j in range(count)
        ]

    def random_signs(self, seed: int) -> Params:
        """A direction z of random signs ±1.

        The variance of ⟨z, g⟩ is tr Cov(g) on average over such z (Hutchinson).
        """
        generator = torch.Generator().manual_seed(seed)
        signs = {}
        for name in self.bound.rows:
            tensor = self.bound.params[name]
            bits = torch.randint(0, 2, (tensor.numel(),), generator=generator, dtype=torch.int8)
            signs[name] = (2 * bits.to(tensor) - 1)[:, None]
        for name, part in self._slices():
            _, _, kinks = read_rows(self.bound, name, part, [], columns=False)
            signs[name][part] = _zero(signs[name][part], kinks)
        return {name: flat.view(self.bound.params[name].shape) for name, flat in signs.items()}

    def square_norm(self, vector: Mapping[str, Tensor]) -> float:
        """‖vector‖² over the rows of the equations."""
        total = 0.0
        for name, part in self._slices():
            _, _, kinks = read_rows(self.bound, name, part, [], columns=False)
            values = to_float64(vector[name]).flatten()[part, None]
            total += float(_zero(values, kinks).square().sum())
        return total

    def residual(self, target: Params, strengths: Tensor) -> Params:
        """What a fit leaves unexplained: target − known penalties' gradients − Φ·strengths."""
        params = self.bound.params
        flat = {name: params[name].new_empty(params[name].numel()) for name in self.bound.rows}
        for name, part in self._slices(with_columns=True):
            active = list(self.bound.columns.active.get(name, ()))
            design, values, kinks = read_rows(self.bound, name, part, [target])
            values = values - design.to(values) @ strengths[active, None].to(values)
            flat[name][part] = _zero(values, kinks)[:, 0].to(flat[name])
        return {name: values.view(params[name].shape) for name, values in flat.items()}

    def known_products(self, directions: Sequence[Params], count: int) -> Tensor:
        """Σ strength·⟨∇R_known, v_j⟩ over known penalties, for the first `count` directions v_j."""
        products = torch.zeros(count, dtype=torch.float64)
        for j in range(count):
            direction = directions[j]
            for name, part in self._slices():
                values = to_float64(direction[name]).flatten()[part]
                for strength, known in self.bound.known:
                    if name in known.active:
                        column = known.rows(name, part)[:, 0]
                        products[j] += strength * float((column * values.to(column)).sum())
        return products

    def _slices(self, *, with_columns: bool = False) -> Iterator[tuple[str, slice]]:
        """The tensors and slices of them, sized for one value per row or for the design's rows."""
        for name in self.bound.rows:
            width = len(self.bound.columns.active.get(name, ())) if with_columns else 1
            for part in slices(self.bound.params[name], width):
                yield name, part


def _zero(values: Tensor, kinks: Tensor | None) -> Tensor:
    """The values with zeros at kinks, which are in no equation."""
    return values if kinks is None else values.masked_fill(kinks.to(values.device)[:, None], 0)


@dataclass(frozen=True, eq=False)
class _RebuiltDirections(Sequence[Params]):
    """Combinations of columns that are rebuilt at each access, followed by stored probes."""

    rows: EquationRows
    combinations: Tensor
    probes: Sequence[Params]

    def __len__(self) -> int:
        return self.combinations.shape[1] + len(self.probes)

    @overload
    def __getitem__(self, index: int) -> Params: ...
    @overload
    def __getitem__(self, index: slice) -> list[Params]: ...
    def __getitem__(self, index: int | slice) -> Params | list[Params]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index, number = index % len(self), self.combinations.shape[1]
        if index >= number:
            return self.probes[index - number]
        return self.rows.combine_columns(self.combinations[:, [index]])[0]


def balanced_signs(count: int, *, seed: int) -> Tensor:
    """Random signs, one per example, equally many +1 and −1; one of them is 0 where n is odd.

    E‖Σ s_i g_i‖² is n·tr Cov(g) over such signs, because the mean of the g_i cancels.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    signs = torch.zeros(count, dtype=torch.float64)
    signs[order[: count // 2]] = 1
    signs[order[count // 2 : 2 * (count // 2)]] = -1
    return signs
