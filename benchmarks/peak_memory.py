"""Peak memory of a training step, in units of the bytes of the parameters, for penstock's steps and the usual ones.

    python -m benchmarks.peak_memory --framework jax [--layers 16] [--width 512] [--devices 1] [--method PATTERN]

Without --output, the result of all methods on the default model is written to benchmarks/results/peak_memory_jax.json.
--sizes measures the steps of `jax_memory.OF_SIZES` for models with a large vocabulary instead, of few and of many layers, in
float32 and bfloat16, and writes benchmarks/results/peak_memory_jax_sizes.json.
--codings measures AdamW with states in 8 bits on one of these models, and writes peak_memory_jax_codings.json.
Parameters and Adam's two moments are the floor, 3.00. With several (virtual) devices, parameters, moments and the batch are
sharded over all of them as in FSDP, and the figures are those of one device and its share of the parameters.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.support import RESULTS, matching, parser_of, print_tables, write_result


def measure_jax(model: Any, patterns: list[str], codings: bool = False) -> dict[str, dict[str, dict[str, float]]]:
    """Return method -> optimizer -> figures, of `jax_memory.OPTIMIZERS` or CODINGS."""
    from benchmarks import jax_memory

    methods = {method.name: method for method in jax_memory.METHODS}
    chosen = [methods[name] for name in matching(methods, patterns)]
    optimizers = jax_memory.CODINGS if codings else jax_memory.OPTIMIZERS
    pairs = [(method, name) for method in chosen for name in optimizers if not (method.own and name.startswith("optax"))]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for method, optimizer in track(pairs, "compiling", console=Console(stderr=True), transient=True):
        found.setdefault(method.name, {})[optimizer] = jax_memory.measure(method, optimizer, model)
    return found


def measure_sizes() -> dict[str, dict[str, dict[str, float]]]:
    """Return "size: method" -> optimizer -> figures."""
    from benchmarks.jax_memory import OF_SIZES, SIZES

    return {
        f"{size}: {method}": by_optimizer
        for size, model in SIZES.items()
        for method, by_optimizer in measure_jax(model, list(OF_SIZES)).items()
    }


def table_of_steps(figures: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Return the table of `measure_jax`: steps by optimizers."""
    optimizers = list(dict.fromkeys(name for by_optimizer in figures.values() for name in by_optimizer))
    table = Table("step", *optimizers, title="peak bytes / parameter bytes")
    for name, by_optimizer in figures.items():
        cells = [by_optimizer.get(optimizer) for optimizer in optimizers]
        table.add_row(name, *("-" if cell is None else f"{cell['peak_over_parameters']:.2f}" for cell in cells))
    return table


def table_of_sizes(figures: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Return the table of `measure_sizes`: models by steps, with the figures of all optimizers in a cell."""
    rows: dict[str, dict[str, str]] = {}
    for name, by_optimizer in figures.items():
        size, step = name.split(": ", 1)
        cells = (f"{cell['peak_over_parameters']:.2f}" for cell in by_optimizer.values())
        rows.setdefault(size, {})[step] = " / ".join(cells)
    steps = list(next(iter(rows.values())))
    optimizers = " / ".join(next(iter(figures.values())))
    table = Table("model", *steps, title=f"peak bytes / parameter bytes: {optimizers}")
    for size, of_steps in rows.items():
        table.add_row(size, *(of_steps[step] for step in steps))
    return table


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--framework", choices=["jax"], default="jax")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument(
        "--method", action="append", metavar="PATTERN", help="only methods whose names match, as 'scan*'; may be repeated"
    )
    parser.add_argument("--sizes", action="store_true", help="models of several sizes with a vocabulary of 32768")
    parser.add_argument("--codings", action="store_true", help="AdamW with states in 8 bits, on one of the models of --sizes")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    if arguments.devices > 1:  # before JAX is imported
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    from benchmarks.jax_decoder import Decoder
    from benchmarks.jax_memory import CODED, OF_CODINGS, SIZES, ShardedDecoder

    model = (ShardedDecoder if arguments.devices > 1 else Decoder)(layers=arguments.layers, width=arguments.width)
    if arguments.codings:
        model, arguments.method = CODED, arguments.method or list(OF_CODINGS)
    figures = measure_sizes() if arguments.sizes else measure_jax(model, arguments.method or ["*"], arguments.codings)
    settings = {size: vars(each) for size, each in SIZES.items()} if arguments.sizes else vars(model)
    print_tables([table_of_sizes(figures) if arguments.sizes else table_of_steps(figures)])
    output = arguments.output
    if output is None and arguments.codings:
        output = RESULTS / f"peak_memory_{arguments.framework}_codings.json"
    elif output is None and arguments.method is None and model == Decoder():  # equal only to its own class
        output = RESULTS / f"peak_memory_{arguments.framework}{'_sizes' * arguments.sizes}.json"
    if output is not None:
        write_result(output, {"settings": {**settings, "devices": arguments.devices}, "figures": figures})


if __name__ == "__main__":
    main()
