"""Seconds of the first plain step() of a Llama of 182 tensors, with and without a compiler, one process each.

    python -m benchmarks.release_overhead.first_step BACKEND [--quick]

prints one line of JSON; `measure` runs it with an empty compiler cache, and again with the one that this left.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.child import run_child
from benchmarks.goals import Goal
from benchmarks.llama import LLAMA_290M, TINY, tied_llama
from penstock.torch_frontend import AdamW

GOALS = {"cold": 15.0, "warm": 8.0}
"""Seconds with backend="compiled"; by default there is to be no compiler."""


def first_step(backend: str, *, quick: bool) -> dict[str, Any]:
    """Construct AdamW and step twice, in this process, which has not compiled anything before."""
    model = tied_llama(TINY if quick else LLAMA_290M)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    times = [time.perf_counter()]
    optimizer = AdamW(parameters, lr=1e-4, backend=backend)
    for _ in range(2):
        optimizer.step()
        times.append(time.perf_counter())
    return {
        "tensors": len(parameters),
        "backend": optimizer.backend,
        "first_s": times[1] - times[0],  # with the constructor, which may try the compiler
        "second_s": times[2] - times[1],
        "graphs": graphs(),
    }


def graphs() -> int:
    """Number of graphs that this process has compiled."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return 0 if utilities is None else int(utilities.counters["stats"]["unique_graphs"])


def measure(*, quick: bool) -> dict[str, Any]:
    """Cold and warm, by backend; only the default one, cold, if quick."""
    found: dict[str, Any] = {}
    for name, backend in ({"default": "auto"} if quick else {"default": "auto", "compiled": "compiled"}).items():
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold",) if quick else ("cold", "warm"):
                arguments = [backend, *(["--quick"] if quick else [])]
                found[f"{name}, {state}"] = run_child(__name__, *arguments, TORCHINDUCTOR_CACHE_DIR=cache)
    return found


def goals(found: dict[str, Any]) -> list[Goal]:
    """No graphs by default, and few seconds where the compiler was asked for."""
    compiled = [
        Goal(f"first step, compiled, {state}, seconds", seconds, found.get(f"compiled, {state}", {}).get("first_s"))
        for state, seconds in GOALS.items()
    ]
    return [Goal("first step, default: compiled graphs", 0, found["default, cold"]["graphs"]), *compiled]


def main() -> None:
    """The child's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(first_step(arguments.backend, quick=arguments.quick)))


if __name__ == "__main__":
    main()
