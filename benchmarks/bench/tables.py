"""The tables of a result, as rows of text: for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ITEMSIZE = {"fp32": 4, "bf16": 2}
TORCH = (
    "PyTorch",
    "step, ms",
    "first step, ms",
    "a gradient, us",
    "peak, fp32",
    "peak, bf16",
    "state, fp32",
    "state, bf16",
    "error, fp32",
    "error, bf16",
)
JAX = ("JAX", "step, ms", "first step, ms", "peak", "state", "error")
NOTES = {
    "torch": (
        "Step: forward, backward and update of the medium model of `benchmarks.release_overhead` (100 tensors, fp32), in "
        "turns. First step: the very first; of a plain optimizer without the backward pass. A gradient: what a method adds to "
        "a backward pass for each of 150 small tensors, on one thread. Peak: most resident bytes for each parameter, the "
        "parameter itself included, in a process of its own: 3 steps of a Llama, 64 tokens, activation checkpointing. State: "
        "bytes that the optimizer keeps for each parameter. Error: of the parameters after {updates} updates of one matrix at "
        "a small learning rate, relative to float64 (cases B of `penstock parity`); of a parameter with an "
        "8-bit remainder, see `benchmarks.codings`."
    ),
    "jax": (
        "One decoder, fp32; peak and state in bytes for each parameter, the peak by XLA's analysis of the compiled program. "
        "First step: compilation included. Micro-batches: 4 of one row, elsewhere one row."
    ),
}


def torch_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of PyTorch's methods: "-" where nothing was measured."""
    memory, times, errors = (result.get(section, {}).get("rows", {}) for section in ("memory", "time", "error"))
    names = dict.fromkeys([*memory, *times, *errors])

    def row(name: str) -> list[str]:
        of_dtypes = {dtype: memory.get(name, {}).get(dtype) for dtype in ITEMSIZE}
        time = times.get(name, {})
        return [
            name,
            shown(time.get("step_ms"), ".1f"),
            shown(time.get("first_ms"), ".0f"),
            shown(time.get("gradient_us"), ".1f"),
            *(shown(each and peak_per_parameter(each, dtype), ".1f") for dtype, each in of_dtypes.items()),
            *(
                shown(each and each["state_bytes"] / (each["parameter_bytes"] / ITEMSIZE[dtype]), ".1f")
                for dtype, each in of_dtypes.items()
            ),
            *(shown(errors.get(name, {}).get(dtype), ".1e") for dtype in ITEMSIZE),
        ]

    return [row(name) for name in names]


def jax_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of JAX's methods."""
    return [
        [
            name,
            shown(row.get("step_ms"), ".0f"),
            shown(row.get("first_ms"), ".0f"),
            *(f"{4 * row[key] / row['parameter_bytes']:.1f}" for key in ("peak_bytes", "state_bytes")),
            f"{row['error']:.1e}",
        ]
        for name, row in result.get("jax", {}).get("rows", {}).items()
    ]


def peak_per_parameter(row: Mapping[str, float], dtype: str) -> float:
    """Return the most resident bytes for each parameter, the parameter itself included."""
    return ITEMSIZE[dtype] * (1 + row["above_model_bytes"] / row["parameter_bytes"])


def note(framework: str, result: Mapping[str, Any]) -> str:
    """Return the conditions of a table."""
    return NOTES[framework].format(updates=result.get("error", {}).get("steps", "-"))


def shown(value: float | None, digits: str) -> str:
    """Return a number as text, or "-" where there is none."""
    return "-" if value is None else f"{value:{digits}}"
