"""From gradients to blocks: rows of [design | targets] are read in slices and factorised."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tacit.equations.blocks import Block, join_parts
from tacit.equations.candidates import BoundCandidates, slices
from tacit.equations.factors import FactorSum, factors_of, triangular_factor
from tacit.errors import InputError
from tacit.objective.params import Params, entries_of, layer_of, read_numbers, to_float64
from tacit.objective.ranks import current_ranks

SMALL, MOST_SMALL = 2**16, 2**20
"""Tensors of at most so many entries are read together, until they have the second number."""

Part = tuple[str, slice]
"""A slice of a tensor, by its name."""


def write_blocks(
    bound: BoundCandidates, targets: Sequence[Params], *, floors: Mapping[str, float]
) -> list[Block]:
    """The equations at one point as one block per layer.

    The whole design is never in memory: each slice of rows is merged into the layer's factor.
    """
    layers = names_by_layer(bound.rows)
    sums: list[_LayerSum] = []
    for few in _with_few_entries(layers.items(), bound):
        small = _read_small([name for _, names in few for name in names], bound, targets)
        for layer, names in few:
            sums.append(total := _LayerSum(layer, names, bound, targets))
            total.add_all(small)
    left_out = read_numbers({total.layer: total.left_out for total in sums})
    factors = factors_of([total.rows for total in sums], [total.read for total in sums])
    blocks = []
    for total, factor in zip(sums, factors, strict=True):
        if not torch.isfinite(factor).all():
            raise InputError(
                f"the equations of layer {total.layer} overflow: a regularizer's gradient or a "
                "target is not finite there. Leave that layer out with rows=."
            )
        count = sum(bound.params[name].numel() for name in total.names) - left_out[total.layer]
        floor = sum(floors[name] ** 2 for name in total.names) ** 0.5
        block = Block(total.layer, total.active, factor, count, left_out[total.layer], floor)
        blocks.append(total.scatter.attach(block))
    return join_parts(blocks)


def names_by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """The parameters of each layer."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    return layers


class _LayerSum:
    """The rows of one layer, merged slice by slice."""

    def __init__(
        self, layer: str, names: Sequence[str], bound: BoundCandidates, targets: Sequence[Params]
    ) -> None:
        self.layer, self.names, self._bound, self._targets = layer, names, bound, targets
        columns = bound.columns.active
        self.active = tuple(sorted({c for name in names for c in columns.get(name, ())}))
        self._width = len(self.active) + len(targets)
        # What gathers whole tensors is read once: other processes would not read again.
        once = bool(bound.gathers) and current_ranks().shards is not None
        self.rows = FactorSum(self._width, once=once)
        self.scatter = ScatterSum(bound, names, self._width)
        self.left_out = torch.zeros((), dtype=torch.int64)
        """How many rows have no equation; read from the device with those of other layers."""
        # Biases first: with them, the first rows show which columns are independent.
        gathered = bound.gathers and current_ranks().shards is not None
        self._by_size = (
            list(names) if gathered else sorted(names, key=lambda n: bound.params[n].numel())
        )

    def add_all(self, small: Mapping[str, tuple[Tensor, Tensor | int]]) -> None:
        """Add the rows of all tensors; those of small ones have been read already."""
        for name in self._by_size:
            if name in small:
                rows, left_out = small[name]
                columns = self._bound.columns.active.get(name, ())
                self.rows.add(place_columns(rows, columns, self.active).mT)
                self._leave_out(left_out)
                continue
            for part in self._bound.slices(name, self._width):
                matrix, (left_out,) = read_block(
                    self._bound, [(name, part)], self.active, self._targets
                )
                self.rows.add(matrix)
                self.scatter.add(name, part, matrix)
                self._leave_out(left_out)

    def read(self) -> Iterator[Tensor]:
        """The rows again, in slices."""
        for name in self._by_size:
            for part in self._bound.slices(name, self._width):
                yield read_block(self._bound, [(name, part)], self.active, self._targets)[0]

    def _leave_out(self, number: Tensor | int) -> None:
        if isinstance(number, Tensor):
            self.left_out = self.left_out.to(number.device) + number
        elif number:
            self.left_out = self.left_out + number


def _with_few_entries(
    layers: Iterable[tuple[str, list[str]]], bound: BoundCandidates
) -> Iterator[list[tuple[str, list[str]]]]:
    """Successive layers whose small tensors together are read at once."""
    few: list[tuple[str, list[str]]] = []
    entries = 0
    for layer, names in layers:
        few.append((layer, names))
        sizes = [bound.params[name].numel() for name in names]
        entries += sum(size for size in sizes if size <= SMALL)
        if entries > MOST_SMALL:
            yield few
            few, entries = [], 0
    if few:
        yield few


