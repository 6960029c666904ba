"""make_update on many small leaves and optax.adamw, jitted and donated by hand, timed in turns.

Where arrays lie in memory changes the ratio of two updates by up to a sixth in either direction: that of the update by hand and
a second copy of itself, too. So the arrays are made anew several times, and the ratio is the median over these arrangements
and over several processes.

    python -m benchmarks.release_overhead.jax_update LEAVES ROUNDS    # one process: prints JSON
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.support import Goal, run_child
from penstock.jax_frontend import adamw, make_update, stable_adamw

LEAVES, WIDTH, LR, WARM_UP, ARRANGEMENTS, PROCESSES = (150, 1500), 16, 1e-3, 2, 8, 3
BASELINE = "optax.adamw, jitted and donated by hand"
AT_MOST = 1.15

Update = Callable[[Any, Any, Any], tuple[Any, Any]]


def by_hand(tx: optax.GradientTransformation) -> Update:
    """Return the update that a user would write: (grads, state, params) -> (params, state), all three donated."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1, 2))


def measure(leaves: int, rounds: int, processes: int = PROCESSES) -> dict[str, dict[str, Any]]:
    """Return medians over processes by candidate: milliseconds of an update, seconds of the first, ratio to the baseline.

    "ratios" has the ratio in each process.
    """
    module = "benchmarks.release_overhead.jax_update"
    found = [run_child(module, str(leaves), str(rounds)) for _ in range(processes)]
    medians: dict[str, dict[str, Any]] = {}
    for name in found[0]:
        rows = [one[name] for one in found]
        medians[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        medians[name]["ratios"] = [row["ratio"] for row in rows]
    return medians


def measure_here(leaves: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures of this process."""
    transforms: dict[str, tuple[Callable[[Any], Any], Any]] = {
        BASELINE: (by_hand, optax.adamw(LR)),
        "make_update(optax.adamw)": (make_update, optax.adamw(LR)),
        "make_update(adamw)": (make_update, adamw(LR)),
        "make_update(stable_adamw)": (make_update, stable_adamw(LR)),
    }
    key = jax.random.key(0)
    params = {f"leaf {number}": jax.random.normal(jax.random.fold_in(key, number), (WIDTH, WIDTH)) for number in range(leaves)}
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # donated arrays must be new each time
    updates = {name: make(tx) for name, (make, tx) in transforms.items()}
    medians: dict[str, list[float]] = {name: [] for name in updates}
    first: dict[str, float] = {}
    held: list[Any] = []  # moves the arrays of the next arrangement to other places
    with warnings.catch_warnings():  # the update by hand has no output for the gradients' buffers, so jax warns
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for _ in range(ARRANGEMENTS):
            order = random.sample(list(transforms.items()), len(transforms))  # the first arrays get the best places
            states = {name: (copied(params), tx.init(params)) for name, (_, tx) in order}
            taken: dict[str, list[float]] = {name: [] for name in updates}
            for _ in range(WARM_UP + max(1, rounds // ARRANGEMENTS)):
                for name, update in random.sample(list(updates.items()), len(updates)):
                    grads = jax.block_until_ready(copied(params))
                    own, state = states.pop(name)
                    started = time.perf_counter()
                    states[name] = update(grads, state, own)
                    jax.block_until_ready(states[name][0])  # one program: the state is ready with the parameters
                    del grads, own, state  # freeing donated arrays is part of the update
                    taken[name].append(time.perf_counter() - started)
            for name, times in taken.items():
                first.setdefault(name, times[0])
                medians[name].append(statistics.median(times[WARM_UP:]))
            held.append(jnp.zeros(random.randrange(1, WIDTH**2 * leaves)))
    return {
        name: {
            "first_s": first[name],
            "median_ms": 1e3 * statistics.median(found),
            "ratio": statistics.median(one / base for one, base in zip(found, medians[BASELINE], strict=True)),
        }
        for name, found in medians.items()
    }


def goals(leaves: int, found: dict[str, dict[str, Any]]) -> list[Goal]:
    """Return the goals for the rows with the baseline's rule."""
    rows = ("make_update(optax.adamw)", "make_update(adamw)")
    return [Goal(f"JAX, {leaves} leaves: {row} / by hand", AT_MOST, found[row]["ratio"]) for row in rows]


if __name__ == "__main__":
    print(json.dumps(measure_here(*map(int, sys.argv[1:]))))
