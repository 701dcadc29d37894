"""Estimates by several processes of this machine: their time, and the bytes that travel."""

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
from table import Row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from workload import WIDTHS, classification_data, elastic_net, mlp, seconds

import tacit

PROCESSES = (1, 2, 4)
HIDDEN = (256, 1024)
"""Units of the three hidden layers: 335 thousand and 2.9 million parameters."""
BATCH, BATCHES, REPEATS = 2048, 16, 3
"""Of every process, so that the work of each is the same however many there are."""
MAX_SLOWDOWN = 2.5
"""Of an estimate, over a gradient pass by torch's own hooks in as many processes."""
MAX_GROWTH = 0.01
"""Of what travels beside parameters and gradients, for a network of nine times the size."""


class Job(NamedTuple):
    """An estimate, and how often it is timed."""

    width: int
    batch: int
    batches: int
    repeats: int


Received = Callable[..., float]
"""received(others, *args): bytes that a process receives in a call of a function."""


def measure(*, quick: bool) -> list[Row]:
    """Weak scaling, and what travels in networks of two sizes."""
    batch, batches, repeats = (64, 2, 1) if quick else (BATCH, BATCHES, REPEATS)
    timed = Job(HIDDEN[0], batch, batches, repeats)
    untimed = [Job(HIDDEN[1], batch, batches, 0), Job(HIDDEN[1], batch, 2 * batches, 0)]
    rows: list[Row] = []
    alone, traffic = {}, []
    for count in PROCESSES[:2] if quick else PROCESSES:
        measured, *others = run(count, [timed, *(untimed if count == 2 else [])])
        alone = alone or measured
        rows += _scaling(count, measured, alone)
        if count == 2:
            large, longer = others
            traffic = _traffic(measured, large, longer, batches)
    return [*rows, *traffic]


def run(count: int, jobs: list[Job]) -> list[dict[str, float]]:
    """What the last of several processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (count, jobs, folder), nprocs=count)
        return json.loads((Path(folder) / "measured.json").read_text())


def _scaling(count: int, measured: dict[str, float], alone: dict[str, float]) -> list[Row]:
    took, plain = measured["estimate"], measured["pass"]
    against = f"estimate / gradient pass, {count} process" + ("es by fully_shard" * (count > 1))
    text = f"{took / plain:.2f}× ({took:.2f} s over {plain:.2f} s)"
    rows = [Row(against, text, took / plain, MAX_SLOWDOWN)]
    if count > 1:
        text = f"{took / alone['estimate']:.1f}× (the pass itself {plain / alone['pass']:.1f}×; "
        text += f"at best {max(1, count / _cores()):.2g}× on {_cores()} cores)"
        rows.append(Row("  with as much data for each / by one process", text))
    return rows


def _cores() -> int:
    available = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else os.cpu_count() or 1


def _traffic(
    small: dict[str, float], large: dict[str, float], longer: dict[str, float], batches: int
) -> list[Row]:
    """What one of two processes receives in an estimate."""
    rows = [
        Row(
            f"received by one of 2, {measured['parameters'] / 1e6:.2f} million parameters",
            f"{measured['gathered'] / 1e6:.0f} MB of parameters, {measured['summed'] / 1e6:.0f} MB "
            f"of gradients, {measured['numbers'] / 1e3:.2f} kB of numbers, "
            f"{measured['examples'] / 1e6:.2f} MB of examples",
        )
        for measured in (small, large)
    ]
    more = {kind: longer[kind] - large[kind] for kind in longer}
    half = 4 * large["parameters"] / 2  # of all parameters, the other process has half of the bytes
    text = f"{more['gathered'] / half / batches:.2f} gathers, "
    text += f"{more['summed'] / half / batches:.2f} sums, {more['numbers'] / batches:.0f} bytes"
    rows.append(Row("  by each further batch", text))
    growth = max(abs(large[kind] / small[kind] - 1) for kind in ("numbers", "examples"))
    size = large["parameters"] / small["parameters"]
    text = f"{growth:.2%} for {size:.1f} times the parameters"
    rows.append(Row("  growth of numbers and examples", text, growth, MAX_GROWTH))
    return rows


def _work(rank: int, count: int, jobs: list[Job], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    try:
        measured = [_measured(job, rank, count) for job in jobs]
        if rank == count - 1:
            (Path(folder) / "measured.json").write_text(json.dumps(measured))
    finally:
        distributed.destroy_process_group()


def _measured(job: Job, rank: int, count: int) -> dict[str, float]:
    model = mlp((WIDTHS[0], *3 * [job.width], WIDTHS[-1]))
    parameters = sum(p.numel() for p in model.parameters())
    data = classification_data(job.batch * job.batches, seed=rank)
    if count > 1:
        share(model, count)
    counts = counted(partial(estimate, model, data, job.batch))
    times = {
        name: min((_together(call) for _ in range(job.repeats)), default=0.0)
        for name, call in (
            ("estimate", partial(estimate, model, data, job.batch)),
            ("pass", partial(gradient_pass, model, data, job.batch)),
        )
    }
    return {"parameters": parameters, **counts, **times}


def share(model: nn.Module, count: int) -> None:
    """Give each process its rows of every parameter."""
    mesh = init_device_mesh("cpu", (count,))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def estimate(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> None:
    """Two strengths, from the beginning."""
    objective = tacit.Objective(model, F.cross_entropy, data, batch_size=batch)
    tacit.estimate(objective, elastic_net())


def gradient_pass(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> None:
    """The gradient of all batches, summed by torch."""
    model.zero_grad()
    for inputs, targets in zip(*(part.split(batch) for part in data), strict=True):
        F.cross_entropy(model(inputs), targets).backward()


def _together(function: Callable[[], None]) -> float:
    distributed.barrier()
    return seconds(function)


def counted(function: Callable[[], None]) -> dict[str, float]:
    """Call a function, and add up the bytes that this process receives, by what they are."""
    counts = dict.fromkeys((kind for kind, _ in FUNCTIONS.values()), 0.0)
    originals = {name: getattr(distributed, name, None) for name in FUNCTIONS}
    try:
        for name, original in originals.items():
            if original is not None:
                setattr(distributed, name, _counting(original, counts, *FUNCTIONS[name]))
        function()
    finally:
        for name, original in originals.items():
            if original is not None:
                setattr(distributed, name, original)
    return counts


def _counting(
    original: Callable[..., Any], counts: dict[str, float], kind: str, received: Received
) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        counts[kind] += received(distributed.get_world_size(kwargs.get("group")) - 1, *args)
        return result

    return call


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _objects(others: int, values: list[Any], *_: Any) -> float:
    return sum(len(pickle.dumps(value)) for value in values) * others / (others + 1)


FUNCTIONS: dict[str, tuple[str, Received]] = {
    "all_gather_single": ("gathered", lambda others, whole, part: others * _bytes(part)),
    "all_gather_into_tensor": ("gathered", lambda others, whole, part: others * _bytes(part)),
    "reduce_scatter_single": ("summed", lambda others, part, whole: others * _bytes(part)),
    "reduce_scatter_tensor": ("summed", lambda others, part, whole: others * _bytes(part)),
    "all_reduce": ("summed", lambda others, all: 2 * others / (others + 1) * _bytes(all)),
    "all_gather": ("numbers", lambda others, parts, part: others * _bytes(part)),
    "all_gather_object": ("numbers", _objects),
    "broadcast_object_list": ("examples", lambda others, values: len(pickle.dumps(values[0]))),
}
"""Functions of torch.distributed: what they move, and how many bytes a process receives."""