def _read_small(
    names: Sequence[str], bound: BoundCandidates, targets: Sequence[Params]
) -> dict[str, tuple[Tensor, Tensor | int]]:
    """By small tensor, its rows on the CPU, transposed, and how many of them have no equation.

    Only of those whose columns are functions of single entries.
    """
    alike: dict[Any, list[str]] = {}
    for name in names:
        functions = bound.functions_on(name)
        if functions is not None and 0 < bound.params[name].numel() <= SMALL:
            alike.setdefault((functions, bound.params[name].device), []).append(name)
    small: dict[str, tuple[Tensor, Tensor | int]] = {}
    for group in alike.values():
        parts = [(name, slice(0, bound.params[name].numel())) for name in group]
        rows, left_out = read_entries(bound, parts, targets)
        split = rows.cpu().split([part.stop for _, part in parts], dim=1)
        small |= dict(zip(group, zip(split, left_out, strict=True), strict=True))
    return small


class ScatterSum:
    """The scatter of a block's noisy columns, summed over slices; see `tacit.equations.noise`."""

    def __init__(self, bound: BoundCandidates, names: Sequence[str], width: int) -> None:
        self.bound = bound
        self.noisy = sorted({c for name in names for c in bound.columns.noisy_on(name)})
        size = bound.columns.groups * len(self.noisy)
        self.products = torch.zeros(width + size, size, dtype=torch.float64)

    def add(self, name: str, part: slice, matrix: Tensor, weight: float = 1.0) -> None:
        """Add a slice of a tensor, whose rows `read_block` returns, times a weight."""
        bound, columns = self.bound, self.bound.columns.noisy_on(name)
        if not columns:
            return
        entries = bound.columns.deviations(name, part).to(matrix)
        deviations = entries.new_zeros(*entries.shape[:2], len(self.noisy))
        deviations[:, :, [self.noisy.index(column) for column in columns]] = entries
        D = deviations.flatten(1)
        if (space := bound.subspace(name)) is not None:
            D = space.project(D)
        if name in bound.weights:
            D = D * bound.weight_of(name, part).to(D)
        if (kinks := kinks_on(bound, name, part)) is not None:
            D = D.masked_fill(kinks.to(D.device)[:, None], 0.0)
        rows = torch.cat([matrix, D], dim=1)
        self.products += (weight**2 * rows.T @ D).cpu()

    def attach(self, block: Block) -> Block:
        """The block with this scatter."""
        if not self.noisy:
            return block
        return replace(block, noisy=tuple(self.noisy), scatter=self.products)


def kinks_on(bound: BoundCandidates, name: str, part: slice) -> Tensor | None:
    """Which rows of a slice are at kinks; None where there are none."""
    masks = [mask for f in bound.families_on(name) if (mask := f.kinks(name, part)) is not None]
    if not masks:
        return None
    kinks = torch.stack([mask.to(masks[0].device) for mask in masks]).any(0)
    if bound.subspace(name) is None:
        return kinks
    anywhere = current_ranks().largest_of_parts(float(kinks.any())) > 0
    return torch.full_like(kinks, anywhere)


def write_means(
    points: Sequence[tuple[BoundCandidates, Sequence[Params]]],
) -> list[Block]:
    """√m times the mean of [design | target] over m points, as one block per layer.

    A row at a kink at one point counts as zero there. There are no blocks where points have
    equations of other parameters, or along a subspace, which differs between points.
    """
    first, targets = points[0]
    names = first.rows
    if any(b.rows != names or b.subspace(n) is not None for b, _ in points for n in names):
        return []
    blocks = []
    for layer, members in names_by_layer(names).items():
        active = sorted(
            {c for b, _ in points for n in members for c in b.columns.active.get(n, ())}
        )
        width, rows = len(active) + len(targets), 0
        factor = torch.zeros(0, width, dtype=torch.float64)
        for name in members:
            for part in slices(first.params[name], width):
                total = sum(read_block(b, [(name, part)], active, t)[0] for b, t in points)
                total = total / len(points) ** 0.5
                factor = triangular_factor(torch.cat([factor.to(total), total]))
                rows += len(total)
        blocks.append(Block(layer, tuple(active), factor.cpu(), rows, 0, 0.0, points=len(points)))
    return join_parts(blocks)


