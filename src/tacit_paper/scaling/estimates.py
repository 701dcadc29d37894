"""Rows of the scaling figure: the cost of tacit beside that of plain gradient passes.

In every unit the computations alternate with the plain pass over the same batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tacit import (
    Fit,
    Objective,
    Regularizer,
    difference_equations,
    fit,
    l2,
    layerwise,
    score_examples,
    smooth_l1,
)
from tacit_paper import Row
from tacit_paper.scaling.config import Config, Size
from tacit_paper.scaling.measuring import Computation, Cost, measure_in_turn
from tacit_paper.scaling.naive import BETA, strength_columns
from tacit_paper.scaling.workload import Workload, fit_endpoint, open_workload

ELASTIC_NET = (l2(), smooth_l1(BETA))
"""The two candidates of an estimate."""
BETAS = (1e-3, 3e-2)
"""The least and the largest width of the candidates where their number varies."""


def size_rows(config: Config, size: Size, dtype: str, device: str) -> Iterator[Row]:
    """One row per precision of sums, for a model of this size and all batches.

    The first has more computations, whose time does not depend on the precision.
    """
    with open_workload(config, size, dtype, device, batches=config.batches) as workload:
        computations: dict[str, Computation] = {}
        fits: dict[str, Fit] = {}
        for sums in config.sums:
            part = workload.with_sums(sums)
            computations |= {
                f"estimate {sums}": _keep_fit(part, fits),
                f"few {sums}": part.first(config.few).estimate(ELASTIC_NET),
            }
        part = workload.with_sums(config.sums[0])
        computations |= {
            f"objective {part.sums}": part.making_an_objective(),
            f"gradient {part.sums}": part.gradient(),
            f"layerwise {part.sums}": part.estimate([layerwise(l2())]),
            "plain": workload.plain(),  # the last, so that its gradients remain
        }
        costs = _measure(computations, workload, replace(config, repeats=size.repeats), device)
        for sums in config.sums:
            row: Row = {"kind": "parameters", **workload.with_sums(sums).labels, "candidates": 2}
            row |= _cost_columns({"plain": costs["plain"]})
            names = ("objective", "gradient", "estimate", "layerwise", "few")
            row |= _cost_columns({n: costs[f"{n} {sums}"] for n in names if f"{n} {sums}" in costs})
            ratio = config.few / (config.batches - config.few)
            few, all_seconds = row["few_seconds"], row["estimate_seconds"]
            row["fixed_seconds"] = few - (all_seconds - few) * ratio
            row |= strength_columns(fits[sums].strengths, workload.model, config.batches)
            yield row


def largest_rows(config: Config, device: str) -> Iterator[Row]:
    """One row for the largest model, on few batches."""
    assert config.largest is not None
    few = replace(config, batches=config.largest_batches, few=1, sums=config.sums[-1:])
    for row in size_rows(few, config.largest, config.dtypes[-1], device):
        yield {**row, "kind": "largest"}


def batch_rows(config: Config, dtype: str, device: str) -> Iterator[Row]:
    """One row per number of batches, for one model."""
    most = max(config.batch_counts)
    with open_workload(config, _fixed_size(config), dtype, device, batches=most) as workload:
        for count in config.batch_counts:
            part = workload.first(count)
            computations = {
                "plain": part.plain(),
                "gradient": part.gradient(),
                "estimate": part.estimate(ELASTIC_NET),
            }
            costs = _measure(computations, part, config, device)
            yield {"kind": "batches", **part.labels, "candidates": 2, **_cost_columns(costs)}


def candidate_rows(config: Config, dtype: str, device: str) -> Iterator[Row]:
    """One row per number of candidates, for one model and all batches."""
    size = _fixed_size(config)
    with open_workload(config, size, dtype, device, batches=config.batches) as workload:
        computations = {"plain": workload.plain()}
        for count in config.candidate_counts:
            computations[f"estimate {count}"] = workload.estimate(candidates(count))
        costs = _measure(computations, workload, config, device)
        for count in config.candidate_counts:
            columns = _cost_columns(
                {"plain": costs["plain"], "estimate": costs[f"estimate {count}"]}
            )
            yield {"kind": "candidates", **workload.labels, "candidates": count, **columns}


def difference_rows(config: Config, dtype: str, device: str) -> Iterator[Row]:
    """One row: what dropout adds, over several masks, and the scores of all tokens."""
    size = _fixed_size(config)
    with open_workload(config, size, dtype, device, batches=config.batches) as workload:
        once = replace(config, repeats=1)
        # Twice, because the first computation with dropout also loads its kernels.
        for part in (workload.first(1), workload):
            computations = {
                "plain": part.plain(),
                "difference": _difference(part, config.draws),
                "score": _scores(part),
            }
            costs = _measure(computations, part, once, device)
        labels = {"kind": "difference", **workload.labels, "candidates": 2, "draws": config.draws}
        yield {**labels, **_cost_columns(costs)}


def _difference(workload: Workload, draws: int) -> Computation:
    """What dropout adds, from two objectives that have not seen the data."""

    def prepare() -> tuple[Objective, Objective]:
        plain = workload.new_objective()
        return workload.objective(training=True, draws=draws), plain

    return Computation(
        lambda both: fit(difference_equations(both[0], both[1], ELASTIC_NET)), prepare
    )


def _scores(workload: Workload) -> Computation:
    """The scores of all tokens, of an estimate that is there."""
    return Computation(score_examples, lambda: fit_endpoint(workload.new_objective(), ELASTIC_NET))


def candidates(count: int) -> Sequence[Regularizer]:
    """`l2`, then smoothed lassos of growing width."""
    low, high = BETAS
    steps = torch.linspace(0, 1, max(1, count - 1), dtype=torch.float64).tolist()
    betas = [low * (high / low) ** step for step in steps][: count - 1]
    return [l2(), *(smooth_l1(beta, name=f"smooth_l1({beta:.3g})") for beta in betas)]


def _fixed_size(config: Config) -> Size:
    return next(size for size in config.sizes if size.name == config.fixed)


def _keep_fit(workload: Workload, fits: dict[str, Fit]) -> Computation:
    """An estimate whose fit is put into a dictionary, by the precision of its sums."""

    def compute(objective: object) -> None:
        fits[workload.sums] = inner.compute(objective)

    inner = workload.estimate(ELASTIC_NET)
    return Computation(compute, inner.prepare)


def _measure(
    computations: Mapping[str, Computation], workload: Workload, config: Config, device: str
) -> dict[str, Cost]:
    """Costs after a first pass and estimate on one batch, for which torch loads its kernels."""
    warm_up = workload.first(1)
    for computation in (warm_up.plain(), warm_up.estimate(ELASTIC_NET)):
        computation.compute(computation.prepare())
    return measure_in_turn(computations, repeats=config.repeats, device=device)


def _cost_columns(costs: Mapping[str, Cost]) -> Row:
    """Columns of seconds and bytes, by the name of the computation."""
    seconds = {f"{name}_seconds": cost.seconds for name, cost in costs.items()}
    peaks = {f"{name}_bytes": cost.peak_bytes for name, cost in costs.items()}
    return seconds | {name: peak for name, peak in peaks.items() if peak is not None}
