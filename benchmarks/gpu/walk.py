"""Stage 6: JAX on the device: memory, compiled programs and time of the reverse walk and of other steps."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.support import failure

from .setting import Setting

ROUNDS, OPTIMIZER = 10, "stable_adamw"
COMPILING = 120
"""Seconds of each dtype after which no further step is compiled, so that there is time to run those that are."""

MODEL = {"layers": 12, "width": 1024, "heads": 16, "context": 256}
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def jax_steps(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure every step of `benchmarks.jax_memory` in two dtypes, the walk's fences, and XLA's scheduler on and off.

    For each: the peak by XLA's analysis, relative to the parameters' bytes (the floor with Adam's moments is 3); the numbers
    of copies of whole stacks and of conditionals, each of which waits for the host, in the compiled program; the milliseconds
    of a step. The allocator's peak never decreases within a process, so the steps of a dtype are compiled first and run in the
    order of their peaks, and a figure that an earlier step exceeded is left out.
    """
    if (why := _missing(setting)) is not None:
        yield {"missing": why}
        return
    import jax.numpy as jnp

    from benchmarks.jax_decoder import Decoder

    model = Decoder(**({"layers": 1, "width": 8, "heads": 1, "context": 2} if setting.dry else MODEL))
    for dtype in (jnp.float32,) if setting.dry else (jnp.bfloat16, jnp.float32):
        compiled, started = [], time.monotonic()
        for job in setting.first(reversed(_jobs()) if setting.dry else _jobs()):
            row: dict[str, Any] = {"step": job["step"], "dtype": dtype.__name__}
            if time.monotonic() - started > COMPILING:
                yield row | {"left_out": f"the {COMPILING} s to compile in are over"}
                continue
            try:
                made, found = _compiled(job["method"], model, dtype, job.get("options", {}))
                compiled.append((made, job["method"], row | found))
                yield {"compiled": job["step"], **row, **found}
            except Exception as error:  # a compiler may not know an option
                yield row | {"failed": failure(error)} | ({} if "options" in job else {"holds": False})
        for made, method, row in sorted(compiled, key=lambda entry: entry[2]["peak"]):
            yield row | _run(made, method, model, dtype, setting.few(ROUNDS))
            setting.clean_up()


def _missing(setting: Setting) -> str | None:
    """Return why there is nothing to measure: a package is missing, or JAX has no GPU."""
    try:
        import jax
        import optax  # noqa: F401

        found = jax.default_backend()
    except Exception as error:  # a plugin for another driver may fail in any way
        return f"{failure(error)} Carry the wheels of JAX and optax along: see README.md."
    return None if setting.dry or found == "gpu" else f"JAX runs on the {found} here: bring its plugin for CUDA"


def _jobs() -> list[dict[str, Any]]:
    """Return the steps to measure: the walk with each fence, unrolled steps, and all of `benchmarks.jax_memory`."""
    from benchmarks.jax_memory import METHODS
    from penstock.jax_frontend import make_release_step

    jobs: list[dict[str, Any]] = []
    for fence in ("none", "barrier", "conditional"):
        method = _like("make_release_step", lambda tx, model, fence=fence: make_release_step(model.stack, tx, fence=fence))
        jobs.append({"step": f"make_release_step, fence={fence}", "method": method})
    jobs.append({"step": "unrolled, two passes with a barrier", "method": _like("unrolled, clipped by hand", two_passes)})
    for on in (False, True):
        method = _like("make_train_step, unrolled")
        jobs.append({"step": f"make_train_step, unrolled, scheduler={on}", "method": method, "options": {SCHEDULER: on}})
    return jobs + [{"step": method.name, "method": method} for method in reversed(METHODS)]  # the plain scan last


def two_passes(tx: Any, model: Any) -> Any:
    """Return a step that clips by the norm of a first backward pass, with a barrier between it and the second."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        first = jax.grad(model.unrolled)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(first)))
        params, norm = lax.optimization_barrier((params, norm))
        value, grads = jax.value_and_grad(model.unrolled)(params, batch)
        grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, 1.0 / norm).astype(leaf.dtype), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return state._replace(params=optax.apply_updates(params, updates), opt_state=opt_state), value

    return jax.jit(step, donate_argnums=0)


def _like(name: str, make: Any = None) -> Any:
    """Return the method of this name, with another `make` if given."""
    import dataclasses

    from benchmarks.jax_memory import METHODS

    (method,) = [method for method in METHODS if method.name == name]
    return method if make is None else dataclasses.replace(method, make=make)


def _compiled(method: Any, model: Any, dtype: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import jax

    from benchmarks.jax_memory import arguments, bytes_of, peak_of, transform_of

    tx = transform_of(method, OPTIMIZER)
    state, batch = arguments(method, tx, model, dtype=dtype)
    abstract = jax.eval_shape(state)
    started = time.perf_counter()
    made = method.make(tx, model).lower(abstract, jax.eval_shape(batch)).compile(compiler_options=options or None)
    seconds = time.perf_counter() - started
    peak = peak_of(made)["peak"]
    text = made.as_text()
    stack = rf"\[{model.layers},\d+[\d,]*\]\S* copy(?:-start)?\("
    return made, {
        "compile_seconds": seconds,
        "peak": peak,
        "peak_over_parameters": peak / bytes_of(abstract.params),
        "copies_of_stacks": len(re.findall(stack, text)),
        "conditionals": len(re.findall(r" conditional\(", text)),
        "flops": _first(made.cost_analysis()).get("flops"),
    }


def _first(analysis: Any) -> dict[str, Any]:
    """Return the first device's cost analysis; older versions of JAX return a list over devices."""
    return (analysis[0] if isinstance(analysis, list) else analysis) or {}


def _run(made: Any, method: Any, model: Any, dtype: Any, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of a step, and the allocator's peak if these steps raised it."""
    import jax

    from benchmarks.jax_memory import arguments, transform_of

    try:
        before = _allocated()
        state, batch = arguments(method, transform_of(method, OPTIMIZER), model, dtype=dtype)
        current, rows = jax.block_until_ready((jax.jit(state)(), batch()))
        taken = []
        for _ in range(rounds + 2):
            started = time.perf_counter()
            current, metrics = made(current, rows)
            jax.block_until_ready((current, metrics))
            taken.append(time.perf_counter() - started)
        after = _allocated()
        found: dict[str, Any] = {"step_ms": 1e3 * statistics.median(taken[2:])}
        if before is not None and after is not None and after > before:
            found["allocator_peak"] = after
        return found
    except Exception as error:
        return {"failed": failure(error)}


def _allocated() -> int | None:
    import jax

    peak: int | None = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return peak
