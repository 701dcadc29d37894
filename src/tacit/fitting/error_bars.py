"""Error bars that name their source of randomness, and those that equations determine.

Equations determine error bars from how their parts disagree: groups of draws, sources (endpoints,
trajectories, epochs), steps and layers. Those that need the objective are in `tacit.uncertainty`.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.equations.factors import running_factors, triangular_factor
from tacit.equations.noise import NoiseByBlock
from tacit.errors import InputError
from tacit.fitting.column_noise import (
    PartNoise,
    block_noise,
    noise_by_label,
    probe_deviations,
)
from tacit.fitting.drift import MIN_STEPS
from tacit.fitting.solving import RANK, System

Label = TypeVar("Label", bound=Hashable)
ErrorKind = Literal["sampling", "draws", "probes", "training", "steps", "layers"]
KINDS: dict[str, str] = {
    "sampling": "the choice of examples",
    "draws": "the random draws",
    "probes": "the random probes of columns",
    "training": "the noise of training",
    "steps": "the choice of steps",
    "layers": "the choice of layers",
}
"""The sources of randomness, the most informative first."""

SHARED = 0.92
"""Variance that the epochs of a run have in common, relative to the variance of one epoch.

Chosen on elastic nets with seeds 100 to 139 and 5000 to 5499; `tacit reproduce training-coverage`
checks it on other seeds.
"""
EPOCH_COVERAGE = "86 to 100 % of the time, depending on the strength"
"""How often 95 % intervals from epochs covered the truth on those other seeds."""
STEP_COVERAGE = "93 to 97 % of the time, but 85 to 91 % where steps were strongly correlated"
"""How often 95 % intervals from steps covered the truth, in simulations of 8 to 200 steps.

