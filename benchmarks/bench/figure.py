"""The figure of the README: peak bytes by method, beside loss curves of the same methods. Drawn from the JSON alone."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .tables import peak_per_parameter

ROWS = (
    ("float32: torch AdamW", "torch AdamW fused plain", "fp32", "#9ecae1"),
    ("torch AdamW in hooks", "torch AdamW fused in hooks", "fp32", "#08519c"),
    ("optimi AdamW, released", "optimi AdamW release", "fp32", "#fd8d3c"),
    ("penstock AdamW, released", "penstock AdamW release, default", "fp32", "#000000"),
    ("bfloat16: torch AdamW", "torch AdamW fused plain", "bf16", "#a1d99b"),
    ("torch AdamW in hooks, bfloat16", "torch AdamW fused in hooks", "bf16", "#006d2c"),
    ("penstock AdamW, released, exact", "penstock AdamW release, default", "bf16", "#88419d"),
    ("penstock AdamW, released, compact", "penstock AdamW release, compact", "bf16", "#dd3497"),
    ("penstock AdamW, released, smallest", "penstock AdamW release, smallest", "bf16", "#7f2704"),
)
"""Label, method of `benchmarks.methods`, dtype and colour. Another method is another row."""

LAST = 50
PAIRS = tuple((name, dtype) for _, name, dtype, _ in ROWS)


def drawn(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the figure shows, by label: bytes for each parameter, and losses; only rows that have both."""
    memory, losses = result["memory"]["rows"], result["loss"]["rows"]
    return {
        label: {
            "bytes": round(peak_per_parameter(memory[name][dtype], dtype), 2),
            "losses": losses[f"{name}, {dtype}"],
            "colour": colour,
        }
        for label, name, dtype, colour in ROWS
        if dtype in memory.get(name, {}) and f"{name}, {dtype}" in losses
    }


def digest(result: Mapping[str, Any]) -> str:
    """Return a number of what the figure shows; the file holds it, so that a test can tell whether it is up to date."""
    return hashlib.sha256(json.dumps(drawn(result), sort_keys=True).encode()).hexdigest()


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the figure as PNG."""
    rows = drawn(result)
    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    bars, curves = figure.subplots(1, 2)
    labels = list(rows)[::-1]
    values = [rows[label]["bytes"] for label in labels]
    drawn_bars = bars.barh(labels, values, color=[rows[label]["colour"] for label in labels], height=0.7)
    bars.bar_label(drawn_bars, fmt="%.1f", padding=3)
    shape = result["memory"]["model"]
    bars.set(
        title=f"Most resident bytes for each parameter\n(Llama, {shape['layers']} layers of width {shape['width']}, CPU)",
        xlabel="bytes: parameter, state, gradient, activations",
        xlim=(0, 1.12 * max(values)),
    )
    for number, (label, row) in enumerate(rows.items()):
        broad = 5.0 if number == 0 else 1.6
        curves.plot(range(1, len(row["losses"]) + 1), row["losses"], label=label, color=row["colour"], linewidth=broad)
    means = [statistics.fmean(row["losses"][-LAST:]) for row in rows.values()]
    spread = f"{min(means):.2f} to {max(means):.2f}"
    title = f"Loss of the same methods, same start and batches\n(mean of the last {LAST} steps: {spread})"
    curves.set(title=title, xlabel="step")
    curves.set_ylabel("cross entropy, nats per byte")
    curves.grid(alpha=0.3)
    curves.legend(fontsize=8)
    figure.savefig(path, metadata={"Description": digest(result), "Software": None})
