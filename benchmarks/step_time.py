"""Time of one optimizer step on this machine, as a ratio to torch's AdamW(fused=True), all measured in turns in one run.

    python -m benchmarks.step_time [--elements N] [--tensors N] [--dtype float32] [--rounds N] [--output FILE]

The floor for StableAdamW is 36/28 = 1.286 times AdamW's, because it reads the gradient and the second moment twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import peers
from benchmarks.support import parser_of, print_tables, write_result
from penstock.core.codings.eight_bit import BLOCK
from penstock.torch_frontend import AdamW, StableAdamW

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASELINE = "torch AdamW(fused=True)"
COLUMNS = 8 * BLOCK
"""Of the matrices that are updated: blocks of 8 bits end with a row."""


def candidates(dtype: torch.dtype) -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    """Return the optimizers to time: torch's own, this package's on each backend, and installed peers."""
    found: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        BASELINE: lambda p: torch.optim.AdamW(p, fused=True),
        "torch AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, foreach=True),
        "penstock StableAdamW": StableAdamW,
        "penstock AdamW": AdamW,
        "penstock StableAdamW compiled": lambda p: StableAdamW(p, backend="compiled", compensation="none"),
        "penstock AdamW compiled": lambda p: AdamW(p, backend="compiled", compensation="none"),
    }
    if dtype is torch.bfloat16:
        found["penstock StableAdamW compiled, split"] = lambda p: StableAdamW(p, backend="compiled", compensation="split")
        found["penstock StableAdamW compiled, kahan"] = lambda p: StableAdamW(p, backend="compiled", compensation="kahan")
        for preset in ("compact", "smallest"):
            found[f"penstock AdamW, {preset}"] = lambda p, preset=preset: AdamW(p, precision=preset)
            found[f"penstock AdamW compiled, {preset}"] = lambda p, preset=preset: AdamW(
                p, backend="compiled", precision=preset
            )
    else:
        found["penstock AdamW, 8-bit states"] = lambda p: AdamW(p, state_dtype="8bit")
        found["penstock AdamW compiled, 8-bit states"] = lambda p: AdamW(p, backend="compiled", state_dtype="8bit")
    if peers.optimi() is not None:
        found["optimi StableAdamW"] = lambda p: peers.optimi_optimizer("StableAdamW", p, lr=1e-3)
        found["optimi AdamW"] = lambda p: peers.optimi_optimizer("AdamW", p, lr=1e-3)
    return found


def measure(elements: int, tensors: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each candidate the median milliseconds of a step, and the median over rounds of the ratio to the baseline."""
    generator = torch.Generator().manual_seed(0)
    steps = {}
    for name, make in candidates(dtype).items():
        shape = max(1, elements // tensors // COLUMNS), COLUMNS
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        steps[name] = make(parameters).step
        started = time.perf_counter()
        steps[name]()
        Console(stderr=True).print(f"{name}: first step {time.perf_counter() - started:.1f} s")
        for _ in range(2):
            steps[name]()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - started)
    ratios = {name: [mine / base for mine, base in zip(times, taken[BASELINE], strict=True)] for name, times in taken.items()}
    return {
        name: {"median_ms": 1e3 * statistics.median(taken[name]), "ratio_to_fused_adamw": statistics.median(ratios[name])}
        for name in steps
    }


def main() -> None:
    """Measure, print a table, and write the figures if --output is given."""
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.elements, arguments.tensors, DTYPES[arguments.dtype], arguments.rounds)
    table = Table("optimizer", "median step (ms)", f"ratio to {BASELINE}", title=f"{arguments.elements:,} {arguments.dtype}")
    for name, row in figures.items():
        table.add_row(name, f"{row['median_ms']:.2f}", f"{row['ratio_to_fused_adamw']:.2f}")
    print_tables([table])
    if arguments.output:
        settings = {"elements": arguments.elements, "tensors": arguments.tensors, "dtype": arguments.dtype}
        write_result(arguments.output, {"settings": settings | {"rounds": arguments.rounds}, "figures": figures})


if __name__ == "__main__":
    main()