The first range is for autocorrelations of up to 0.5, the second for 0.8.
"""


@dataclass(frozen=True, eq=False)
class ErrorBars:
    """The covariance of the strengths under one source of randomness.

    A standard error answers "how different could this estimate have been?", and the answer depends
    on what is regarded as random: examples, draws, training noise, steps or layers. Each has its
    own standard error, and none contains another.
    """

    kind: ErrorKind
    basis: str
    """What they were computed from, in words: `8 groups of draws`."""
    names: tuple[str, ...]
    covariance: Tensor = field(repr=False)
    """In float64; infinite on the diagonal for undetermined strengths."""
    freedom: float = math.inf
    """Degrees of freedom of the t distribution for intervals; infinite for the normal."""
    freedoms: tuple[float, ...] = field(default=(), repr=False)
    """Degrees of freedom of every strength, if they differ; `freedom` is then the smallest."""
    measured: str = ""
    """How often 95 % intervals like these covered the truth in tests, if less than 90 %."""
    explains_residual: bool = False
    """Whether what a fit leaves unexplained is no more than this noise, by a test at 1 %."""

    def __post_init__(self):
        count = len(self.names)
        if len(self.freedoms) not in (0, count):
            raise InputError(f"{len(self.freedoms)} degrees of freedom for {count} strengths.")
        if self.kind not in KINDS or self.covariance.shape != (count, count):
            raise InputError(
                f"error bars of kind {self.kind!r} with a covariance of shape "
                f"{tuple(self.covariance.shape)} for {count} strengths: pass one of "
                f"{', '.join(KINDS)} and one row and column per strength."
            )

    @property
    def standard_errors(self) -> dict[str, float]:
        """Standard errors by name; infinite for undetermined strengths."""
        return dict(zip(self.names, self.covariance.diagonal().sqrt().tolist(), strict=True))

    def intervals(
        self, strengths: Mapping[str, float], level: float = 0.95
    ) -> dict[str, tuple[float, float]]:
        """Two-sided intervals around the strengths."""
        freedoms = self.freedoms or (self.freedom,) * len(self.names)
        intervals = {}
        for (name, error), freedom in zip(self.standard_errors.items(), freedoms, strict=True):
            half_width = self.quantile(level, freedom) * error
            intervals[name] = strengths[name] - half_width, strengths[name] + half_width
        return intervals

    def widened(self, names: tuple[str, ...], free: Tensor) -> "ErrorBars":
        """The same error bars among all strengths, NaN for those that were not free."""
        covariance = torch.full((len(names), len(names)), math.nan, dtype=torch.float64)
        covariance[free[:, None], free] = self.covariance
        freedoms = [self.freedom] * len(names)
        for index, freedom in zip(free.tolist(), self.freedoms, strict=False):
            freedoms[index] = freedom
        return replace(self, names=names, covariance=covariance, freedoms=tuple(freedoms))

    def quantile(self, level: float = 0.95, freedom: float | None = None) -> float:
        """Half the width of an interval of this level, in units of the standard error."""
        from scipy.special import ndtri, stdtrit

        if isinstance(level, bool) or not isinstance(level, float) or not 0 < level < 1:
            raise InputError(f"level is {level!r}: pass a number between 0 and 1, such as 0.95.")
        freedom, upper = self.freedom if freedom is None else freedom, (1 + level) / 2
        return float(ndtri(upper) if math.isinf(freedom) else stdtrit(freedom, upper))


def mark_undetermined(covariance: Tensor, inflation: Tensor) -> Tensor:
    """The covariance with infinite variances for strengths whose inflation is infinite."""
    undetermined = torch.isinf(inflation)
    covariance = covariance.clone()
    covariance[undetermined, :] = 0
    covariance[:, undetermined] = 0
    covariance[undetermined, undetermined] = math.inf
    return covariance


def error_bars_from(
    equations: Equations, strengths: Tensor, *, nonnegative: bool = False
) -> dict[str, ErrorBars]:
    """All error bars that the equations determine, by kind, the most informative first.

    Under λ ≥ 0 they are those of the strengths above zero, as if the others had not been
    candidates. A strength at the bound has a NaN variance: no covariance describes it there.

    Args:
        equations: what was fitted.
        strengths: the fitted strengths, in float64.
        nonnegative: whether they were fitted under λ ≥ 0.
    """
    at_zero = equations.bounded(nonnegative=nonnegative) & (strengths <= 0)
    if at_zero.any():
        free = torch.nonzero(~at_zero)[:, 0]
        if not len(free):
            return {}
        by_kind = error_bars_from(equations.select_columns(free.tolist()), strengths[free])
        return {kind: bars.widened(equations.names, free) for kind, bars in by_kind.items()}
    if not any(block.rows and block.columns for block in equations.blocks):
        return {}
    bars = (
        draw_errors(equations),
        probe_errors(equations, strengths),
        source_errors(equations),
        step_errors(equations, strengths),
        layer_errors(equations),
    )
    by_kind = {error_bars.kind: error_bars for error_bars in bars if error_bars is not None}
    return {kind: by_kind[kind] for kind in KINDS if kind in by_kind}


def draw_errors(equations: Equations) -> ErrorBars | None:
    """Error bars from G ≥ 2 groups of draws: each target column g has its own strengths λ̂_g.

    The strengths of the mean target are the mean of the λ̂_g, hence

        covariance = Σ_g (λ̂_g − λ̂)(λ̂_g − λ̂)ᵀ / (G(G−1)),

    with G−1 degrees of freedom. Draws within a group may depend on each other (mirrored pairs),
    and groups may have unequal noise.
    """
    groups, count = equations.targets, len(equations.names)
    if groups < 2:
        return None
    factor = equations.factor()
    system = System(factor[:, :count])
    strengths = system.solve(factor[:, count:])
    deviations = strengths - strengths.mean(1, keepdim=True)
    covariance = deviations @ deviations.T / (groups * (groups - 1))
    covariance = mark_undetermined(covariance, system.inflation)
    basis = f"{groups} groups of draws"
    return ErrorBars("draws", basis, equations.names, covariance, groups - 1.0)


def probe_errors(equations: Equations, strengths: Tensor) -> ErrorBars | None:
    """Error bars from the G groups of probes of random columns, such as those of `hessian_trace`.

    Group g moves the strengths by z_g/G (see `probe_deviations`), hence

        covariance = Σ_g z_g z_gᵀ / (G(G−1)),

    with G−1 degrees of freedom. On networks of 500 parameters and 8 to 32 probes, nominal 95 %
    intervals covered the strengths of exact columns 94 to 99 % of the time.
    """
    scatter = equations.scatter()
    if scatter is None:
        return None
    groups, system = scatter.groups, System(equations.factor()[:, : len(equations.names)])
    moved = probe_deviations(equations, scatter, strengths)
    covariance = mark_undetermined(moved.T @ moved / (groups * (groups - 1)), system.inflation)
    basis = f"{groups} groups of probes"
    return ErrorBars("probes", basis, equations.names, covariance, groups - 1.0)


def layer_errors(equations: Equations) -> ErrorBars | None:
    """Error bars from leaving out one layer at a time, at all points at once.

    They measure whether layers agree on one strength. A strength that only one layer determines
    has an infinite variance.
    """
    labels = [block.layer for block in equations.blocks]
    parts, noise = _stacked_factors(equations, labels), noise_by_label(equations, labels)
    basis = f"{len(parts)} layers"
    return jackknife(parts, equations.names, kind="layers", basis=basis, noise=noise)


def source_errors(equations: Equations) -> ErrorBars | None:
    """Error bars from leaving out one stacked endpoint (or trajectory, or epoch) at a time.

    Sources are assumed to be independent. Epochs of one run are not quite: an example influences
    the weights only after it was seen, so that all epochs are shifted in the same direction, by an
    amount of the order of the step size. `SHARED` allows for this shift: however many epochs there
    are, the variance is at least that part of one epoch's. Windows with a sample of examples each
    disagree by their samples, which is larger by far: error bars of "sampling".
    """
    labels = [block.source for block in equations.blocks]
    parts, noise = _stacked_factors(equations, labels), noise_by_label(equations, labels)
    if all(source.sampled for source in equations.sources):
        basis = f"{len(parts)} parts of training, each with a sample of its own"
        return jackknife(parts, equations.names, kind="sampling", basis=basis, noise=noise)
    modes = {"epoch" if source.epoch else source.mode for source in equations.sources}
    mode = modes.pop() if len(modes) == 1 else ""
    plurals = {"endpoint": "endpoints", "trajectory": "trajectories", "epoch": "epochs"}
    basis = f"{len(parts)} {plurals.get(mode, 'points')}"
    bars = jackknife(parts, equations.names, kind="training", basis=basis, noise=noise)
    if bars is None or not any(source.epoch for source in equations.sources):
        return bars
    covariance = bars.covariance * (1 + SHARED * len(parts))
    basis += ", with an allowance for their common shift"
    return replace(bars, basis=basis, covariance=covariance, measured=EPOCH_COVERAGE)


def jackknife(
    parts: Tensor,
    names: Sequence[str],
    *,
    kind: ErrorKind,
    basis: str,
    noise: PartNoise | None = None,
) -> ErrorBars | None:
    """Error bars from independent clusters of equations, by the cluster jackknife (CV3).

    With λ₍₋g₎ the strengths without cluster g of G,

        covariance = (G−1)/G · Σ_g (λ₍₋g₎ − λ̂)(λ₍₋g₎ − λ̂)ᵀ,

    with a t distribution for every strength. Nothing is assumed about the rows inside a cluster. A
    strength that only one cluster determines has an infinite variance; the others are unaffected.

    For unequal clusters G−1 degrees of freedom are too many. Satterthwaite's are used (Bell &
    McCaffrey 2002): with p_g the cluster's share of the strength's squared column (after projecting
    out the other columns) and d_g = p_g/(1−p_g),

        (Σ d)² / (Σ d² + (Σ d²)² − Σ d⁴),

    which is G−1 for equal clusters, and 1 if two clusters hold everything. In simulations of 2 to
    30 clusters, from equal to one with 20 times the weight of the others, nominal 95 % intervals
    covered 95–100 %, against 79–97 % with G−1 degrees of freedom. They are wide if one cluster
    dominates.

    Args:
        parts: a factor [design | target] for each cluster, (clusters, rows, columns).
        names: names of the strengths.
        kind: what the clusters are.
        basis: the same in words.
        noise: of columns from random probes, in each cluster.
    """
    if len(parts) < 2:
        return None
    shared = (parts[:, :, :-1] != 0).any(1).sum(0) > 1
    if not shared.any():  # a family with one coefficient per layer or per parameter
        infinite = torch.full((len(names),), math.inf, dtype=torch.float64)
        covariance = mark_undetermined(parts.new_zeros(len(names), len(names)), infinite)
        return ErrorBars(kind, basis, tuple(names), covariance, 1.0)
    whole, count = triangular_factor(parts.flatten(0, 1)), len(parts)
    without_one = _factors_without_one(parts)
    if noise is not None:
        whole = noise.whole.correct(whole[None])[0]
        without_one = noise.without_one.correct(without_one)
    strengths_without, undetermined = _solve_each(without_one)
    deviations = strengths_without - _solve_each(whole[None])[0]
    undetermined = undetermined.any(0)
    covariance = (count - 1) / count * deviations.T @ deviations
    covariance = mark_undetermined(covariance, torch.where(undetermined, math.inf, 1.0))
    shares = _shares_in_strengths(parts, System(whole[:, :-1]))
    freedoms = satterthwaite(shares).clamp(1.0, count - 1.0)
    smallest = float(freedoms[~undetermined].min()) if (~undetermined).any() else 1.0
    return ErrorBars(kind, basis, tuple(names), covariance, smallest, tuple(freedoms.tolist()))


def padded_factors(equations: Equations) -> Tensor:
    """[design | mean target] of every block over all columns, padded with rows of zeros."""
    count = len(equations.names)
    height = max(len(block.factor) for block in equations.blocks)
    padded = torch.zeros(len(equations.blocks), height, count + 1, dtype=torch.float64)
    same_shape: dict[tuple, list[int]] = {}
    for index, block in enumerate(equations.blocks):
        same_shape.setdefault((block.columns, len(block.factor)), []).append(index)
    for (columns, rows), indices in same_shape.items():
        factors = torch.stack([equations.blocks[index].factor for index in indices])
        width = len(columns)
        widened = torch.zeros(len(indices), rows, count + 1, dtype=torch.float64)
        widened[:, :, list(columns)] = factors[:, :, :width]
        widened[:, :, count] = factors[:, :, width:].mean(2)
        padded[indices, :rows] = widened
    return padded


def factors_by_label(equations: Equations, labels: Sequence[Label]) -> dict[Label, Tensor]:
    """One factor [design | mean target] per label, of all its blocks; none without equations."""
    indices: dict[Label, list[int]] = {}
    for index, (label, block) in enumerate(zip(labels, equations.blocks, strict=True)):
        if block.rows and block.columns:
            indices.setdefault(label, []).append(index)
    padded = padded_factors(equations)
    empty, most = len(padded), max(map(len, indices.values()))
    padded = torch.cat([padded, torch.zeros_like(padded[:1])])
    blocks = torch.tensor([[*i, *[empty] * (most - len(i))] for i in indices.values()])
    factors = torch.linalg.qr(padded[blocks].flatten(1, 2), mode="r").R
    return dict(zip(indices, factors, strict=True))


def _stacked_factors(equations: Equations, labels: Sequence[Hashable]) -> Tensor:
    return torch.stack(list(factors_by_label(equations, labels).values()))


def _factors_without_one(parts: Tensor) -> Tensor:
    """For each cluster the factor of all others, from running factors of both ends: O(clusters)."""
    width = parts.shape[2]
    before, after = (running_factors(list(ordered)) for ordered in (parts, parts.flip(0)))
    both = torch.zeros(len(parts), 2 * width, width, dtype=torch.float64)
    for index, (above, below) in enumerate(zip(before, reversed(after), strict=True)):
        both[index, : len(above)] = above
        both[index, width : width + len(below)] = below
    return torch.linalg.qr(both, mode="r").R


def _solve_each(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Strengths of each factor [design | target], and which of them it does not determine.

    The same rank decision as in `System`, for many systems at once.
    """
    design, target = factors[:, :, :-1], factors[:, :, -1:]
    norms = design.norm(dim=1)
    scale = torch.where(norms > 0, norms, 1.0)
    u, s, vh = torch.linalg.svd(design / scale[:, None], full_matrices=False)
    above = s > RANK * s[:, :1]
    projected = (u.mT @ target)[:, :, 0] * torch.where(above, 1 / s, 0.0)
    strengths = (vh.mT @ projected[:, :, None])[:, :, 0] / scale
    # A strength is determined if its axis lies in the span of the singular vectors above the rank.
    inside = (vh.square() * above[:, :, None]).sum(1)
    return strengths, (1 - inside).clamp(min=0).sqrt() > 1e-6


