"""Noise of columns that are means over independent groups of random probes.

With A the mean columns, D_g the deviations of group g of G from them, and N = Σ_g D_gᵀD_g/(G(G−1)),

    AᵀA − N = Σ_{g≠h} A_gᵀA_h / (G(G−1)):

only products of different groups are left, in which noise cancels on average. Without that, noise
in a column would make its strength too small (error in variables).

A strength is a ratio of such products, and the mean of a ratio is larger than the ratio of the
means. As Fuller (Measurement error models, 1987) does, a little less than N is subtracted.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tacit.errors import InputError

LESS = 0.5
"""N is multiplied by 1 − LESS/(points·(G−1)), so that strengths are right on average.

Chosen on three networks of 500 parameters, by 16 probes whose noise was 20 to 50 % of the column's
square: the means of strengths were 0.98 to 1.04 of the truth, and 1.01 to 1.19 with all of N.
"""
LEAST_SIGNAL = 0.1
"""Part of a noisy column's square that counts as signal at least; a Problem says so long before."""


class BlockWithNoise(Protocol):
    """What is needed here of a `Block`."""

    @property
    def columns(self) -> tuple[int, ...]:
        """Its columns."""
        ...

    @property
    def noisy(self) -> tuple[int, ...]:
        """Those that are means over groups."""
        ...

    @property
    def scatter(self) -> Tensor | None:
        """[A | targets | D]ᵀD, with D = [D_1 … D_G] on the noisy columns."""
        ...

    @property
    def source(self) -> int:
        """The source it is of."""
        ...

    @property
    def step(self) -> int:
        """The step it is of."""
        ...


class Scatter(NamedTuple):
    """How the groups' columns scatter around their mean, over all columns of some equations."""

    noisy: tuple[int, ...]
    """The noisy columns."""
    products: Tensor
    """[A | targets | D]ᵀD with D = [D_1 … D_G], each on the noisy columns."""
    points: int
    """The number of points, which have independent probes."""

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.products.shape[1] // len(self.noisy)

    @property
    def part(self) -> float:
        """The part of N that is subtracted."""
        return 1 - LESS / (self.points * (self.groups - 1))

    @property
    def noise(self) -> Tensor:
        """What is subtracted from the products of the noisy columns."""
        return self.part * noise_of(self.products, len(self.noisy))


class NoiseByBlock(NamedTuple):
    """What is subtracted from the products of the noisy columns, for every block."""

    noisy: tuple[int, ...]
    noises: Tensor
    """(blocks, noisy, noisy)."""


def noise_of(products: Tensor, noisy: int) -> Tensor:
    """N of the products [A | targets | D]ᵀD."""
    groups = products.shape[1] // noisy
    squares = products[-groups * noisy :].view(groups, noisy, groups, noisy)
    return squares.diagonal(dim1=0, dim2=2).sum(2) / (groups * (groups - 1))


def sum_scatter(blocks: Sequence[BlockWithNoise], count: int, targets: int) -> Scatter | None:
    """The scatter of several blocks over all columns; None where no column is noisy."""
    noisy = _noisy_columns(blocks)
    if not noisy:
        return None
    groups = max(_groups(block) for block in blocks)
    size = groups * len(noisy)
    total = torch.zeros(count + targets + size, size, dtype=torch.float64)
    for block in blocks:
        if block.scatter is not None:
            places = [noisy.index(column) for column in block.noisy]
            columns = torch.tensor([g * len(noisy) + i for g in range(groups) for i in places])
            rows = torch.tensor([*block.columns, *range(count, count + targets)])
            rows = torch.cat([rows, count + targets + columns])
            total[rows[:, None], columns] += block.scatter
    points = {(block.source, block.step) for block in blocks if block.noisy}
    return Scatter(noisy, total, len(points))


def noise_by_block(
    blocks: Sequence[BlockWithNoise], scatter: Scatter | None
) -> NoiseByBlock | None:
    """The noise of every block, in all of whose equations columns scatter like that."""
    if scatter is None:
        return None
    size = len(scatter.noisy)
    noises = torch.zeros(len(blocks), size, size, dtype=torch.float64)
    for index, block in enumerate(blocks):
        if block.scatter is not None:
            places = torch.tensor([scatter.noisy.index(column) for column in block.noisy])
            noise = noise_of(block.scatter, len(block.noisy))
            noises[index, places[:, None], places] = scatter.part * noise
    return NoiseByBlock(scatter.noisy, noises)


def select_scatter(
    block: BlockWithNoise, selected: Sequence[int]
) -> tuple[list[int], Tensor | None]:
    """The noisy ones of the selected columns, as places among these, and their scatter.

    Args:
        block: the block.
        selected: places of columns in the block.
    """
    chosen = [block.columns[place] for place in selected]
    kept = [i for i, column in enumerate(block.noisy) if column in chosen]
    if block.scatter is None or not kept:
        return [], None
    groups, noisy = _groups(block), len(block.noisy)
    start = len(block.scatter) - groups * noisy
    columns = [g * noisy + i for g in range(groups) for i in kept]
    rows = [*selected, *range(len(block.columns), start), *(start + column for column in columns)]
    scatter = block.scatter[rows][:, columns]
    return [chosen.index(block.noisy[i]) for i in kept], scatter