def read_rows(
    bound: BoundCandidates,
    name: str,
    part: slice,
    targets: Sequence[Params],
    *,
    columns: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The design, the targets without known penalties, and the mask of kinks, on one slice.

    The design has the columns of `bound.columns.active[name]`; it is empty without `columns`.
    Rows at kinks are in no equation; the mask is None where there are none. Where the equations are
    along a subspace, design and targets are projected on it (`bound.slices` has the whole tensor);
    with kinks of single entries beside it, no row is left.
    """
    flat = [to_float64(entries_of(target[name], part)) for target in targets]
    empty = torch.zeros(part.stop - part.start, 0, dtype=torch.float64)
    values = torch.stack(flat).mT if flat else empty
    for strength, known in bound.known if flat else ():
        if name in known.active:
            values = values - strength * known.rows(name, part).to(values)
    active = name in bound.columns.active
    design = bound.columns.rows(name, part) if active and columns else empty.to(values)
    if (space := bound.subspace(name)) is not None:
        design, values = space.project(design), space.project(values)
    if name in bound.weights:
        weight = bound.weight_of(name, part)
        design, values = design * weight.to(design), values * weight.to(values)
    return design, values, kinks_on(bound, name, part)


def read_block(
    bound: BoundCandidates, parts: Sequence[Part], active: Sequence[int], targets: Sequence[Params]
) -> tuple[Tensor, list[Tensor | int]]:
    """[design | targets] of slices, one below the other; how many rows of each have no equation.

    Rows without an equation, which are at kinks, are zero. Columns lie one after the other in
    memory.
    """
    functions = {bound.functions_on(name) for name, _ in parts}
    columns = [bound.columns.active.get(name, ()) for name, _ in parts]
    if len(functions) == len(set(columns)) == 1 and None not in functions:
        rows, left_out = read_entries(bound, parts, targets)
        return place_columns(rows, columns[0], active).mT, left_out
    matrices: list[Tensor] = []
    left_out = []
    for (name, part), columns_here in zip(parts, columns, strict=True):
        design, values, kinks = read_rows(bound, name, part, targets)
        rows = torch.cat([design.mT.to(values), values.mT])
        left_out.append(count_left_out(bound, name, kinks))
        if kinks is not None and not (kinks.is_cpu and not left_out[-1]):
            rows.masked_fill_(kinks.to(rows.device), 0.0)
        matrices.append(place_columns(rows, columns_here, active))
    device = matrices[0].device
    joined = matrices[0] if len(parts) == 1 else torch.cat([m.to(device) for m in matrices], dim=1)
    return joined.mT, left_out


def read_entries(
    bound: BoundCandidates, parts: Sequence[Part], targets: Sequence[Params]
) -> tuple[Tensor, list[Tensor | int]]:
    """As `read_block`, transposed, for tensors that `functions_on` has the same functions of.

    A hundred small tensors then take as many operations as a large one.
    """

    def joined(tensors: Params) -> Tensor:
        slices = [entries_of(tensors[name].detach(), part) for name, part in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    functions, entries = bound.functions_on(parts[0][0]) or (), joined(bound.params)
    theta, values = to_float64(entries), [to_float64(joined(target)) for target in targets]
    rows = torch.stack([*(f.derivative(theta) for f in functions), *values])
    masks = [mask for f in functions if (mask := f.kinks(entries)) is not None]
    if not masks:
        return rows, [0] * len(parts)
    kinks = torch.stack(masks).any(0).to(rows.device)
    rows.masked_fill_(kinks, 0.0)
    return rows, [k.sum() for k in kinks.split([part.stop - part.start for _, part in parts])]


def place_columns(rows: Tensor, columns: Sequence[int], active: Sequence[int]) -> Tensor:
    """Rows that are the columns of a tensor, then targets, among all columns of its layer."""
    if tuple(columns) == tuple(active):
        return rows
    placed = rows.new_zeros(len(active) + len(rows) - len(columns), rows.shape[1])
    placed[[active.index(column) for column in columns]] = rows[: len(columns)]
    placed[len(active) :] = rows[len(columns) :]
    return placed


def count_left_out(bound: BoundCandidates, name: str, kinks: Tensor | None) -> Tensor | int:
    """How many rows of a slice are in no equation; a tensor, so that the device need not wait."""
    space = bound.subspace(name)
    if kinks is not None and (space is None or kinks.all()):
        return kinks.sum()
    if space is None:
        return 0
    # Counts add up over processes, and the directions belong to the whole tensor.
    return bound.params[name].numel() - (0 if current_ranks().part else space.dimension)