def strengths_by_step(equations: Equations, source: int) -> Tensor | None:
    """The strengths of every single step; None if a step does not determine them."""
    blocks = sorted((b for b in equations.blocks if b.source == source), key=lambda b: b.step)
    if not any(block.rows and block.columns for block in blocks):
        return None
    part, labels = replace(equations, blocks=tuple(blocks)), [block.step for block in blocks]
    factors, noise = _stacked_factors(part, labels), noise_by_label(part, labels)
    factors = factors if noise is None else noise.correct(factors)
    strengths, undetermined = _solve_each(factors)
    every_step = len(factors) == len({block.step for block in blocks})
    return strengths if every_step and not undetermined.any() else None


def _shares_in_strengths(parts: Tensor, system: System) -> Tensor:
    """The clusters' shares in what determines each strength."""
    inverse = torch.linalg.pinv(system.unit, rtol=RANK)
    projected = (inverse @ inverse.T) / system.norms[system.nonzero, None]
    shares = torch.ones(len(parts), len(system.norms), dtype=torch.float64)
    shares[:, system.nonzero] = (parts[:, :, system.nonzero] @ projected).square().sum(1)
    return shares / shares.sum(0)


def satterthwaite(shares: Tensor) -> Tensor:
    """Satterthwaite's degrees of freedom from the clusters' shares, which sum to 1 by column."""
    odds = shares / (1 - shares).clamp(min=1e-12)
    second = odds.square().sum(0)
    return odds.sum(0).square() / (second + second.square() - odds.pow(4).sum(0))


