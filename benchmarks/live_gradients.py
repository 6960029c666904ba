"""Peak bytes of live gradients on every path, measured by storage, next to the release's own ledger.

    python -m benchmarks.live_gradients [--write docs/live_gradients.md]

The figures are bytes and not times, and the same on every machine. Two processes are started for the distributed paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import parser_of, print_tables
from penstock.planner.live_storages import LiveStorageMeter
from penstock.planner.plan import InPlaceKernels
from penstock.torch_frontend import AdamW, microbatch_blocks, release_gradients

LAYERS, WIDTH, BATCH, MICRO_BATCHES, RANKS = 16, 512, 8, 4, 2  # so that a layer fills a bucket of DDP
ONE = WIDTH * WIDTH * 4
"""Bytes of one layer's gradient."""


@dataclasses.dataclass(frozen=True)
class Route:
    """One way of training.

    settings: of release_gradients; None: without release. micro_batches: backward passes in a step. chunks: of
    microbatch_blocks. wrap: makes the model distributed.
    """

    name: str
    settings: dict[str, Any] | None
    micro_batches: int = 1
    chunks: int | None = None
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model


class Row(NamedTuple):
    """Peak bytes of live gradients: measured, and by the ledger (None without release)."""

    name: str
    measured: int
    ledger: int | None


def scaled(**settings: Any) -> dict[str, Any]:
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=4.0), **settings}


def local_paths() -> list[Route]:
    return [
        Route("plain optimizer", None),
        Route("plain optimizer, 4 micro-batches", None, MICRO_BATCHES),
        Route("release", {}),
        Route("release, per-tensor clipping", {"max_norm": 1.0, "clipping": "per_tensor"}),
        Route("guard, max_norm", {"max_norm": 1.0}),
        Route("guard, max_norm, keep_bytes of 4 layers", {"max_norm": 1.0, "keep_bytes": 4 * ONE}),
        Route("guard, GradScaler", scaled()),
        Route("guard, GradScaler and max_norm", scaled(max_norm=1.0)),
        Route("hold, 4 micro-batches", {"accumulation": "hold"}, MICRO_BATCHES),
        Route("state, 4 micro-batches", {"accumulation": "state"}, MICRO_BATCHES),
        Route("microbatch_blocks, 4 chunks", {}, chunks=MICRO_BATCHES),
        Route("microbatch_blocks, 4 chunks, guard, max_norm", {"max_norm": 1.0}, chunks=MICRO_BATCHES),
    ]


def distributed_paths() -> list[Route]:
    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=ONE / 2**20)

    def sharded(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return [
        Route("2 processes, plain module: release", {}),
        Route("2 processes, plain module: guard, max_norm", {"max_norm": 1.0}),
        Route("2 processes, DistributedDataParallel: plain optimizer", None, wrap=ddp),
        Route("2 processes, DistributedDataParallel: release", {}, wrap=ddp),
        Route("2 processes, fully_shard: plain optimizer", None, wrap=sharded),
        Route("2 processes, fully_shard: release", {}, wrap=sharded),
        Route("2 processes, fully_shard: guard, max_norm", {"max_norm": 1.0}, wrap=sharded),
    ]


def measure(path: Route) -> Row:
    """Measure two steps of equal layers with small activations, updated by kernels that allocate nothing.

    Every storage of a gradient's size that is neither parameter nor optimizer state is then a gradient or a copy of one.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = path.wrap(plain)
    optimizer = AdamW(model.parameters(), lr=1e-3, backend="eager")
    release = None if path.settings is None else release_gradients(model, optimizer, **path.settings)
    scaler = None if path.settings is None else path.settings.get("scaler")
    for parameter in model.parameters():
        optimizer._slot(parameter)  # creates its state, which its first update would otherwise do
    optimizer._backend = InPlaceKernels()
    there = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))]
    there = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in there]
    with contextlib.ExitStack() as stack:
        if path.chunks is not None:
            stack.enter_context(microbatch_blocks(plain, chunks=path.chunks))
        meter = stack.enter_context(LiveStorageMeter({"there": there}, at_least=ONE // 2))
        for _ in range(2):
            for _ in range(path.micro_batches):
                loss = model(torch.randn(BATCH, WIDTH)).pow(2).mean() / path.micro_batches
                loss = loss if release is None else release.guard(loss)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return Row(path.name, meter.peak - meter.live["there"], None if release is None else release.ledger.peak)


def measure_all() -> list[Row]:
    """Measure every path, the distributed ones on two processes."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        meeting = f"file://{directory}/meeting"
        processes = [context.Process(target=_rank, args=(rank, meeting, answers), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        rows = [measure(path) for path in local_paths()]
        rows += answers.get(timeout=300)
        for process in processes:
            process.join(timeout=60)
    return rows


def _rank(rank: int, meeting: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    rows = [measure(path) for path in distributed_paths()]
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def markdown(rows: Sequence[Row]) -> str:
    """Return the page of the documentation."""
    lines = [
        "# Live gradients, path by path",
        "",
        "The most bytes of gradient alive at any moment of a step, in units of one layer's gradient, for a model of "
        f"{LAYERS} equal layers.",
        "*Measured*: every storage of a gradient's size that is neither parameter nor optimizer state, at every operation",
        "(`penstock.planner.live_storages`), while the optimizer's update allocates nothing: gradients, and copies that",
        "communication makes. *Ledger*: `release.ledger.peak`, the release's own account of parameters' gradients. The figures",
        "are bytes divided by bytes, and the same on every machine. Made by",
        "",
        "```bash",
        "python -m benchmarks.live_gradients --write docs/live_gradients.md",
        "```",
        "",
        "| path | measured | ledger |",
        "|---|---:|---:|",
        *(f"| {row.name} | {_layers(row.measured)} | {_layers(row.ledger)} |" for row in rows),
        "",
        "- Micro-batches whose gradients add up (the plain optimizer's, and `hold`): all of them, and the one that is added.",
        "- `keep_bytes` keeps that much between the two passes of `guard`, which shortens the second.",
        "- `microbatch_blocks`: the sums of one block (one layer here) and the gradient of one tensor of the chunk at work.",
        "- A plain module over several processes: two all-reduces are under way while the next gradient is computed, and each",
        "  carries a few numbers behind its gradient. Smaller gradients travel together, up to 1 MiB; so do those of small",
        "  modules under `fully_shard`.",
        "- DistributedDataParallel keeps its buckets, of all gradients, and copies of them: release saves none of that.",
        "  Release the plain module instead, which averages by itself, or use `fully_shard`.",
        f"- `fully_shard`: a process owns 1/{RANKS} of each gradient. Measured are also the whole parameters of the layers at",
        "  work and FSDP2's buffers, which the plain optimizer's row has as well; the difference is what release saves.",
        "",
    ]
    return "\n".join(lines)


def _layers(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / ONE:.2f}"


def main() -> None:
    """Measure, print, and write the page if --write is given."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    arguments = parser.parse_args()
    rows = measure_all()
    table = Table("path", "measured", "ledger", title="most gradient alive, layers")
    for row in rows:
        table.add_row(row.name, _layers(row.measured), _layers(row.ledger))
    print_tables([table])
    if arguments.write:
        arguments.write.write_text(markdown(rows))


if __name__ == "__main__":
    main()
