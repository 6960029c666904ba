"""JAX's methods: XLA's account of their memory, their state, times of steps, and error against float64."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from benchmarks import jax_memory
from benchmarks.jax_decoder import Decoder
from benchmarks.support import failure
from penstock import parity

ROWS = {  # (step of `benchmarks.jax_memory`, optimizer): the backend of the parity suite that computes it
    ("scan", "optax.adamw"): "optax",
    ("scan, remat", "optax.adamw"): "optax",
    ("scan, with_refs", "optax.adamw"): "optax",
    ("scan, optax.microbatch", "optax.adamw"): "optax",
    ("unrolled", "optax.adamw"): "optax",
    ("make_train_step, unrolled", "adamw"): "jax",
    ("make_release_step", "adamw"): "walk",
    ("make_release_step, 4 micro-batches", "adamw"): "walk",
}
"""Another method is another row, of a step and an optimizer there."""


def measure(*, quick: bool) -> dict[str, Any]:
    """Return the settings, "step, optimizer" -> figures, and which cannot run here and why."""
    model = Decoder(layers=2, width=16, heads=2, context=4) if quick else Decoder()
    rounds, updates = (1, 20) if quick else (11, 2000)
    methods = {method.name: method for method in jax_memory.METHODS}
    found: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    running: dict[str, list[Any]] = {}
    error: dict[str, float] = {}
    for (step, optimizer), backend in ROWS.items():
        name = f"{step}, {optimizer}"
        try:
            found[name], running[name] = _first(methods[step], optimizer, model)
        except Exception as problem:  # an older version of jax or optax may not have it
            skipped[name] = failure(problem)
            continue
        if backend not in error:
            error[backend] = _error(backend, updates)
        found[name]["error"] = error[backend]
    taken: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, (compiled, state, batch) in running.items():
            started = time.perf_counter()
            running[name][1] = jax.block_until_ready(compiled(state, batch))[0]
            taken[name].append(time.perf_counter() - started)
    for name, times in taken.items():
        found[name]["step_ms"] = 1e3 * statistics.median(times)
    return {"model": vars(model), "rounds": rounds, "updates": updates, "rows": found, "skipped": skipped}


def _first(method: jax_memory.Method, optimizer: str, model: Decoder) -> tuple[dict[str, float], list[Any]]:
    """Compile a step and take it once; return figures, and the compiled step with its next state and its batch."""
    tx = jax_memory.transform_of(method, optimizer)
    make_state, make_batch = jax_memory.arguments(method, tx, model)
    state, batch = jax.jit(make_state)(), make_batch()
    parameters = jax_memory.bytes_of(state.params)
    of_state = jax_memory.bytes_of(state.opt_state)
    started = time.perf_counter()
    compiled = method.make(tx, model).lower(state, batch).compile()
    state = jax.block_until_ready(compiled(state, batch))[0]
    first = time.perf_counter() - started
    figures = {
        "first_ms": 1e3 * first,
        "peak_bytes": jax_memory.peak_of(compiled)["peak"],
        "parameter_bytes": parameters,
        "state_bytes": of_state,
    }
    return figures, [compiled, state, batch]


def _error(backend: str, updates: int) -> float:
    """Return the relative error of float32 parameters against float64."""
    rows = parity.run([backend], "B/adamw/float32/none/state-default", [updates])
    return next(row.relative_error for row in rows if row.quantity == "parameter")
