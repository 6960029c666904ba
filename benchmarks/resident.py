"""Peak resident memory of training a Llama of 290 million parameters on the CPU, above the model, in bytes of the parameters.

    python -m benchmarks.resident [--rows PATTERN ...] [--dtypes NAME ...] [--quick] [--out FILE]

Each row runs in a process of its own: 3 steps of one row of 64 tokens with activation checkpointing. Memory is measured above
that after the model's first forward, when all libraries are imported, so that they and their scratch do not count.
TorchDynamo is one of them: constructing any torch.optim.Optimizer imports it. The last row is the memory of the rest of the
compiler (importing Inductor, compiling with an empty cache, running), measured by a step of two small tensors; the table also
gives the rows that compile without it. Needs about 6 GB.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # in every row, before anything is measured: see above
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.llama import LLAMA_290M, TINY, tied_llama, tokens
from benchmarks.peers import optimi, release_by_optimi, release_in_torch_hooks
from benchmarks.support import RESULTS, Goal, goals_table, matching, parser_of, print_tables, ratio, run_child, write_result
from penstock.torch_frontend import AdamW, release_gradients

RESULT = RESULTS / "resident.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, LR = 3, 1e-4
RUNTIME = "the compiler's runtime"
IN_HOOKS, OURS = "torch AdamW fused in hooks", "penstock AdamW release, default"
AT_MOST = 1.03
"""Goal for the ratio of the default release to torch's AdamW in hooks, in fp32."""

Close = Callable[[], None]
"""The calls of the training loop after backward()."""


def closing(optimizer: torch.optim.Optimizer) -> Close:
    """Return a function that calls step() and zero_grad()."""

    def close() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return close


def torch_in_hooks(model: nn.Module) -> Close:
    """Put torch's AdamW into hooks; the tutorial's loop calls nothing after backward()."""
    release_in_torch_hooks(model, lambda parameters: torch.optim.AdamW(parameters, lr=LR, fused=True))
    return lambda: None


def released(backend: str) -> Callable[[nn.Module], Close]:
    """Return a function that puts a model under release with penstock's AdamW."""

    def attach(model: nn.Module) -> Close:
        optimizer = AdamW(model.parameters(), lr=LR, backend=backend)
        release_gradients(model, optimizer)
        return closing(optimizer)

    return attach


def by_optimi(model: nn.Module) -> Close:
    """Put a model under optimi's own release with its AdamW; with Kahan summation for bf16 parameters."""
    low = next(model.parameters()).dtype is torch.bfloat16
    return closing(release_by_optimi(model, "AdamW", lr=LR, kahan_sum=low))


ROWS: dict[str, Callable[[nn.Module], Close]] = {
    "torch AdamW fused plain": lambda model: closing(torch.optim.AdamW(model.parameters(), lr=LR, fused=True)),
    IN_HOOKS: torch_in_hooks,
    **({} if optimi() is None else {"optimi AdamW release": by_optimi}),
    "penstock AdamW plain, default": lambda model: closing(AdamW(model.parameters(), lr=LR)),
    OURS: released("auto"),
    "penstock AdamW release, eager": released("eager"),
    "penstock AdamW release, compiled": released("compiled"),
}


