"""Estimates by several processes of this machine: their time, and the bytes that travel."""

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from table import Row
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from workload import WIDTHS, classification_data, elastic_net, mlp, seconds

import tacit

PROCESSES = (1, 2, 4)
HIDDEN = (256, 1024)
"""Units of the three hidden layers: 335 thousand and 2.9 million parameters."""
BATCH, BATCHES, REPEATS = 512, 24, 5
"""Of every process, so that the work of each is the same however many there are."""
MAX_SLOWDOWN = 2.0
"""Over the time that as many processes need on these cores if nothing else takes time."""
MAX_GROWTH = 0.01
"""Of what travels beside parameters and gradients, for a network of nine times the size."""
MODEL = {
    "gathered": ("all_gather_single", "all_gather_into_tensor"),
    "summed": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""Functions of torch.distributed by what they move: parameters, and gradients."""


def measure(*, quick: bool) -> list[Row]:
    """Weak scaling, and what travels in networks of two sizes."""
    batches = 2 if quick else BATCHES
    rows, alone = [], 0.0
    for count in PROCESSES[:2] if quick else PROCESSES:
        took = run(count, HIDDEN[0], batches)["seconds"]
        alone = alone or took
        rows.append(_scaling(count, took, alone))
    small, large = (run(2, width, batches) for width in HIDDEN)
    return [*rows, *_traffic(small, large, batches)]


def run(count: int, width: int, batches: int) -> dict[str, float]:
    """What the first of several processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_work, (count, width, batches, folder), nprocs=count)
        return json.loads((Path(folder) / "measured.json").read_text())


def _scaling(count: int, took: float, alone: float) -> Row:
    if count == 1:
        return Row("an estimate by one process", f"{took:.2f} s")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ideal = max(1.0, count / (cores or 1))
    return Row(
        f"  by {count} processes with as much data each / by one",
        f"{took / alone:.2f}× (at best {ideal:.2g}× on {cores} cores)",
        value=took / alone / ideal,
        bound=MAX_SLOWDOWN,
    )


def _traffic(small: dict[str, float], large: dict[str, float], batches: int) -> list[Row]:
    """What one of two processes receives in an estimate."""
    rows = []
    for measured in (small, large):
        per_pass = 4 * measured["parameters"] * batches / 2  # half of a tensor comes from the other
        rows.append(
            Row(
                f"  received for {measured['parameters']:,.0f} parameters, {batches} batches",
                f"{measured['gathered'] / 1e6:.0f} MB of parameters "
                f"({measured['gathered'] / per_pass:.2f} gathers a batch), "
                f"{measured['summed'] / 1e6:.0f} MB of gradients "
                f"({measured['summed'] / per_pass:.2f} sums), {measured['rest'] / 1e3:.2f} kB else",
            )
        )
    growth = abs(large["rest"] / small["rest"] - 1)
    size = large["parameters"] / small["parameters"]
    text = f"{growth:.2%} for {size:.1f} times the parameters"
    rows.append(Row("  growth of all that is not parameters and gradients", text, growth, MAX_GROWTH))
    return rows


def _work(rank: int, count: int, width: int, batches: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(str(Path(folder) / "store"), count)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        model = mlp((WIDTHS[0], width, width, width, WIDTHS[-1]))
        parameters = sum(p.numel() for p in model.parameters())
        data = classification_data(BATCH * batches, seed=rank)
        if count > 1:
            share(model, count)

        def estimate() -> object:
            objective = tacit.Objective(model, F.cross_entropy, data, batch_size=BATCH)
            return tacit.estimate(objective, elastic_net())

        estimate()
        counts = {"gathered": 0.0, "summed": 0.0, "rest": 0.0}
        with_counts(counts, estimate)
        times = []
        for _ in range(REPEATS):
            distributed.barrier()
            times.append(seconds(estimate))
        if rank == 0:
            measured = {"seconds": min(times), "parameters": parameters, **counts}
            (Path(folder) / "measured.json").write_text(json.dumps(measured))
    finally:
        distributed.destroy_process_group()


def share(model: nn.Module, count: int) -> None:
    """Give each process its rows of every parameter."""
    mesh = init_device_mesh("cpu", (count,))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def with_counts(counts: dict[str, float], function: Callable[[], object]) -> None:
    """Call a function, and add up the bytes that this process receives from the others."""
    names = [name for name in RECEIVED if hasattr(distributed, name)]
    originals = {name: getattr(distributed, name) for name in names}
    for name, original in originals.items():
        kinds = [kind for kind, functions in MODEL.items() if name in functions]
        setattr(distributed, name, _counted(original, counts, (*kinds, "rest")[0], RECEIVED[name]))
    try:
        function()
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)


def _counted(
    original: Callable[..., Any], counts: dict[str, float], kind: str, received: Callable[..., float]
) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        others = distributed.get_world_size(kwargs.get("group")) - 1
        counts[kind] += received(others, *args)
        return result

    return call


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pickled(others: int, values: list[Any], *_: Any) -> float:
    """Objects of all processes, as large as pickles of them."""
    return sum(len(pickle.dumps(value)) for value in values) * others / (others + 1)


RECEIVED: dict[str, Callable[..., float]] = {
    "all_gather_single": lambda others, whole, part: others * _bytes(part),
    "all_gather_into_tensor": lambda others, whole, part: others * _bytes(part),
    "reduce_scatter_single": lambda others, part, whole: others * _bytes(part),
    "reduce_scatter_tensor": lambda others, part, whole: others * _bytes(part),
    "all_gather": lambda others, parts, part: others * _bytes(part),
    "all_reduce": lambda others, tensor: 2 * others / (others + 1) * _bytes(tensor),
    "all_gather_object": _pickled,
    "broadcast_object_list": _pickled,
}
"""Bytes that a process receives in a call with so many others, by name of the function."""
