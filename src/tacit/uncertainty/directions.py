"""Vectors built from the rows of a fit's equations, which are read in slices.

The rows are those of `BoundCandidates`: one per entry of the tensors in `bound.rows`. Entries at a
kink of a regularizer have no equation, and every vector built here is zero there. The design Φ
(rows × strengths) is never stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.equations.candidates import BoundCandidates, slices
from tacit.equations.rows import read_rows
from tacit.objective.params import (
    Params,
    entries,
    entries_of,
    read_numbers,
    sum_over_parts,
    to_float64,
)
from tacit.objective.ranks import current_ranks

MOST_SIGNED, PART_SIGNED, RUNS = 2**15, 4, 4
"""Of more examples than the first number, that many or one in the second have a random sign, in so
many runs."""
MAX_STORED_ENTRIES = 2**26
"""Directions with more entries than this in all are rebuilt at each access instead of stored,
unless a GPU has room for them."""


def build_directions(
    bound: BoundCandidates, combinations: Tensor, probe_seeds: Sequence[int] = ()
) -> Sequence[Params]:
    """Φ·combinations, one direction per column, then one direction of random signs per seed.

    Each has the names, shapes, dtypes and devices of the parameters. A list, unless the
    combinations of columns are too large to be stored together.
    """
    probes = [random_signs(bound, seed) for seed in probe_seeds]
    if _can_be_stored(bound, combinations.shape[1]):
        return [*combine_columns(bound, combinations), *probes]
    return _RebuiltDirections(bound, combinations, probes)


def _can_be_stored(bound: BoundCandidates, count: int) -> bool:
    """Whether so many directions can be in memory together: of a GPU, in a quarter of what is free.

    Rebuilding them for every batch takes longer than the derivatives along them.
    """
    tensors = [bound.params[name] for name in bound.rows]
    if count * entries({name: bound.params[name] for name in bound.rows}) <= MAX_STORED_ENTRIES:
        return True
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        size = count * tensor.numel() * tensor.element_size()
        needed[tensor.device] = needed.get(tensor.device, 0) + size
    return all(
        device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0] // 4
        for device, size in needed.items()
    )


def combine_columns(bound: BoundCandidates, combinations: Tensor) -> list[Params]:
    """Φ·combinations, one direction per column of `combinations`."""
    params, count = bound.params, combinations.shape[1]
    flat = {name: params[name].new_zeros(count, params[name].numel()) for name in bound.rows}
    for name, part, active, design, _, kinks in _read(bound):
        values = design @ combinations[active].to(design, non_blocking=combinations.is_cpu)
        flat[name][:, part] = _zero(values, kinks).T.to(flat[name])
    return [
        {name: values[j].view(params[name].shape) for name, values in flat.items()}
        for j in range(count)
    ]


def random_signs(bound: BoundCandidates, seed: int) -> Params:
    """A direction z of random signs ±1.

    The variance of ⟨z, g⟩ is tr Cov(g) on average over such z (Hutchinson).
    """
    generator, signs = torch.Generator().manual_seed(seed), {}
    for name in bound.rows:
        tensor = bound.params[name]
        size, here = current_ranks().place(tensor)
        bits = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)[here]
        signs[name] = (2 * bits.to(tensor) - 1)[:, None]
    for name, part, *_, kinks in _read(bound, columns=False):
        signs[name][part] = _zero(_along_equations(bound, name, signs[name][part]), kinks)
    return {name: flat.view(bound.params[name].shape) for name, flat in signs.items()}


def square_norm_of_rows(bound: BoundCandidates, vector: Mapping[str, Tensor]) -> float:
    """‖vector‖² over the rows of the equations."""
    squares: Params = {}
    for name, part, *_, kinks in _read(bound, columns=False):
        values = _along_equations(bound, name, to_float64(entries_of(vector[name], part))[:, None])
        squares[str(len(squares))] = _zero(values, kinks).square().sum()
    return sum_over_parts({"": sum(read_numbers(squares).values())})[""]


def unexplained_rows(bound: BoundCandidates, target: Params, strengths: Tensor) -> Params:
    """What a fit leaves unexplained: target − known penalties' gradients − Φ·strengths."""
    params = bound.params
    flat = {name: params[name].new_empty(params[name].numel()) for name in bound.rows}
    for name, part, active, design, values, kinks in _read(bound, [target]):
        values = values - design.to(values) @ strengths[active, None].to(values)
        flat[name][part] = _zero(values, kinks)[:, 0].to(flat[name])
    return {name: values.view(params[name].shape) for name, values in flat.items()}