def status(field: str) -> int:
    """Return the bytes of "VmRSS" (resident now) or "VmHWM" (peak) of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux.")
    return 1024 * int(found[1])


def measure_row(name: str, dtype: torch.dtype, *, quick: bool) -> dict[str, Any]:
    """Train in this process, which must be fresh; return figures in bytes."""
    shape = TINY if quick or name == RUNTIME else LLAMA_290M
    model = tied_llama(shape, dtype=dtype, checkpointing=True)
    with torch.no_grad():
        model(tokens(shape))
    before, most_before = status("VmRSS"), status("VmHWM")
    if name == RUNTIME:
        train_two_tensors(dtype)
    else:
        close = ROWS[name](model)
        for number in range(STEPS):
            model(tokens(shape, seed=number)).backward()
            close()
    if not quick and status("VmHWM") == most_before:
        raise RuntimeError(f"{name}: building the model took more memory than training it, so that the peak is not training's.")
    parameters = {parameter: parameter.numel() * parameter.element_size() for parameter in model.parameters()}
    return {
        "parameter_bytes": sum(parameters.values()),
        "model_bytes": before,
        "above_model_bytes": status("VmHWM") - before,
        "compiled": "torch._inductor.compile_fx" in sys.modules,
    }


def train_two_tensors(dtype: torch.dtype) -> None:
    """Take one compiled step whose tensors need almost no memory."""
    model = nn.Linear(8, 8, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=LR, backend="compiled")
    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    optimizer.step()


def measure(patterns: list[str], dtypes: list[str], *, quick: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Return dtype -> row -> figures; the compiler's runtime is measured if a row has compiled."""
    found: dict[str, dict[str, dict[str, Any]]] = {dtype: {} for dtype in dtypes}
    pairs = [(dtype, name) for dtype in dtypes for name in matching(ROWS, patterns)]
    for dtype, name in track(pairs, "training", console=Console(stderr=True), transient=True):
        found[dtype][name] = child(name, dtype, quick=quick)
    for dtype, rows in found.items():
        runtime = child(RUNTIME, dtype, quick=quick) if any(row["compiled"] for row in rows.values()) else None
        for row in rows.values():
            own = row["above_model_bytes"]
            row["multiples"] = own / row["parameter_bytes"]
            if row["compiled"] and runtime is not None:
                row["multiples_without_runtime"] = (own - runtime["above_model_bytes"]) / row["parameter_bytes"]
        if runtime is not None:
            rows[RUNTIME] = runtime
    return found


def child(name: str, dtype: str, *, quick: bool) -> dict[str, Any]:
    """Measure a row in a process of its own, with an empty compiler cache."""
    arguments = ["--row", name, "--dtypes", dtype, *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory() as cache:
        return run_child("benchmarks.resident", *arguments, TORCHINDUCTOR_CACHE_DIR=cache)


def goals(found: dict[str, dict[str, dict[str, Any]]]) -> list[Goal]:
    """Return the goal: in fp32 and by default, no more memory than torch's AdamW in hooks."""
    rows = found.get("fp32", {})
    ours, theirs = (rows.get(name, {}).get("multiples") for name in (OURS, IN_HOOKS))
    return [Goal(f"fp32: {OURS} / {IN_HOOKS}", AT_MOST, ratio(ours, theirs))]


def tables(found: dict[str, dict[str, dict[str, Any]]]) -> list[Table]:
    """Return a table for each dtype; P: bytes of the parameters."""
    made = []
    for dtype, rows in found.items():
        table = Table("row", "above the model (MB)", "P", "P without the compiler's runtime", title=f"peak RSS, {dtype}")
        for name, row in rows.items():
            figures = [row.get(key) for key in ("multiples", "multiples_without_runtime")]
            cells = ("" if figure is None else f"{figure:.2f}" for figure in figures)
            table.add_row(name, f"{row['above_model_bytes'] / 1e6:.0f}", *cells)
        made.append(table)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Measure, print tables, and write the figures; with --row, measure one row in this process."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="as 'penstock*'")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test the benchmark; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--row", choices=[*ROWS, RUNTIME], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.row is not None:
        print(json.dumps(measure_row(given.row, DTYPES[given.dtypes[0]], quick=given.quick)))
        return
    found = measure(given.rows, given.dtypes, quick=given.quick)
    reached = goals(found)
    print_tables([*tables(found), goals_table(reached)])
    settings = {"steps": STEPS, "tokens": 64, "quick": given.quick, **vars(TINY if given.quick else LLAMA_290M)}
    write_result(given.out, {"settings": settings, "rows": found, "goals": [goal.as_json() for goal in reached]})


if __name__ == "__main__":
    main()
