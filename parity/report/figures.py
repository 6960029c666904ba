"""The figures of the page, as SVG that stands inside of HTML and takes its colours from there."""

from __future__ import annotations

import functools
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

INK, LINE, RED = "#010203", "#040506", "#070809"  # stand for colours of the page
_THEME = {INK: "currentColor", LINE: "var(--line)", RED: "var(--bad)"}
COLOURS = ("#3987d6", "#e0812f", "#1fa187", "#b565b0", "#c59a12", "#7d8894")  # legible on light and on dark
GREY = COLOURS[-1]
MARKERS = "osD^vPX"
WIDTH = 6.6  # inches: legible on a phone, too
OTHERS = "other quantities"
SMALLEST, LARGEST = 1e-4, 1e4  # of the ratios: what is outside is drawn there

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "parity",  # the same file each time
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


def _styled(draw: Callable[..., str | None]) -> Callable[..., str | None]:
    """Draw in the style of the page, whatever the style of the process."""

    @functools.wraps(draw)
    def styled(*arguments: Any) -> str | None:
        import matplotlib as mpl

        with mpl.rc_context(_STYLE):
            return draw(*arguments)

    return styled


@_styled
def ratios(rows: Rows, backends: Sequence[str]) -> str | None:
    """For every backend, each comparison's error in parts of its bound, by quantity; None where nothing is judged."""
    judged = [row for row in rows if row["within"] is not None and row["backend"] in backends]
    if not judged:
        return None
    quantities = [name for name in ("parameter", "exp_avg", "exp_avg_sq") if any(row["quantity"] == name for row in judged)]
    others = any(row["quantity"] not in quantities for row in judged)
    labels = [*quantities, OTHERS] if others else quantities
    figure, (axes,) = _figure(0.34 * len(backends) + 1.3)
    generator = np.random.default_rng(0)
    largest = max(min(_ratio(row), LARGEST) for row in judged)
    right = 10.0 ** max(1, math.ceil(math.log10(largest or 1.0)))
    for place, backend in enumerate(backends):
        of_backend = [row for row in judged if row["backend"] == backend]
        for index, label in enumerate(labels):
            found = [
                _ratio(row) for row in of_backend if label == (row["quantity"] if row["quantity"] in quantities else OTHERS)
            ]
            values = np.clip(found, SMALLEST, right)
            shift = 0.5 * (index - (len(labels) - 1) / 2) / len(labels) * 1.4
            y = place + shift + generator.uniform(-0.07, 0.07, len(values))
            colour = COLOURS[index]
            axes.scatter(values, y, s=7, color=colour, alpha=0.65, linewidths=0, rasterized=True)
    axes.axvline(1.0, color=RED, linewidth=1.2)
    axes.set(xscale="log", xlim=(SMALLEST * 0.7, right * 1.4), ylim=(len(backends) - 0.4, -0.6))
    axes.set_yticks(range(len(backends)), backends)
    axes.set_xlabel(f"error / bound (at {SMALLEST:g}: that or less; at {right:g}: that or more, or no number)")
    axes.grid(False, axis="y")
    handles = [axes.scatter([], [], s=14, color=COLOURS[index], label=label) for index, label in enumerate(labels)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(labels))
    return _svg(figure, "ratios", "Error in parts of its bound, one dot a comparison, one row a backend; the bound is at 1.")