def step_errors(equations: Equations, strengths: Tensor) -> ErrorBars | None:
    """Error bars of a trajectory, robust to heteroskedastic and autocorrelated steps (HAC).

    Derivation. Step t moves the strengths by ψ_t = (ΦᵀΦ)⁻¹ Φ_tᵀ(b_t − Φ_t λ̂), and Σ_t ψ_t = 0 at λ̂,
    so the variance of λ̂ is the long-run variance of ψ times T. A cosine sum
    c_j = Σ_t ψ_t √2 cos(π j (t − ½)/T) has, for small j, that same variance: slow cosines see the
    noise at frequency zero, and different j are nearly independent. Hence the mean of B of them,

        covariance = T/(T−k) · 1/B Σ_j c_j c_jᵀ,

    with a t distribution of B = 0.4·T^⅔ degrees of freedom (Müller 2007; Lazarus, Lewis, Stock &
    Watson 2018). Cosines with j ≥ 1 sum to zero, so a trajectory's own mean drops out, and the
    covariances of several trajectories add up.

    Nominal 95 % intervals covered 94 % of the time in simulations of 50 and of 200 independent
    steps, 93 and 94 % with AR(1) noise of coefficient 0.5, 87 and 91 % at 0.8 (the Bartlett kernel
    of width 1.3 √T with its critical values: 92, 94, 82 and 90 %).

    Trap: a drift over the whole trajectory is half a wave, which no cosine sum averages: intervals
    are then too short. The fit carries the Problem `drifting`.
    """
    count = len(equations.names)
    keys = [(block.source, block.step) for block in equations.blocks]
    step_index = {key: i for i, key in enumerate(sorted(set(keys)))}
    steps_of = Counter(source for source, _ in step_index)
    lengths, memories = list(steps_of.values()), [equations.sources[i].memory for i in steps_of]
    total = len(step_index)
    if min(lengths, default=0) < MIN_STEPS or total <= count:
        return None
    factors = padded_factors(equations)
    system, noise = System(equations.factor()[:, :count]), block_noise(equations)
    influences = torch.zeros(total, count, dtype=torch.float64)
    step_of_block = torch.tensor([step_index[key] for key in keys])
    influences.index_add_(0, step_of_block, _block_influences(factors, strengths, system, noise))
    parts = zip(influences.split(lengths), memories, strict=True)
    variances = [_long_run_variance(part, memory) for part, memory in parts]
    covariance, freedoms = _sum_of_variances(variances)
    covariance = mark_undetermined(total / (total - count) * covariance, system.inflation)
    determined = freedoms[torch.isfinite(system.inflation)].tolist()
    basis = f"{total} steps" + (f" of {len(lengths)} trajectories" if len(lengths) > 1 else "")
    return ErrorBars(
        "steps",
        basis,
        equations.names,
        covariance,
        min(determined, default=1.0),
        tuple(freedoms.tolist()),
        measured=STEP_COVERAGE,
    )