def check_scatter(block: BlockWithNoise, width: int, where: str) -> None:
    """Refuse a block whose scatter is none: a ValueError says what does not fit together."""
    scatter, count = block.scatter, len({*block.noisy})
    if scatter is None or not {*block.noisy} <= {*block.columns} or count != len(block.noisy):
        raise ValueError(f"{where} has noisy columns that are repeated or missing")
    shape, groups = tuple(scatter.shape), _groups(block)
    if len(shape) != 2 or groups < 2 or shape != (width + groups * count, groups * count):
        raise ValueError(f"{where} has {count} noisy columns and a scatter of {shape}")
    if not torch.isfinite(scatter).all() or (scatter[width:].diagonal() < 0).any():
        raise ValueError(f"{where} has a scatter that is not finite, or negative")


def check_groups(blocks: Iterable[BlockWithNoise]) -> None:
    """Refuse blocks of different numbers of groups."""
    groups = {_groups(block) for block in blocks if block.noisy}
    if len(groups) > 1:
        raise InputError(
            f"the columns of equations have {' and '.join(map(str, sorted(groups)))} groups of "
            "probes: write all of them with the same probes=, because noise is compared by group."
        )


def _groups(block: BlockWithNoise) -> int:
    """The number of groups of a block; 0 without noisy columns."""
    if block.scatter is None or not block.noisy or block.scatter.ndim != 2:
        return 0
    return block.scatter.shape[1] // len(block.noisy)


def _noisy_columns(blocks: Iterable[BlockWithNoise]) -> tuple[int, ...]:
    return tuple(sorted({column for block in blocks for column in block.noisy}))


def correct_factor(factor: Tensor, count: int, noisy: Sequence[int], noise: Tensor) -> Tensor:
    """A factor whose products are those of [design | targets] without the noise of columns.

    Columns without noise keep their full precision. With R of [exact | noisy | targets], noisy
    columns beside the exact ones have the part Z of R; ZᵀZ − N = Zᵀ(I − Z⁻ᵀNZ⁻¹)Z has the signal
    1 − ν in the eigenvectors of Z⁻ᵀNZ⁻¹ with eigenvalues ν. It is at least `LEAST_SIGNAL`, and no
    target gets a negative square.

    Args:
        factor: of [design | targets].
        count: the number of columns of the design.
        noisy: the noisy columns.
        noise: what is subtracted from their products.
    """
    exact = [column for column in range(count) if column not in noisy]
    width, start, end = factor.shape[1], len(exact), count
    order = [*exact, *noisy, *range(count, width)]
    R = torch.linalg.qr(factor[:, order], mode="r").R
    R = torch.cat([R, R.new_zeros(max(0, width - len(R)), width)])
    Z, targets = R[start:end, start:end], R[start:end, end:]
    parts, axes = noise_parts(Z, noise)
    signal = (1 - parts).clamp_min(LEAST_SIGNAL)
    along, rest = axes.T @ targets, R[end:, end:]
    square = rest.T @ rest - along.T @ ((1 / signal - 1)[:, None] * along)
    values, vectors = torch.linalg.eigh(square)
    corrected = R.clone()
    corrected[start:end, start:end] = signal.sqrt()[:, None] * (axes.T @ Z)
    corrected[start:end, end:] = along / signal.sqrt()[:, None]
    corrected[end:, end:] = values.clamp_min(0).sqrt()[:, None] * vectors.T
    places = torch.tensor(order).argsort()
    return corrected[:, places]


def noise_parts(Z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues ν of Z⁻ᵀNZ⁻¹, the parts of ‖Z·x‖² that are noise, and the eigenvectors."""
    norms = Z.norm(dim=0)
    scale = torch.where(norms > 0, norms, 1.0)  # a column that the others span has no part beside
    inverse = torch.linalg.pinv(Z / scale, rtol=1e-12)
    whitened = inverse.T @ (noise / scale / scale[:, None]) @ inverse
    values, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    return values.clamp_min(0), vectors


def noise_in_columns(factor: Tensor, count: int, scatter: Scatter) -> dict[int, float]:
    """For every noisy column, the part of its square beside the other columns that is noise.

    Args:
        factor: of [design | targets], with noise.
        count: the number of columns of the design.
        scatter: of these equations.
    """
    noise = noise_of(scatter.products, len(scatter.noisy))
    parts: dict[int, float] = {}
    for place, column in enumerate(scatter.noisy):
        others = [c for c in range(count) if c != column]
        scale = factor[:, others].norm(dim=0).clamp_min(torch.finfo(factor.dtype).tiny)
        design = factor[:, others] / scale
        weights = torch.linalg.pinv(design, rtol=1e-12) @ factor[:, column] / scale
        beside = factor[:, column] - factor[:, others] @ weights
        combination = torch.zeros(count, dtype=factor.dtype)
        combination[others], combination[column] = -weights, 1.0
        combination = combination[list(scatter.noisy)]
        square = float(beside.square().sum())
        noisy = float(combination @ noise @ combination)
        parts[column] = noisy / square if square > 0 else float(noise[place, place] > 0)
    return parts
