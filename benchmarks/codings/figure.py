"""The figure of docs/benchmarks.md: how far the loss with each coding is from float32, one dot a seed. Drawn from the JSON."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .rows import LIMIT, ROWS
from .verdicts import FRAMEWORKS, drawn

COLOURS = {"torch": "#d9541e", "jax": "#2166ac"}


def digest(result: Mapping[str, Any]) -> str:
    """Return a number of what the figure shows; the file holds it, so that a test can tell whether it is up to date."""
    return hashlib.sha256(json.dumps(drawn(result), sort_keys=True).encode()).hexdigest()


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the figure as PNG: linear up to the limit, logarithmic beyond."""
    found = drawn(result)
    names = [name for name in ROWS if any(name in rows for rows in found.values())][::-1]
    figure = Figure(figsize=(9, 0.8 + 0.42 * len(names)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvspan(-LIMIT, LIMIT, color="#000000", alpha=0.07, label=f"±{LIMIT}")
    for framework, height in zip(FRAMEWORKS, (0.16, -0.16), strict=True):
        for name, seeds in found[framework].items():
            at = names.index(name) + height
            axes.plot(seeds, [at] * len(seeds), ".", color=COLOURS[framework], alpha=0.45, markersize=6)
            axes.plot(statistics.fmean(seeds), at, "|", color=COLOURS[framework], markersize=12, markeredgewidth=2.5)
        label = f"{FRAMEWORKS[framework]}, mean of the seeds"
        axes.plot([], [], "|", color=COLOURS[framework], markeredgewidth=2.5, label=label)
    axes.set_xscale("symlog", linthresh=LIMIT, linscale=2.0)
    axes.set(xlabel="loss less that of the float32 run, nats per byte", yticks=range(len(names)), yticklabels=names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    ticks = [-LIMIT, -LIMIT / 3, 0.0, LIMIT / 3, LIMIT, 10 * LIMIT]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Description": digest(result), "Software": None})