def known_products(bound: BoundCandidates, directions: Sequence[Params], count: int) -> Tensor:
    """Σ strength·⟨∇R_known, v_j⟩ over known penalties, for the first `count` directions v_j."""
    products = torch.zeros(count, dtype=torch.float64)
    for j in range(count):
        for name, values in directions[j].items():
            for part in slices(values, 1):
                along = to_float64(entries_of(values, part))
                for strength, known in bound.known:
                    if name in known.active:
                        column = known.rows(name, part)[:, 0]
                        products[j] += strength * float((column * along.to(column)).sum())
    return current_ranks().sum_parts(products)


def balanced_signs(count: int, *, seed: int) -> Tensor:
    """Random signs, one per example, equally many +1 and −1; the others are 0.

    E‖Σ s_i g_i‖² is m·tr Cov(g) over m such signs, because the mean of the g_i cancels. Its
    relative error does not depend on m, so that of very many examples (tokens) only a part has a
    sign: a few runs, spread over the data. Where m is odd, one more is 0.
    """
    signed = torch.arange(count)
    if count > MOST_SIGNED:
        length = max(MOST_SIGNED, count // PART_SIGNED) // RUNS
        starts = [i * (count - length) // (RUNS - 1) for i in range(RUNS)]
        signed = torch.cat([signed[start : start + length] for start in starts])
    order = signed[torch.randperm(len(signed), generator=torch.Generator().manual_seed(seed))]
    half = len(order) // 2
    signs = torch.zeros(count, dtype=torch.float64)
    signs[order[:half]] = 1
    signs[order[half : 2 * half]] = -1
    return signs


@dataclass(frozen=True, eq=False)
class _RebuiltDirections(Sequence[Params]):
    """Combinations of columns that are rebuilt at each access, followed by stored probes."""

    bound: BoundCandidates
    combinations: Tensor
    probes: Sequence[Params]

    def __len__(self) -> int:
        return self.combinations.shape[1] + len(self.probes)

    def __getitem__(self, index: Any) -> Any:
        position = range(len(self))[index]
        if isinstance(position, range):  # the index is a slice
            return [self[i] for i in position]
        count = self.combinations.shape[1]
        if position >= count:
            return self.probes[position - count]
        return combine_columns(self.bound, self.combinations[:, [position]])[0]


def _read(
    bound: BoundCandidates, targets: Sequence[Params] = (), *, columns: bool = True
) -> Iterator[tuple[str, slice, list[int], Tensor, Tensor, Tensor | None]]:
    """Tensor by tensor and slice by slice: name, slice, active columns, and `read_rows` of them."""
    for name in bound.rows:
        active = list(bound.columns.active.get(name, ())) if columns else []
        for part in bound.slices(name, len(active)):
            yield name, part, active, *read_rows(bound, name, part, targets, columns=columns)


def _along_equations(bound: BoundCandidates, name: str, values: Tensor) -> Tensor:
    """The vectors of a tensor, projected where its equations are along a subspace."""
    space = bound.subspace(name)
    return values if space is None else space.project(values)


def _zero(values: Tensor, kinks: Tensor | None) -> Tensor:
    """The values with zeros at kinks, which are in no equation."""
    return values if kinks is None else values.masked_fill(kinks.to(values.device)[:, None], 0)
