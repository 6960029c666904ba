"""Plans as a table for the terminal, and as a JSON file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .plan import Plan
from .settings import LlamaShape, Training

SCHEMA = 2
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
KINDS = ("parameters", "optimizer state", "gradients", "activations and temporaries")


def table(training: Training, plans: Sequence[Plan]) -> Table:
    """Return a table with a line for each mode: the peak, its parts, and the difference from the first mode.

    The title names the optimizer, and which of its settings are not its defaults.
    """
    unit, size = next((unit, size) for unit, size in UNITS.items() if plans[0].peak >= size)

    def shown(nbytes: int) -> str:
        return f"{nbytes / size:.2f}"

    settings = f"({training.changed})" if training.changed else " with its defaults"
    made = Table(title=f"{training.optimizer}{settings}: most bytes alive in a step, {unit}, and what they are at that moment")
    made.add_column("mode", no_wrap=True)
    for name in ("peak", "parameters", "optimizer state", "gradients", "activations, temporaries", "peak gradients", "saved"):
        made.add_column(name, justify="right")
    made.add_column("result")
    for plan in plans:
        saved = 1 - plan.peak / plans[0].peak
        made.add_row(
            plan.mode,
            shown(plan.peak),
            *(shown(plan.by_kind.get(kind, 0)) for kind in KINDS),
            "" if plan.ledger is None else shown(plan.ledger),
            "" if plan is plans[0] else f"{saved:z.1%}",
            plan.result,
        )
    return made


def summary(shape: LlamaShape, training: Training) -> list[str]:
    """Return what was planned, and what the figures leave out."""
    kept = ", ".join(f"{name} {dtype}" for name, dtype in training.kept.items())
    choice = f"with {training.changed}" if training.changed else "by default"
    checkpointing = "with" if training.checkpointing else "without"
    micro = f" in {training.micro_batches} micro-batches" if training.micro_batches > 1 else ""
    return [
        f"{shape.parameters / 1e9:.2f}e9 parameters in {shape.layers} layers. {training.optimizer} keeps {training.kept_bytes} "
        f"bytes for each {choice}: {kept}. {training.batch} sequences of {training.sequence} tokens{micro}, {checkpointing} "
        "activation checkpointing.",
        "The update allocates nothing (as a fused kernel's); workspaces inside kernels, an allocator's rounding and its "
        "fragmentation are not counted. Gradients that backward is about to hand over count as temporaries at the peak; "
        "'peak gradients' is the release's own account over the whole step.",
    ]


def document(
    shape: LlamaShape,
    training: Training,
    plans: Sequence[Plan],
    *,
    version: str,
    command: Sequence[str],
    versions: Mapping[str, str | None],
) -> dict[str, Any]:
    """Everything that the JSON file says; `version` is penstock's, `versions` are those of the packages it depends on."""
    return {
        "schema": SCHEMA,
        "penstock": version,
        "command": " ".join(command),
        "versions": dict(versions),
        "shape": {**dataclasses.asdict(shape), "parameters": shape.parameters},
        "training": {**dataclasses.asdict(training), "kept": training.kept, "kept_bytes": training.kept_bytes},
        "plans": [dataclasses.asdict(plan) for plan in plans],
    }
