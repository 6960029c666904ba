"""Time that the host takes for launches of the Triton kernels, with the launch itself replaced by nothing.

    python -m benchmarks.triton_host_time [--tensors 148] [--rounds N] [--output FILE]

From the call of the backend to Triton's launcher with its final arguments, in microseconds. No GPU is needed, and what
`torch.cuda` takes on one, some microseconds a launch, is not in it. Slots are kept from update to update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.gpu.no_launch import without_launching
from benchmarks.support import parser_of, write_result
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton import launch
from penstock.torch_frontend.backends.triton.backend import TritonBackend

WIDTH = 16
COLUMNS = {
    "update": "a launch for one tensor",
    "front end": "the same by kernel(...) of Triton, which binds and looks up every argument",
    "update_all": "a launch for all tensors, with gradients at the addresses of the last one",
    "moved": "the same, with gradients at other addresses",
    "step": "optimizer.step()",
    "release": "a gradient: what release and step() add to a backward pass, by the number of tensors",
}
"""What is measured."""


def microseconds(run: Callable[[], Any], rounds: int) -> float:
    """The fastest of some calls: what else the machine does only adds to it."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        taken.append(1e6 * (time.perf_counter() - started))
    return min(taken)


def model_and_optimizer(rule: Any, dtype: torch.dtype, tensors: int) -> tuple[nn.ParameterList, Any]:
    """Small parameters with gradients, and an optimizer with the Triton backend, which it would not get on a CPU."""
    model = nn.ParameterList([torch.zeros(WIDTH, WIDTH, dtype=dtype) for _ in range(tensors)])
    optimizer = rule(model.parameters(), backend="eager")
    optimizer._backend = TritonBackend()
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer


def measure(rule: Any, dtype: torch.dtype, tensors: int, rounds: int) -> dict[str, float]:
    """All of `COLUMNS`."""
    model, optimizer = model_and_optimizer(rule, dtype, tensors)
    slots, backend = [optimizer._slot(p) for p in model], optimizer._backend
    turns = [[(slot, torch.ones_like(slot.parameter)) for slot in slots] for _ in range(2)]
    here = turns[0]

    def update_each(backend: TritonBackend) -> None:
        for slot, gradient in here:
            backend.update(slot, gradient, first=True)

    def update_moved() -> None:
        turns.reverse()
        backend.update_all(turns[0])

    found = {}
    with torch.no_grad():
        found["update"] = microseconds(lambda: update_each(backend), rounds) / tensors
        with mock.patch.object(launch, "constants_taken", _unknown):
            by_front_end = TritonBackend()
            found["front end"] = microseconds(lambda: update_each(by_front_end), rounds) / tensors
        found["update_all"] = microseconds(lambda: backend.update_all(here), rounds)
        found["moved"] = microseconds(update_moved, rounds)
    found["step"] = microseconds(optimizer.step, rounds)
    return found | {"release": released_gradient(model, optimizer, rounds)}


def _unknown(*_: Any) -> None:
    """Nothing is known of what a compiled kernel takes: so it is not launched by itself."""


def released_gradient(model: nn.ParameterList, optimizer: Any, rounds: int) -> float:
    """What a gradient costs under release, over a bare backward pass."""

    def backward() -> None:
        torch.stack([parameter.sum() for parameter in model]).sum().backward()

    def plain() -> None:
        backward()
        model.zero_grad()

    def released() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    model.zero_grad()
    bare = microseconds(plain, rounds)
    with release_gradients(model, optimizer):
        return (microseconds(released, rounds) - bare) / len(model)


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--tensors", type=int, default=148, help="as many as GPT-2 has")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with without_launching():
        for rule in (AdamW, StableAdamW):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{rule.__name__} {str(dtype).removeprefix('torch.')}"
                rows.append({"optimizer": name, **measure(rule, dtype, arguments.tensors, arguments.rounds)})
    table = Table("optimizer", *COLUMNS, title=f"microseconds, {arguments.tensors} tensors, nothing launched")
    for row in rows:
        table.add_row(row["optimizer"], *(f"{row[column]:.1f}" for column in COLUMNS))
    console = Console()
    console.print(table)
    for column, meaning in COLUMNS.items():
        console.print(f"{column}: {meaning}")
    if arguments.output is not None:
        write_result(arguments.output, {"tensors": arguments.tensors, "microseconds": rows})


if __name__ == "__main__":
    main()
