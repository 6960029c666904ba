"""Planned peak of a training step by the size of the model, torch's AdamW beside penstock's release.

    python -m benchmarks.plan_sizes [--output FILE]

Computed on tensors without memory, so that the figures are the same on every machine: see `penstock plan`.
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.support import RESULTS, parser_of, print_tables, write_result
from penstock.planner.plan import plan
from penstock.planner.settings import MODES, LlamaShape, Training

RESULT = RESULTS / "plan_sizes.json"
GIB = 2**30
SHAPES = {
    "1B": LlamaShape(layers=16, width=2048, heads=32, key_value_heads=8, hidden=8192, vocabulary=32000),
    "7B": LlamaShape(),
    "13B": LlamaShape(layers=40, width=5120, heads=40, hidden=13824),
    "70B": LlamaShape(layers=80, width=8192, heads=64, key_value_heads=8, hidden=28672),
}
COLUMNS = {
    "torch AdamW": ("torch", Training()),
    "AdamW released": ("release", Training(optimizer="AdamW")),
    "AdamW released, compact": ("release", Training(optimizer="AdamW", precision="compact")),
    "AdamW released, smallest": ("release", Training(optimizer="AdamW", precision="smallest")),
    "StableAdamW released": ("release", Training()),
    "Lion released, smallest": ("release", Training(optimizer="Lion", precision="smallest")),
}
"""Mode and settings by name; bfloat16, 1 x 2048 tokens, activation checkpointing. Another column is another row."""


def measure() -> dict[str, dict[str, int]]:
    """Return size -> column -> peak bytes, and "parameters"."""
    modes = {mode.name: mode for mode in MODES}
    return {
        size: {
            "parameters": shape.parameters,
            **{name: plan(shape, training, modes[mode]).peak for name, (mode, training) in COLUMNS.items()},
        }
        for size, shape in SHAPES.items()
    }


def main() -> None:
    """Plan, print a table, and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=RESULT)
    output = parser.parse_args().output
    figures = measure()
    table = Table("model", *COLUMNS, title="planned peak, GiB")
    for size, row in figures.items():
        table.add_row(size, *(f"{row[name] / GIB:.1f}" for name in COLUMNS))
    print_tables([table])
    training = Training()
    settings = {"dtype": training.dtype, "batch": training.batch, "sequence": training.sequence, "checkpointing": True}
    write_result(output, {"settings": settings, "figures": figures})


if __name__ == "__main__":
    main()