def _block_influences(
    factors: Tensor, strengths: Tensor, system: System, noise: NoiseByBlock | None = None
) -> Tensor:
    """How far each block moves the strengths, one row per block."""
    design, columns = factors[:, :, :-1], system.nonzero
    residual = factors[:, :, -1:] - design @ strengths[:, None]
    products = (design.mT @ residual)[:, :, 0]
    if noise is not None:
        products[:, list(noise.noisy)] += noise.noises @ strengths[list(noise.noisy)]
    scores = products[:, columns] / system.norms[columns]
    inverse = torch.linalg.pinv(system.unit, rtol=RANK)
    influences = torch.zeros(len(factors), len(strengths), dtype=torch.float64)
    influences[:, columns] = scores @ (inverse @ inverse.T) / system.norms[columns]
    return influences


def _long_run_variance(influences: Tensor, memory: float = 0.0) -> tuple[Tensor, int]:
    """The variance of a sum of dependent steps, and the number of cosines it is a mean over.

    Noise that is known to be correlated over `memory` steps is seen only by cosines that are slower
    than that, of frequency π j/T below 1/(2·memory).
    """
    count = len(influences)
    cosines = round(0.4 * count ** (2 / 3))
    if memory:
        cosines = min(cosines, round(count / (2 * math.pi * memory)))
    cosines = max(2, cosines)
    times = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    frequencies = torch.arange(1, cosines + 1, dtype=torch.float64)
    sums = math.sqrt(2) * torch.cos(frequencies[:, None] * times) @ influences
    return sums.T @ sums / cosines, cosines


def _sum_of_variances(parts: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """The sum of independent covariances, and its degrees of freedom after Welch."""
    variances = torch.stack([part.diagonal() for part, _ in parts])
    cosines = torch.tensor([[float(count)] for _, count in parts], dtype=torch.float64)
    return torch.stack([part for part, _ in parts]).sum(0), welch_freedoms(variances, cosines)


def welch_freedoms(variances: Tensor, freedoms: Tensor) -> Tensor:
    """Degrees of freedom of sums of independent variances, one row per part, after Welch.

    (Σ v)² / Σ v²/f, at least 1 and at most Σ f.
    """
    most = freedoms.sum(0)
    sums = variances.sum(0).square() / (variances.square() / freedoms).sum(0)
    # 0/0 where all variances are exactly zero.
    return torch.where(sums.isnan(), most, sums).clamp(min=1.0).minimum(most)
