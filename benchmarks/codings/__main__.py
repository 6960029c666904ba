"""Train a small transformer with every coding of parameters and states, in PyTorch and in JAX, and compare with float32.

    python -m benchmarks.codings [--rows PATTERN ...] [--seeds N] [--frameworks NAME ...] [--quick] [--out DIR]

The demonstration's byte-level transformer, for each seed from one initialisation and on the same batches. The law: over all
seeds, the mean loss of the last 50 steps is within 0.003 of the float32 runs' for every coding, and is not for bfloat16 without
compensation, so that the comparison can see a difference. Parameters are upcast to float32, and all else is computed in it, so
that nothing but the coding differs.

One process a framework, one thread each. Writes codings.json and codings.png to the directory; what is there already, of the
same settings, is not trained again, so that a run that was interrupted goes on. Exit status: 1 if a goal is not met.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.table import Table

from benchmarks.support import goals_table, matching, parser_of, print_tables

from . import figure
from .rows import LAST, ROWS
from .training import measure
from .verdicts import FRAMEWORKS, HEADING, goals, table_rows

JSON, PNG = "codings.json", "codings.png"
SEEDS = 5


def main(arguments: list[str] | None = None) -> int:
    """Train, print tables, write the figures; 0 if all goals are met, else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="as 'split*', and their bases")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, to test it; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="default: bench")
    given = parser.parse_args(arguments)
    asked = matching(ROWS, given.rows)
    names = [name for name in ROWS if name in asked or name in {ROWS[each].base for each in asked}]
    content = measure(names, given.seeds, given.frameworks, given.out / JSON, quick=given.quick)
    table = Table(*HEADING, title=f"mean loss of the last {LAST} steps")
    for cells in table_rows(content["losses"]):
        table.add_row(*cells)
    reached = goals(content["losses"])
    print_tables([table, goals_table(reached)])
    if reached:
        figure.draw(content, given.out / PNG)
    return 0 if all(goal.met for goal in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
