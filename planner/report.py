"""Plans as a table for the terminal, and as a JSON file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.array_ops import numpy_dtype
from .plan import Plan
from .settings import LlamaShape, Training

SCHEMA = 3
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
LEFT = (0, 8)  # the columns of text: mode and result
KINDS = ("parameters", "optimizer state", "gradients", "activations and temporaries")


def title(training: Training, plans: Sequence[Plan]) -> str:
    """Return what the table shows; it names the optimizer, and which of its settings are not its defaults."""
    settings = f"({training.changed})" if training.changed else " with its defaults"
    unit, _ = _unit(plans)
    return f"{training.optimizer}{settings}: most bytes alive in a step, {unit}, and what they are at that moment"


def table(plans: Sequence[Plan]) -> list[list[str]]:
    """Return the headings, and a line for each mode: the peak, its parts, and how much less than plain (or the first mode)."""
    _, size = _unit(plans)

    def shown(nbytes: int) -> str:
        return f"{nbytes / size:.2f}"

    base = next((plan for plan in plans if plan.mode == "plain"), plans[0])
    headings = [
        "mode",
        "peak",
        "parameters",
        "optimizer\nstate",
        "gradients",
        "activations,\ntemporaries",
        "peak\ngradients",
        f"less than\n{base.mode}",
    ]
    return [
        [*headings, "result"],
        *(
            [
                plan.mode,
                shown(plan.peak),
                *(shown(plan.by_kind.get(kind, 0)) for kind in KINDS),
                "" if plan.ledger is None else shown(plan.ledger),
                "" if plan is base else f"{1 - plan.peak / base.peak:z.1%}",
                plan.result,
            ]
            for plan in plans
        ),
    ]


def _unit(plans: Sequence[Plan]) -> tuple[str, int]:
    return next((unit, size) for unit, size in UNITS.items() if plans[0].peak >= size)


def counted(number: int) -> str:
    """Return a number of parameters as people say it: 6.74 billion, 290 million, 12 thousand."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return str(number)


def summary(shape: LlamaShape, training: Training, plans: Sequence[Plan]) -> list[str]:
    """Return what was planned, and what the figures leave out."""
    kept = ", ".join(f"{name} {dtype}" for name, dtype in training.kept.items())
    rest = ", ".join(f"{name} {dtype}" for name, dtype in training.kept_of_rest.items())
    mixed = f"; {training.kept_bytes_of_rest:.4g} of embeddings, heads and norms: {rest}" if len(training.rules) > 1 else ""
    muon = ", Muon's what its operations do" if any(rule.of_matrix for rule in training.rules) else ""
    choice = f"with {training.changed}" if training.changed else "by default"
    checkpointing = "with" if training.checkpointing else "without"
    micro = f" in {training.micro_batches} micro-batches" if training.micro_batches > 1 else ""
    sequences = "1 sequence" if training.batch == 1 else f"{training.batch} sequences"
    of_torch = numpy_dtype(training.dtype).itemsize * 3
    return [
        f"{counted(shape.parameters)} parameters in {shape.layers} layers. {training.optimizer} keeps "
        f"{training.kept_bytes:.4g} bytes for each {choice}: {kept}{mixed}. {sequences} of {training.sequence} tokens{micro}, "
        f"{checkpointing} activation checkpointing.",
        *_cheaper(training),
        *(
            [f"torch's own AdamW keeps {of_torch} bytes for each: parameter and moments in {training.dtype}, no compensation."]
            if any(plan.mode == "torch" for plan in plans)
            else []
        ),
        f"The update allocates nothing (as a fused kernel's){muon}; workspaces inside kernels, an allocator's rounding and its "
        "fragmentation are not counted. Gradients that backward is about to hand over count as temporaries at the peak; "
        "'peak gradients' is the release's own account over the whole step.",
    ]


def _cheaper(training: Training) -> list[str]:
    """Return what the lost bits cost, and the setting without them, where bfloat16 parameters keep them."""
    if training.dtype != "bfloat16" or "compensation" not in training.kept:
        return []
    stochastic = dataclasses.replace(training, compensation="stochastic")
    return [
        f"The compensation keeps the bits that bfloat16 parameters lose. --compensation stochastic keeps "
        f"{stochastic.kept_bytes:.4g} bytes for each, small steps being right in the mean; none keeps as many, and loses them."
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
        "training": {**dataclasses.asdict(training), "kept": training.kept, "kept_bytes": training.kept_bytes}
        | ({"kept_of_rest": training.kept_of_rest} if len(training.rules) > 1 else {}),
        "plans": [dataclasses.asdict(plan) for plan in plans],
    }
