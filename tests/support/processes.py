"""Several processes of torch.distributed on this machine, by gloo, and models that they share."""

import datetime
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# Every process begins as a copy of one that has imported these, which takes seconds.
multiprocessing.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch._dynamo", "tacit.watching"]
)
TIMEOUT = datetime.timedelta(seconds=int(os.environ.get("TACIT_TEST_TIMEOUT", "60")))


def run_processes(function: Callable[[str], Any], kind: str, folder: Path) -> list[Any]:
    """What function(kind) returns in each process; an error of one of them is raised.

    The kind says how many there are and how they share a model: such as "fully_shard on 4".
    """
    count = int(kind.split()[-1])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    arguments = function, kind, count, folder
    multiprocessing.start_processes(_run, arguments, count, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _run(rank: int, function: Callable[[str], Any], kind: str, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    store = distributed.FileStore(str(folder / "store"), count)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT
    )
    torch.save(function(kind), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def share(model: nn.Module, kind: str) -> nn.Module:
    """The model, shared by all processes as the kind says; as it is for "alone"."""
    if kind == "alone":
        return model
    if kind.startswith("copies"):
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(kind)
    for module in model.children():
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mesh_of(kind: str) -> Any:
    """The mesh that all processes shard over, or shard and copy."""
    count = processes(kind)
    if kind.startswith("hybrid"):
        return init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (count,), mesh_dim_names=("shards",))


def own(count: int, kind: str) -> slice:
    """This process's rows of so many: uneven parts, and none for the second of four."""
    if kind == "alone":
        return slice(0, count)
    ends = {2: (0, 0.7, 1), 4: (0, 0.5, 0.5, 0.85, 1)}[int(kind.split()[-1])]
    rank = distributed.get_rank()
    return slice(int(ends[rank] * count), int(ends[rank + 1] * count))


def number(kind: str) -> int:
    """The number of this process."""
    return 0 if kind == "alone" else distributed.get_rank()


def processes(kind: str) -> int:
    """How many processes there are."""
    return 1 if kind == "alone" else int(kind.split()[-1])
