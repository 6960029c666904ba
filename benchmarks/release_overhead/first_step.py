"""Seconds of the first plain step() of a Llama of 182 tensors, with and without a compiler, each in its own process.

    python -m benchmarks.release_overhead.first_step BACKEND [--quick]

prints one line of JSON; `measure` runs it with an empty compiler cache, and again with the cache of that run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.llama import LLAMA_290M, TINY, tied_llama
from benchmarks.support import Goal, parser_of, run_child
from penstock.torch_frontend import AdamW

GOALS = {"cold": 15.0, "warm": 8.0}
"""Seconds with backend="compiled"; the goal for the default backend is that nothing is compiled."""


def first_step(backend: str, *, quick: bool) -> dict[str, Any]:
    """Construct AdamW and step twice in this process, which must not have compiled anything before."""
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
        "first_s": times[1] - times[0],  # including the constructor, which may test the compiler
        "second_s": times[2] - times[1],
        "graphs": graphs(),
    }


def graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return 0 if utilities is None else int(utilities.counters["stats"]["unique_graphs"])


def measure(*, quick: bool) -> dict[str, Any]:
    """Return figures by backend with a cold and a warm cache; only of the default one with a cold cache if quick."""
    found: dict[str, Any] = {}
    for name, backend in ({"default": "auto"} if quick else {"default": "auto", "compiled": "compiled"}).items():
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold",) if quick else ("cold", "warm"):
                arguments = [backend, *(["--quick"] if quick else [])]
                found[f"{name}, {state}"] = run_child(__name__, *arguments, TORCHINDUCTOR_CACHE_DIR=cache)
    return found


def goals(found: dict[str, Any]) -> list[Goal]:
    """Return the goals: no graphs by default, and few seconds with the compiled backend."""
    compiled = [
        Goal(f"first step, compiled, {state}, seconds", seconds, found.get(f"compiled, {state}", {}).get("first_s"))
        for state, seconds in GOALS.items()
    ]
    return [Goal("first step, default: compiled graphs", 0, found["default, cold"]["graphs"]), *compiled]


def main() -> None:
    """Measure in this process, and print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("backend")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(first_step(arguments.backend, quick=arguments.quick)))


if __name__ == "__main__":
    main()
