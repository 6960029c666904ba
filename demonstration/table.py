"""The table of results."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .results import MIB, Run, relative_difference


def closing_table(runs: Sequence[Run], *, tokens: int, model: str, parameter_bytes: int) -> Table:
    """Return the table of all runs, compared with the first.

    Args:
        runs: one or more; differences are relative to the first.
        tokens: that each run has learned from.
        model: a few words for the title.
        parameter_bytes: of all parameters; the two moments of AdamW are as large each.
    """
    reference = runs[0]
    table = Table(
        title=model,
        caption=(
            "Difference: the largest over all tensors of max|p - p1|/max|p1|, p1 being the parameters of the first run. "
            "Gradient alive: peak over the whole run, counted by storage. Whole step: most bytes that a compiled step holds, "
            f"by XLA's analysis: parameters and moments ({_mebibytes(3 * parameter_bytes)}), gradients and activations."
        ),
        caption_justify="left",
    )
    table.add_column("run")
    memory = ("optimizer\nstate", "gradient alive,\npeak", "whole step,\npeak (JAX)")
    for heading in ("final loss", "tokens/s", "difference\nfrom first run", *memory):
        table.add_column(heading, justify="right")
    for run in runs:
        difference = relative_difference(run.parameters, reference.parameters)
        table.add_row(
            run.name,
            f"{run.losses[-1]:.6f}",
            f"{tokens / run.seconds:,.0f}",
            "-" if run is reference else "0 (bitwise)" if difference == 0 else f"{difference:.1e}",
            _mebibytes(run.state_bytes),
            _mebibytes(run.peak_gradient_bytes),
            _mebibytes(run.peak_step_bytes),
        )
    return table


def _mebibytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:.2f} MiB"
