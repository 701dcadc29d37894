"""Linear equations in the strengths, design · λ = target, stored as small triangular factors.

Signs and scale, once: ∇L + Σ λ_k ∇R_k = 0, L the mean over examples, R a sum over parameters.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.equations.blocks import Block, select_from_block
from tacit.equations.equations_files import equations_content, read_equations
from tacit.equations.factors import triangular_factor
from tacit.equations.files import EQUATIONS, read_file, write_file
from tacit.equations.noise import (
    Scatter,
    check_groups,
    correct_factor,
    sum_scatter,
)
from tacit.equations.sources import Family, Source
from tacit.errors import InputError, check_type
from tacit.plain import parse_json

if TYPE_CHECKING:
    from tacit.equations.target import Origin

SMALLEST = 1e-140
"""Columns below this are not fitted: the squares of such numbers are zero in float64."""


@dataclass(frozen=True, eq=False)
class Equations:
    """Equations design · λ = target from one or many points.

    Stored as blocks of a few dozen numbers each, whatever the parameter count: stacking, fits by
    layer and saving all work on those.
    """

    families: tuple[Family, ...]
    names: tuple[str, ...]
    targets: int
    """Number of target columns: one per independent group of draws."""
    blocks: tuple[Block, ...]
    sources: tuple[Source, ...]
    origin: "Origin | None" = None
    """What they were written from; None for layers, steps, stacks and equations from a file."""
    means: tuple[Block, ...] = ()
    """For epochs of a run: √m times the mean of [design | target] over every second of them, m in
    all, by layer. Products of different epochs, which have no noise on average, follow from it. Two
    in sequence share the weights between them, so that their displacements' noise is correlated."""

    alternatives: tuple[Block, ...] = ()
    """Where something is left to explain: the same equations with the columns of other families
    after the candidates', in one block for weights and one for biases; see `write_alternatives`."""
    other_families: tuple[str, ...] = ()
    """The names of those further columns."""

    def __getstate__(self) -> dict[str, Any]:
        """The state without the origin, because an objective may not be picklable."""
        return {**vars(self), "origin": None}

    @property
    def rows(self) -> int:
        """The number of equations."""
        return sum(block.rows for block in self.blocks)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have equations, in the model's order."""
        return tuple(dict.fromkeys(block.layer for block in self.blocks))

    @property
    def floor(self) -> float:
        """Norm of a target that would be only rounding."""
        return sum(block.floor**2 for block in self.blocks) ** 0.5

    def factor(self) -> Tensor:
        """The factor of [design | targets], at most as many rows as columns.

        Its products are those of the equations, without the noise of columns from random probes.
        """
        factor, scatter = self.noisy_factor(), self.scatter()
        if scatter is None:
            return factor
        return correct_factor(factor, len(self.names), scatter.noisy, scatter.noise)

    def scatter(self) -> Scatter | None:
        """How the groups of random columns scatter; None where no column is random."""
        return sum_scatter(self.blocks, len(self.names), self.targets)

    def noisy_factor(self) -> Tensor:
        """The triangular factor of [design | targets], with the noise of its columns."""
        width = len(self.names) + self.targets
        factors: dict[tuple[int, ...], list[Tensor]] = {}
        for block in self.blocks:
            factors.setdefault(block.columns, []).append(block.factor)
        rows = [_widen(columns, torch.cat(f), width) for columns, f in factors.items()]
        return triangular_factor(torch.cat([torch.zeros(0, width, dtype=torch.float64), *rows]))

    def layer_factors(self) -> Tensor:
        """The factor of every layer, filled up with rows of zeros: (layers, width, width)."""
        width, noisy = len(self.names) + self.targets, any(block.noisy for block in self.blocks)
        members: dict[str, list[Block]] = {}
        for block in self.blocks:
            members.setdefault(block.layer, []).append(block)
        factors = torch.zeros(len(members), width, width, dtype=torch.float64)
        for factor, blocks in zip(factors, members.values(), strict=True):
            if noisy:
                rows = replace(self, blocks=tuple(blocks)).factor()
            else:
                rows = torch.cat([_widen(b.columns, b.factor, width) for b in blocks])
                rows = rows if len(rows) <= width else triangular_factor(rows)
            factor[: len(rows)] = rows
        return factors

    def layer(self, label: str) -> "Equations":
        """The equations of one layer, without the columns that are zero there."""
        if label not in self.layers:
            raise InputError(f"no layer {label!r}: there are {', '.join(self.layers)}.")
        blocks = tuple(block for block in self.blocks if block.layer == label)
        # Weights between knots were counted over all layers.
        sources = tuple(replace(source, layer=label, counts={}) for source in self.sources)
        means = tuple(block for block in self.means if block.layer == label)
        equations = replace(self, blocks=blocks, sources=sources, origin=None, means=means)
        norms = equations.noisy_factor()[:, : len(self.names)].norm(dim=0)
        return equations.select_columns((norms > SMALLEST).nonzero()[:, 0].tolist())

    def steps(self, source: int = 0, *, size: int = 1) -> list["Equations"]:
        """The equations of every `size` successive steps of a trajectory, in order.

        An endpoint has one step. Steps that do not fill a piece are left out at the end.
        """
        blocks: dict[int, list[Block]] = {}
        for block in self.blocks:
            if block.source == source:
                piece, step = divmod(block.step, size)
                blocks.setdefault(piece, []).append(replace(block, source=0, step=step))
        whole = self.sources[source]
        part = replace(self, origin=None, means=(), alternatives=(), other_families=())
        return [
            replace(part, blocks=tuple(blocks[piece]), sources=(_piece(whole, piece, size),))
            for piece in sorted(blocks)
            if (piece + 1) * size <= whole.steps
        ]

    def select_columns(self, columns: Sequence[int]) -> "Equations":
        """The same equations with only these columns, in this order."""
        position = {column: i for i, column in enumerate(columns)}
        return replace(
            self,
            families=tuple(_select_families(self.families, position)),
            names=tuple(self.names[column] for column in columns),
            blocks=tuple(select_from_block(block, position) for block in self.blocks),
            origin=None,
            means=tuple(select_from_block(block, position) for block in self.means),
            alternatives=(),
            other_families=(),
        )

    def bounded(self, *, nonnegative: bool = False) -> Tensor:
        """Which strengths are fitted under λ ≥ 0: all, or those that a convex shape needs."""
        if nonnegative:
            return torch.ones(len(self.names), dtype=torch.bool)
        marks = [m for f in self.families for m in (f.bounded or (False,) * f.size)]
        return torch.tensor(marks, dtype=torch.bool)

    def matrices(self, strengths: Sequence[float]) -> Iterator[tuple[str, Sequence[float]]]:
        """Kind and coefficients of every diagonal or symmetric family among the strengths."""
        start = 0
        for family in self.families:
            if family.kind in ("diagonal", "symmetric"):
                yield family.kind, strengths[start : start + family.size]
            start += family.size

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the equations (safetensors): they are the costly part, and refitting is free."""
        write_file(path, *equations_content(self), EQUATIONS)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Equations":
        """Read equations that `save` wrote; a file that is damaged or made up is refused."""
        try:
            return Equations(**vars(read_equations(*read_file(path, EQUATIONS))))
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {error}. Write the equations again.") from error

    def state_dict(self) -> dict[str, Any]:
        """What `save` writes, as a text and tensors that fit into a checkpoint."""
        header, tensors = equations_content(self)
        return {"format": EQUATIONS, "head": json.dumps(header), "tensors": tensors}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> "Equations":
        """The equations of a `state_dict`."""
        try:
            if state["format"] != EQUATIONS:
                raise ValueError(f"its format is {state['format']!r}, not {EQUATIONS!r}")
            header, tensors = parse_json(state["head"]), [t.cpu() for t in state["tensors"]]
            return Equations(**vars(read_equations(header, tensors)))
        except (ValueError, RecursionError) as error:
            raise InputError(f"the state of equations is damaged: {error}.") from error


def _piece(source: Source, piece: int, size: int) -> Source:
    """The source of every so many successive steps of a trajectory."""
    sizes = source.step_sizes[piece * size : (piece + 1) * size]
    return replace(source, steps=size, step_sizes=sizes)


def stack(equations: Iterable[Equations]) -> Equations:
    """Many endpoints, replicates or steps as one system with one shared λ."""
    example = "a list of equations, as in tacit.stack([first, second])"
    check_type("what stack was given", equations, Iterable, example)
    parts = list(equations)
    if not parts:
        raise InputError("stack was given no equations: pass at least one.")
    for part in parts:
        check_type("a part of a stack", part, Equations, "what endpoint_equations returns")
    first = parts[0]
    blocks: list[Block] = []
    means: list[Block] = []
    sources: list[Source] = []
    for part in parts:
        _check_knots(part, first)
        if (part.names, part.targets) != (first.names, first.targets):
            raise InputError(
                f"equations in {part.names} with {part.targets} target columns do not stack on "
                f"{first.names} with {first.targets}: use the same regularizers and groups."
            )
        for family, other in zip(part.families, first.families, strict=False):
            if family != other:
                raise InputError(
                    f"{family.describe()} does not stack on {other.describe()}: one strength "
                    "cannot belong to both. Give them different names, and fit each of its own."
                )
        blocks += [replace(block, source=block.source + len(sources)) for block in part.blocks]
        means += [replace(block, source=block.source + len(sources)) for block in part.means]
        sources += part.sources
    check_groups(blocks)
    others, alternatives = _stack_alternatives(parts)
    return replace(
        first,
        blocks=tuple(blocks),
        sources=tuple(sources),
        origin=first.origin if len(parts) == 1 else None,
        means=tuple(means),
        alternatives=alternatives,
        other_families=others,
    )


def _check_knots(part: Equations, first: Equations) -> None:
    """Refuse shapes with other knots, whose strengths belong to other places."""
    for family, other in zip(part.families, first.families, strict=False):
        if family.name == other.name and family.shape != other.shape:
            raise InputError(
                f"{family.describe()} does not stack on {other.describe()}: strengths belong to "
                "knots. Write all equations with the same spline object, or pass the same knots, "
                "as in spline(knots=fit.curve('spline').knots)."
            )


def _stack_alternatives(
    parts: Sequence[Equations],
) -> tuple[tuple[str, ...], tuple[Block, ...]]:
    """The other families that all parts have which have any, and their equations."""
    families = [part.other_families for part in parts if part.other_families] or [()]
    others = [n for n in families[0] if all(n in names for names in families)]
    blocks, sources = [], 0
    for part in parts if others else ():
        names = (*part.names, *part.other_families)
        wanted = (*part.names, *others)
        for block in part.alternatives:
            if names != wanted:
                block = select_from_block(block, {names.index(n): i for i, n in enumerate(wanted)})
            blocks.append(replace(block, source=block.source + sources))
        sources += len(part.sources)
    return tuple(others), tuple(blocks)


def _widen(columns: tuple[int, ...], factor: Tensor, width: int) -> Tensor:
    """[design | targets] of these columns with one column per strength, zero for the others."""
    targets = factor.shape[1] - len(columns)
    wide = torch.zeros(len(factor), width, dtype=torch.float64)
    wide[:, [*columns, *range(width - targets, width)]] = factor
    return wide


def _select_families(families: tuple[Family, ...], position: dict[int, int]) -> Iterable[Family]:
    start = 0
    for family in families:
        size = sum(column in position for column in range(start, start + family.size))
        if size:
            bounded = [m for i, m in enumerate(family.bounded) if start + i in position]
            family_part = replace(family, size=size, bounded=tuple(bounded))
            if size < family.size:  # a part of a matrix or of a curve is none
                kind = "" if family.kind in ("diagonal", "symmetric") else family.kind
                family_part = replace(family_part, kind=kind, shape=None)
            yield family_part
        start += family.size
