"""The reverse walk in time: how long it compiles for more layers, and how long a step takes beside plain scan + remat.

    python -m benchmarks.jax_step_time [--rounds 11] [--output FILE]

Compile times are the best of three, each in a cleared cache. Step times are measured in turns, every candidate once a round;
the ratio is the median over the rounds. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.jax_decoder import Decoder
from benchmarks.jax_memory import plain
from benchmarks.record import write_result
from penstock.jax_frontend import init_train_state, make_release_step, stable_adamw

RESULT = Path(__file__).parent / "results" / "jax_step_time.json"
TX = stable_adamw(1e-3)
FEW, MANY = 8, 64
BASELINE = "plain scan + remat"


def compile_seconds(model: Decoder, repeats: int = 3) -> float:
    """Of tracing, lowering and compiling the walk; the shortest of some."""
    key = jax.random.key(0)
    state = jax.eval_shape(lambda: init_train_state(TX, model.params(key)))
    batch = jax.eval_shape(lambda: model.batch(key, 1))
    taken = []
    for _ in range(repeats):
        jax.clear_caches()
        step = make_release_step(model.stack, TX)
        started = time.perf_counter()
        step.lower(state, batch).compile()
        taken.append(time.perf_counter() - started)
    return min(taken)


def step_seconds(model: Decoder, rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by candidate."""
    key = jax.random.key(0)
    batch = model.batch(key, rows)
    candidates: dict[str, tuple[Any, bool]] = {
        BASELINE: (plain(model.rematerialised, TX), False),
        "plain scan": (plain(model.stack, TX), False),
        "make_release_step": (make_release_step(model.stack, TX), True),
        "make_release_step, saved residuals": (make_release_step(model.stack, TX, save_residuals=True), True),
        "make_release_step, max_norm": (make_release_step(model.stack, TX, max_norm=1.0), True),
    }
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    states = {name: init_train_state(TX, model.params(key), layered=layered) for name, (_, layered) in candidates.items()}
    for turn in range(-2, rounds):  # two rounds to warm up
        for name, (step, _) in candidates.items():
            started = time.perf_counter()
            states[name], metrics = step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            if turn >= 0:
                taken[name].append(time.perf_counter() - started)
    return taken


def main() -> None:
    """Measure, print tables, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", type=int, default=4, help="rows of the batch")
    parser.add_argument("--context", type=int, default=64, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    console = Console()

    few, many = (compile_seconds(Decoder(layers=layers)) for layers in (FEW, MANY))
    table = Table("layers", "seconds", title="compile time of make_release_step")
    table.add_row(str(FEW), f"{few:.2f}")
    table.add_row(str(MANY), f"{many:.2f}")
    table.add_row("ratio", f"{many / few:.2f}")
    console.print(table)

    model = Decoder(layers=arguments.layers, width=arguments.width, context=arguments.context)
    taken = step_seconds(model, arguments.rows, arguments.rounds)
    table = Table("step", "median ms", f"ratio to {BASELINE}", title=f"{model}, {arguments.rows} rows")
    figures = {}
    for name, times in taken.items():
        ratio = statistics.median(mine / base for mine, base in zip(times, taken[BASELINE], strict=True))
        figures[name] = {"median_ms": 1e3 * statistics.median(times), "ratio_to_remat": ratio}
        table.add_row(name, f"{figures[name]['median_ms']:.1f}", f"{ratio:.2f}")
    console.print(table)
    write_result(
        arguments.output,
        {
            "settings": {**vars(model), "rows": arguments.rows, "rounds": arguments.rounds},
            "compile_seconds": {str(FEW): few, str(MANY): many, "ratio": many / few},
            "step_time": figures,
        },
    )


if __name__ == "__main__":
    main()
