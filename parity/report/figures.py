"""The figures of the page, as SVG."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

OWN, PEER, BOUND, BROKEN = "#1f5fa8", "#8a949e", "#b3261e", "#e0812f"
WIDTH = 6.6  # inches: legible on a phone, too
SMALLEST, LARGEST = 1e-4, 1e4  # ratios outside of this range are drawn at its ends

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "parity",  # the same file each time
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d8dde2",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure of the page: what is seen in it, the SVG file, and how it is read."""

    title: str
    svg: bytes
    caption: str


def figures(content: Mapping[str, Any]) -> list[Drawing]:
    """The figures that a document has the numbers for."""
    import matplotlib as mpl

    rows = [row for section in content["sections"] for row in section["rows"]]
    updates = [row for section in content["sections"] if section["name"] == "updates" for row in section["rows"]]
    backends = [backend["name"] for backend in content["backends"]]
    peers = {backend["name"] for backend in content["backends"] if backend["peer"]}
    with mpl.rc_context(_STYLE):
        drawn = [ratios(rows, backends, peers), growth(updates, peers), live_bytes(rows)]
    return [drawing for drawing in drawn if drawing is not None]


def ratios(rows: Rows, backends: Sequence[str], peers: set[str]) -> Drawing | None:
    """Error / bound of every comparison, one line a backend; None where nothing is compared with a bound."""
    judged = [row for row in rows if row["within"] is not None and row["backend"] in backends]
    if not judged:
        return None
    figure, (axes,) = _figure(0.3 * len(backends) + 1.2)
    generator = np.random.default_rng(0)
    right = 10.0 ** max(1, math.ceil(math.log10(max(min(_ratio(row), LARGEST) for row in judged) or 1.0)))
    drawn = (
        ("penstock", OWN, [row for row in judged if row["backend"] not in peers and row["within"]]),
        ("penstock, beyond its bound", BROKEN, [row for row in judged if row["backend"] not in peers and not row["within"]]),
        ("other libraries, not judged", PEER, [row for row in judged if row["backend"] in peers]),
    )
    for label, colour, members in drawn:
        if members:
            x = np.clip([_ratio(row) for row in members], SMALLEST, right)
            y = [backends.index(row["backend"]) for row in members] + generator.uniform(-0.25, 0.25, len(members))
            axes.scatter(x, y, s=7, color=colour, alpha=0.6, linewidths=0, rasterized=True, label=label)
    axes.axvline(1.0, color=BOUND, linewidth=1.2, label="bound")
    axes.set(xscale="log", xlim=(SMALLEST * 0.7, right * 1.4), ylim=(len(backends) - 0.4, -0.6))
    axes.set_yticks(range(len(backends)), backends)
    axes.set(xlabel="error / bound (no unit)", ylabel="backend")
    axes.grid(False, axis="y")
    figure.legend(loc="outside upper center", ncols=4, markerscale=2.0)
    own = [row for row in judged if row["backend"] not in peers]
    title = f"{sum(row['within'] for row in own)} of {len(own)} errors are within their bounds"
    caption = (
        f"One dot a comparison. Ratios below {SMALLEST:g} are drawn there, those above {right:g} and those that are not finite "
        f"at {right:g}."
    )
    return Drawing(title, _svg(figure), caption)


def growth(rows: Rows, peers: set[str]) -> Drawing | None:
    """Relative error of the parameters against the number of steps, by dtype and compensation.

    Each panel is one case of the longest runs, that which most backends have run; None where there is one number of steps.
    """
    rows = [row for row in rows if row["quantity"] == "parameter" and row["relative_error"] and row["relative_bound"]]
    longest = max((row["steps"] for row in rows), default=0)
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for case in dict.fromkeys(row["case"] for row in rows if row["steps"] == longest):
        found = [row for row in rows if row["case"] == case]
        stored = stored_as(case)
        if stored not in panels or len(_names(found)) > len(_names(panels[stored])):
            panels[stored] = found
    counts = sorted({row["steps"] for found in panels.values() for row in found})
    if len(counts) < 2:
        return None
    figure, axes_of = _figure(1.9 * math.ceil(len(panels) / 2) + 0.6, len(panels))
    handles: dict[str, Any] = {}
    for axes, (stored, found) in zip(axes_of, panels.items(), strict=True):
        for label, colour, style, key, members in (
            ("other libraries, largest", PEER, "s-", "relative_error", _of(found, peers, peer=True)),
            ("penstock, largest of its backends", OWN, "o-", "relative_error", _of(found, peers, peer=False)),
            ("bound", BOUND, "--", "relative_bound", found),
        ):
            line = {steps: [row[key] for row in members if row["steps"] == steps] for steps in counts}
            points = {steps: max(values) for steps, values in line.items() if values}
            if points:
                (handles[label],) = axes.plot(list(points), list(points.values()), style, color=colour, markersize=4)
        axes.set(xscale="log", yscale="log", title=f"{stored} ({found[0]['case'].split('/')[1]})")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    figure.supxlabel("number of steps", fontsize=9)
    figure.supylabel("relative error of the parameters (no unit)", fontsize=9)
    figure.legend(handles=list(handles.values()), labels=list(handles), loc="outside upper center", ncols=3)
    caption = "One case of each dtype and compensation; the parameters are compared together with their compensation."
    own = [row for found in panels.values() for row in _of(found, peers, peer=False)]
    inside = all(row["relative_error"] <= row["relative_bound"] for row in own)
    title = f"As they grow over the steps, the errors {'stay below' if inside else 'exceed'} their bounds"
    return Drawing(title, _svg(figure), caption)


def live_bytes(rows: Rows) -> Drawing | None:
    """Peaks of live gradient by policy, measured and by the ledger; None where nothing was measured."""
    rows = [row for row in rows if row["quantity"] == "peak, measured" and row["data"] and "timeline" in row["data"]]
    if not rows:
        return None
    several = len(_names(rows)) > 1
    names = [row["data"]["policy"] + (f", {row['backend']}" if several else "") for row in rows]
    figure, (axes,) = _figure(0.34 * len(rows) + 1.0)
    places = np.arange(len(rows))
    for offset, key, label, colour in ((-0.18, "expected", "ledger", PEER), (0.18, "found", "measured", OWN)):
        axes.barh(places + offset, [row["data"][key] / 1024 for row in rows], height=0.34, color=colour, label=label)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set(xlabel="peak of live gradient (KiB)", ylabel="policy")
    figure.legend(loc="outside upper center", ncols=2)
    same = all(row["data"]["found"] == row["data"]["expected"] for row in rows)
    title = "Measured gradient memory equals the ledger" if same else "Measured gradient memory differs from the ledger"
    return Drawing(title, _svg(figure), "What the ledger of arriving and freed gradients expects, and what was measured.")


def stored_as(case: str) -> str:
    """Dtype and compensation of a case of plain updates."""
    parts = case.split("/")
    dtype, compensation = parts[2], parts[3]
    return dtype if compensation == "none" and dtype.endswith(("32", "64")) else f"{dtype}, {compensation}"


def _of(rows: Rows, peers: set[str], *, peer: bool) -> Rows:
    return [row for row in rows if (row["backend"] in peers) is peer]


def _names(rows: Rows) -> set[str]:
    return {row["backend"] for row in rows}


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


def _svg(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="svg", dpi=200, metadata={"Date": None})
    return written.getvalue()
