"""Release over two gloo processes, compared with the default path.

Every figure is processor time of the thread that runs backward(). It includes starting the collectives, but not waiting for
the other process, nor the work of gloo's own threads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import Goal

from .host import MODE_GOAL
from .modes import BASE, OPTIMIZERS, Mode, bare, released, row_name
from .timing import Row, figures, interleave
from .workloads import Workload

RANKS = 2


def ddp(model: nn.Module) -> nn.Module:
    """Wrap the model, with torch's own buckets."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard the model block by block."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": ddp, "FSDP2": fsdp2}


def rows(alone: Any) -> list[Row]:
    """Return all rows. alone: a process group of this process only, for the default path.

    DDP's and FSDP2's own collectives are part of their bare rows.
    """
    found = [bare("bare")]
    found += [bare(f"bare, {name}", wrap=wrap) for name, wrap in WRAPPERS.items()]
    for rule in OPTIMIZERS:
        base = row_name(rule, BASE.name)
        found.append(released(rule, Mode(BASE.name, {"process_group": alone})))
        found.append(released(rule, Mode("process group"), base=base))
        for name, wrap in WRAPPERS.items():
            found.append(released(rule, Mode(name, less=(f"bare, {name}",)), wrap=wrap, base=base))
    return found


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Run both processes; return the figures of the first one, with the wall time of a step added."""
    with tempfile.TemporaryDirectory() as directory:
        start_processes(_rank, args=(workload, rounds, directory), nprocs=RANKS, start_method="spawn")
        found = json.loads((Path(directory) / "figures.json").read_text())
    return {"tensors": workload.tensors, "rounds": rounds, "ranks": RANKS, "clock": "thread", "rows": found}


def _rank(rank: int, workload: Workload, rounds: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=RANKS)
    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    found = rows(alone)
    taken = interleave(found, workload, rounds, meet=dist.barrier, quiet=rank > 0)
    if rank == 0:
        by_thread, by_wall = (figures(found, taken, workload.tensors, clock=clock) for clock in ("thread", "wall"))
        for row, figure in by_thread.items():
            figure["wall_ms"] = by_wall[row]["step_ms"]
        (Path(directory) / "figures.json").write_text(json.dumps(by_thread))
    dist.barrier()
    dist.destroy_process_group()


def goals(found: dict[str, dict[str, float]]) -> list[Goal]:
    """Return the goals: the ratio of every path to the default path of the same rule, per gradient."""
    return [
        Goal(f"2 processes: {name} / default", MODE_GOAL, found[name]["ratio_to_base"])
        for rule in OPTIMIZERS
        for name in (row_name(rule, path) for path in ("process group", *WRAPPERS))
    ]
