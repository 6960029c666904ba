"""Peak resident memory of training a Llama of 290 million parameters on the CPU, above the model, in bytes of the parameters.

    python -m benchmarks.resident [--rows PATTERN ...] [--dtypes NAME ...] [--model NAME] [--out FILE]

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # in every row, before anything is measured: see above
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.llama import LLAMA_110M, LLAMA_290M, TINY, tied_llama, tokens
from benchmarks.methods import DTYPES, IN_HOOKS, LR, METHODS, OURS
from benchmarks.peers import plain_tensors
from benchmarks.support import RESULTS, Goal, goals_table, matching, parser_of, print_tables, ratio, run_child, write_result
from penstock.torch_frontend import AdamW

RESULT = RESULTS / "resident.json"
STEPS = 3
RUNTIME = "the compiler's runtime"
PLAIN, COMPACT, SMALLEST = (
    "torch AdamW fused plain",
    "penstock AdamW release, compact",
    "penstock AdamW release, smallest",
)
GOALS = (("fp32", OURS, IN_HOOKS, 1.03), ("bf16", COMPACT, PLAIN, 1.0), ("bf16", SMALLEST, IN_HOOKS, 1.0))
"""(dtype, row, another row, most of the ratio of their peaks)."""

USUAL = (
    PLAIN,
    IN_HOOKS,
    "optimi AdamW release",
    "penstock AdamW plain, default",
    OURS,
    "penstock AdamW release, eager",
    "penstock AdamW release, compiled",
    COMPACT,
    SMALLEST,
)
"""The rows of a run that names none; all others are in `benchmarks.methods`."""
SHAPES = {"290M": LLAMA_290M, "110M": LLAMA_110M, "tiny": TINY}


def status(field: str) -> int:
    """Return the bytes of "VmRSS" (resident now) or "VmHWM" (peak) of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux.")
    return 1024 * int(found[1])


def measure_row(name: str, dtype: torch.dtype, model_name: str) -> dict[str, Any]:
    """Train in this process, which must be fresh; return figures in bytes."""
    shape = TINY if name == RUNTIME else SHAPES[model_name]
    model = tied_llama(shape, dtype=dtype, checkpointing=True)
    with torch.no_grad():
        model(tokens(shape))
    before, most_before = status("VmRSS"), status("VmHWM")
    state = 0
    if name == RUNTIME:
        train_two_tensors(dtype)
    else:
        training = METHODS[name].attach(model)
        for number in range(STEPS):
            model(tokens(shape, seed=number)).backward()
            training.close()
        state = state_bytes(training.optimizers)
    if shape is not TINY and status("VmHWM") == most_before:
        raise RuntimeError(f"{name}: building the model took more memory than training it, so that the peak is not training's.")
    parameters = {parameter: parameter.numel() * parameter.element_size() for parameter in model.parameters()}
    return {
        "parameter_bytes": sum(parameters.values()),
        "model_bytes": before,
        "above_model_bytes": status("VmHWM") - before,
        "state_bytes": state,
        "compiled": "torch._inductor.compile_fx" in sys.modules,
    }


def state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the bytes of all tensors that optimizers keep from step to step."""
    kept = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for value in kept for tensor in plain_tensors(value))


def train_two_tensors(dtype: torch.dtype) -> None:
    """Take one compiled step whose tensors need almost no memory."""
    model = nn.Linear(8, 8, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=LR, backend="compiled")
    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    optimizer.step()


def measure(patterns: Sequence[str], dtypes: Sequence[str], model: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return dtype -> row -> figures of the methods that run here; the compiler's runtime is measured if one has compiled."""
    found: dict[str, dict[str, dict[str, Any]]] = {dtype: {} for dtype in dtypes}
    chosen = [METHODS[name] for name in matching(METHODS, patterns)]
    pairs = [(dtype, each.name) for dtype in dtypes for each in chosen if dtype in each.dtypes and each.missing() is None]
    for dtype, name in track(pairs, "training", console=Console(stderr=True), transient=True):
        found[dtype][name] = child(name, dtype, model)
    for dtype, rows in found.items():
        runtime = child(RUNTIME, dtype, model) if any(row["compiled"] for row in rows.values()) else None
        for row in rows.values():
            own = row["above_model_bytes"]
            row["multiples"] = own / row["parameter_bytes"]
            if row["compiled"] and runtime is not None:
                row["multiples_without_runtime"] = (own - runtime["above_model_bytes"]) / row["parameter_bytes"]
        if runtime is not None:
            rows[RUNTIME] = runtime
    return found


def child(name: str, dtype: str, model: str) -> dict[str, Any]:
    """Measure a row in a process of its own, with an empty compiler cache."""
    arguments = ["--row", name, "--dtypes", dtype, "--model", model]
    with tempfile.TemporaryDirectory() as cache:
        return run_child("benchmarks.resident", *arguments, TORCHINDUCTOR_CACHE_DIR=cache)


def goals(found: dict[str, dict[str, dict[str, Any]]]) -> list[Goal]:
    """Return the goals: by default no more memory than torch's AdamW in hooks, and less with the smaller precisions."""

    def multiples(dtype: str, name: str) -> float | None:
        return found.get(dtype, {}).get(name, {}).get("multiples")

    return [
        Goal(f"{dtype}: {name} / {other}", at_most, ratio(multiples(dtype, name), multiples(dtype, other)))
        for dtype, name, other, at_most in GOALS
        if dtype in found
    ]


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
    parser.add_argument("--rows", nargs="+", default=list(USUAL), metavar="PATTERN", help="as 'penstock*'")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--model", choices=SHAPES, default="290M", help="tiny: to test the benchmark; its figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--row", choices=[*METHODS, RUNTIME], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.row is not None:
        print(json.dumps(measure_row(given.row, DTYPES[given.dtypes[0]], given.model)))
        return
    found = measure(given.rows, given.dtypes, given.model)
    reached = goals(found)
    print_tables([*tables(found), goals_table(reached)])
    settings = {"steps": STEPS, "tokens": 64, **vars(SHAPES[given.model])}
    write_result(given.out, {"settings": settings, "rows": found, "goals": [goal.as_json() for goal in reached]})


if __name__ == "__main__":
    main()