@_styled
def growth(rows: Rows, backends: Sequence[str]) -> str | None:
    """Relative error of the parameters against the number of steps, and its bound, by dtype and compensation.

    Each panel is one case of the longest runs, that which most backends have run; None where there is one number of steps.
    """
    rows = [row for row in rows if row["quantity"] == "parameter" and row["relative_error"] and row["relative_bound"]]
    longest = max((row["steps"] for row in rows), default=0)
    runs: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for case in dict.fromkeys(row["case"] for row in rows if row["steps"] == longest):
        of_case = runs.setdefault(stored_as(case), {})
        of_case[case] = [row for row in rows if row["case"] == case]
    counts = sorted({row["steps"] for of_case in runs.values() for found in of_case.values() for row in found})
    if len(counts) < 2:
        return None
    figure, panels = _figure(2.0 * math.ceil(len(runs) / 2) + 0.6, len(runs))
    handles: dict[str, Any] = {}
    for axes, of_case in zip(panels, runs.values(), strict=True):
        case = max(of_case, key=lambda name: len({row["backend"] for row in of_case[name]}))
        found = sorted(of_case[case], key=lambda row: row["steps"])
        for number, backend in enumerate(backends):
            line = {row["steps"]: row["relative_error"] for row in found if row["backend"] == backend}
            if line:
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                look: Any = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.2, "alpha": 0.85}
                (handles[backend],) = axes.plot(list(line), list(line.values()), label=backend, **look)
        bounds = {row["steps"]: row["relative_bound"] for row in found}
        (handles["bound"],) = axes.plot(list(bounds), list(bounds.values()), "--", color=RED, linewidth=1.2, label="bound")
        axes.set(xscale="log", yscale="log", title="/".join(case.split("/")[:4]))
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    for axes in panels[-2:]:
        axes.set_xlabel("steps")
    figure.legend(handles=list(handles.values()), loc="outside upper center", ncols=5)
    return _svg(figure, "growth", "Relative error of the parameters against the number of steps, with the bound, by dtype.")


@_styled
def live_bytes(rows: Rows) -> str | None:
    """Peaks of live gradient, measured and by the ledger, and how they come about; None where nothing was measured.

    Of rows whose data has `found` and `expected` bytes and a `timeline`, (name, bytes alive) for each gradient that arrives.
    """
    rows = [row for row in rows if row["quantity"] == "peak, measured" and row["data"] and "timeline" in row["data"]]
    if not rows:
        return None
    several = len({row["backend"] for row in rows}) > 1
    names = [row["data"]["policy"] + (f", {row['backend']}" if several else "") for row in rows]
    figure, (peaks, course) = _figure(max(2.6, 0.34 * len(rows) + 1.2), 2)
    places = np.arange(len(rows))
    for offset, key, label, colour in ((-0.18, "expected", "ledger", GREY), (0.18, "found", "measured", COLOURS[0])):
        peaks.barh(places + offset, [row["data"][key] / 1024 for row in rows], height=0.34, color=colour, label=label)
    peaks.set_yticks(places, names)
    peaks.invert_yaxis()
    peaks.grid(False, axis="y")
    peaks.set_xlabel("peak of live gradient, KiB")
    peaks.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    drawn: dict[tuple[float, ...], list[str]] = {}
    for row in rows:
        if row["backend"] == rows[0]["backend"]:
            drawn.setdefault(tuple(alive / 1024 for _, alive in row["data"]["timeline"]), []).append(row["data"]["policy"])
    for number, (alive, policies) in enumerate(drawn.items()):
        course.step(
            range(1, len(alive) + 1), alive, where="post", color=COLOURS[number % len(COLOURS)], label=", ".join(policies)
        )
    course.set_ylim(bottom=0)
    course.set(xlabel="gradients that have arrived", ylabel="alive, KiB")
    course.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return _svg(
        figure, "memory", "Live bytes of gradient by policy: peaks by the ledger and as measured, and over the backward pass."
    )


def stored_as(case: str) -> str:
    """Dtype and compensation of a case of plain updates."""
    parts = case.split("/")
    dtype, compensation = parts[2], parts[3]
    return dtype if compensation == "none" and dtype.endswith(("32", "64")) else f"{dtype}, {compensation}"


def _ratio(row: Mapping[str, Any]) -> float:
    return math.inf if row["ratio"] is None else row["ratio"]


def _figure(height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure, its panels in two columns if there are several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    columns = min(panels, 2)
    axes = list(figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.set_visible(False)
    return figure, axes[:panels]


def _svg(figure: Figure, name: str, alternative: str) -> str:
    """The figure as an element of HTML: ids of its own, the page's colours, nothing that points elsewhere."""
    written = io.StringIO()
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
