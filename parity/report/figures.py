"""The figures of the page, as SVG that stands inside of HTML and takes its colours from there."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

INK, LINE, RED = "#010203", "#040506", "#070809"  # stand for colours of the page
_THEME = {INK: "currentColor", LINE: "var(--line)", RED: "var(--bad)"}
COLOURS = ("#3987d6", "#e0812f", "#1fa187", "#b565b0", "#c59a12", "#7d8894")  # legible on light and on dark
MARKERS = "osD^vPX"
WIDTH = 6.6  # inches: legible on a phone, too
OTHERS = "other quantities"
SMALLEST = 1e-4  # of the ratios: what is below is drawn there

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.transparent": True,
    "figure.dpi": 100,
}


def ratios(rows: Rows, backends: Sequence[str]) -> str | None:
    """For every backend, each comparison's error in parts of its bound, by quantity; None where nothing is judged."""
    judged = [row for row in rows if row["within"] is not None and row["backend"] in backends]
    if not judged:
        return None
    quantities = [name for name in ("parameter", "exp_avg", "exp_avg_sq") if any(row["quantity"] == name for row in judged)]
    others = any(row["quantity"] not in quantities for row in judged)
    labels = [*quantities, OTHERS] if others else quantities
    figure, (axes,) = _figure("ratios", 0.34 * len(backends) + 1.3)
    generator = np.random.default_rng(0)
    finite = [value for row in judged if math.isfinite(value := _ratio(row))]
    right = 10.0 ** math.ceil(math.log10(max(10.0, *finite))) if finite else 10.0
    for place, backend in enumerate(backends):
        of_backend = [row for row in judged if row["backend"] == backend]
        for index, label in enumerate(labels):
            found = [
                _ratio(row) for row in of_backend if label == (row["quantity"] if row["quantity"] in quantities else OTHERS)
            ]
            values = np.clip([value if math.isfinite(value) else right for value in found], SMALLEST, right)
            shift = 0.5 * (index - (len(labels) - 1) / 2) / len(labels) * 1.4
            y = place + shift + generator.uniform(-0.07, 0.07, len(values))
            colour = COLOURS[index]
            axes.scatter(values, y, s=7, color=colour, alpha=0.65, linewidths=0, rasterized=True)
    axes.axvline(1.0, color=RED, linewidth=1.2)
    axes.set(xscale="log", xlim=(SMALLEST * 0.7, right * 1.4), ylim=(len(backends) - 0.4, -0.6))
    axes.set_yticks(range(len(backends)), backends)
    axes.set_xlabel(f"error / bound (at {SMALLEST:g}: that or less; at {right:g}: not a number, or it raised)")
    axes.grid(False, axis="y")
    handles = [axes.scatter([], [], s=14, color=COLOURS[index], label=label) for index, label in enumerate(labels)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(labels))
    return _svg(figure, "ratios", "Error in parts of its bound, one dot a comparison, one row a backend; the bound is at 1.")


def growth(rows: Rows, backends: Sequence[str]) -> str | None:
    """Relative error of parameters against the number of steps, and its bound, by dtype and compensation.

    Geometric means over the cases that are run for every number of steps; None where there are not two of these.
    """
    rows = [row for row in rows if row["quantity"] == "parameter" and row["relative_error"] and row["relative_bound"]]
    counts = sorted({row["steps"] for row in rows})
    steps_of: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        steps_of.setdefault((row["case"], row["backend"]), set()).add(row["steps"])
    whole = [row for row in rows if len(steps_of[row["case"], row["backend"]]) == len(counts)]
    panels = list(dict.fromkeys(stored_as(row["case"]) for row in whole))
    if len(counts) < 2 or not panels:
        return None
    figure, panel_axes = _figure("growth", 1.9 * math.ceil(len(panels) / 2) + 0.6, len(panels))
    handles: dict[str, Any] = {}
    for axes, panel in zip(panel_axes, panels, strict=False):
        members = [row for row in whole if stored_as(row["case"]) == panel]
        for number, backend in enumerate(backends):
            means = _means([row for row in members if row["backend"] == backend], "relative_error")
            if means:
                (handles[backend],) = axes.plot(
                    list(means),
                    list(means.values()),
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=3.5,
                    linewidth=1.2,
                    label=backend,
                )
        bounds = _means(members, "relative_bound")
        (handles["bound"],) = axes.plot(list(bounds), list(bounds.values()), "--", color=RED, linewidth=1.2, label="bound")
        axes.set(xscale="log", yscale="log", title=panel)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    for axes in panel_axes[-2:]:
        axes.set_xlabel("steps")
    figure.legend(handles=list(handles.values()), loc="outside upper center", ncols=5)
    return _svg(figure, "growth", "Relative error of the parameters against the number of steps, with the bound, by dtype.")


def live_bytes(rows: Rows) -> str | None:
    """Measured bytes of live gradient beside those of the ledger; None where no row has both."""
    rows = [row for row in rows if row["data"] and {"measured", "ledger"} <= set(row["data"])]
    if not rows:
        return None
    names = [f"{row['case'].split('/', 1)[-1]}, {row['backend']}" for row in rows]
    figure, (axes,) = _figure("memory", 0.34 * len(rows) + 1.2)
    places = np.arange(len(rows))
    for offset, key, colour in ((-0.18, "ledger", COLOURS[5]), (0.18, "measured", COLOURS[0])):
        values = [row["data"][key] / 1024 for row in rows]
        axes.barh(places + offset, values, height=0.34, color=colour, label=key)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("peak of live gradient, KiB")
    figure.legend(loc="outside upper center", ncols=2)
    return _svg(figure, "memory", "Peak bytes of live gradient: what the ledger says, and what was measured.")


def stored_as(case: str) -> str:
    """Dtype and compensation of a case of plain updates."""
    parts = case.split("/")
    dtype, compensation = parts[2], parts[3]
    return dtype if compensation == "none" and dtype.endswith(("32", "64")) else f"{dtype}, {compensation}"


def _ratio(row: Mapping[str, Any]) -> float:
    return math.inf if row["ratio"] is None else row["ratio"]


def _means(rows: Rows, field: str) -> dict[int, float]:
    """Geometric means by number of steps."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(row["steps"], []).append(math.log(row[field]))
    return {steps: math.exp(sum(values) / len(values)) for steps, values in sorted(found.items())}


def _figure(name: str, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        columns = min(panels, 2)
        grid = figure.subplots(math.ceil(panels / columns), columns, squeeze=False)
        axes = list(grid.flat)
        for unused in axes[panels:]:
            unused.set_visible(False)
        return figure, axes[:panels]


def _svg(figure: Figure, name: str, alternative: str) -> str:
    """The figure as an element of HTML: ids of its own, the page's colours, nothing that points elsewhere."""
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(written, format="svg", dpi=200, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for stands_for, colour in _THEME.items():
        text = text.replace(stands_for, colour)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(alternative)}"', 1)
