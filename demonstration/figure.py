"""The figure: loss curves on top of each other, the gradient memory of a backward pass, and the peak of a step in JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..core.errors import InvalidArgumentError, RefusedError
from .results import MIB, Run

# One look for each run, in order. The first is broad and pale, the later ones lie on it and leave it visible.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#9ecae1", "linewidth": 6.0, "solid_capstyle": "round"},
    {"color": "#08519c", "linewidth": 2.2},
    {"color": "#fd8d3c", "linewidth": 1.6, "linestyle": (0, (4, 3))},
    {"color": "#238b45", "linewidth": 1.2, "linestyle": (0, (1, 2))},
    {"color": "black", "linestyle": "none", "marker": "o", "markersize": 4.5, "markerfacecolor": "none"},
    {"color": "#88419d", "linestyle": "none", "marker": "x", "markersize": 4.5},
)


def check_output(path: Path) -> None:
    """Raise `InvalidArgumentError` unless a figure can be written to this file; an existing one is replaced."""
    kinds = FigureCanvasAgg.get_supported_filetypes()
    wrong = f"the output {str(path)!r} cannot be written: "
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise InvalidArgumentError(
            f"the output {str(path)!r} must end in one of {', '.join('.' + kind for kind in sorted(kinds))}."
        )
    try:
        if path.is_dir():
            raise InvalidArgumentError(f"the output {str(path)!r} is a directory; name a file.")
        if not path.parent.is_dir():
            raise InvalidArgumentError(f"the output's directory {str(path.parent)!r} does not exist.")
        if path.exists() and not path.is_file():
            raise InvalidArgumentError(f"the output {str(path)!r} is not a regular file.")
        _try_to_open(Path(os.path.realpath(path)))
    except InvalidArgumentError:
        raise
    except OSError as error:
        raise InvalidArgumentError(f"{wrong}{(error.strerror or 'unknown error').lower()}.") from error
    except ValueError as error:
        raise InvalidArgumentError(f"{wrong}{error}.") from error


def _try_to_open(file: Path) -> None:
    """Open a file for writing; its content stays, and what was not there before is not there afterwards."""
    existed = file.exists()
    with file.open("ab"):
        pass
    if not existed:
        file.unlink()


def draw(runs: Sequence[Run], *, model: str, gradient_bytes: int, output: Path) -> None:
    """Write the figure.

    Args:
        runs: at most as many as there are styles.
        model: a few words for the title.
        gradient_bytes: of the gradients of all parameters together; AdamW's two moments are as large each.
        output: file to write; its ending chooses the format.

    Raises:
        RefusedError: the file cannot be written after all.
    """
    figure = Figure(figsize=(17, 5.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"One transformer, one initialisation, the same batches: {model}", fontsize=13)
    loss_axes, memory_axes, step_axes = figure.subplots(1, 3, width_ratios=(5, 5, 3))
    _draw_losses(loss_axes, runs)
    _draw_memory(memory_axes, runs, gradient_bytes)
    _draw_steps(step_axes, runs, 3 * gradient_bytes)
    try:
        figure.savefig(output)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a format whose helper program fails
        raise RefusedError(f"the output {str(output)!r} could not be written: {error}") from error


def _draw_losses(axes: Any, runs: Sequence[Run]) -> None:
    for run, style in zip(runs, STYLES, strict=False):
        sparse = {"markevery": max(1, len(run.losses) // 30)} if "marker" in style else {}
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, **style, **sparse)
    axes.set(title="Loss of every step, all runs on top of each other", xlabel="step", ylabel="cross entropy (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_memory(axes: Any, runs: Sequence[Run], gradient_bytes: int) -> None:
    axes.axhline(gradient_bytes / MIB, color="grey", linewidth=1, linestyle=":")
    axes.annotate(
        f"all gradients: {gradient_bytes / MIB:.1f} MiB",
        (0.01, gradient_bytes / MIB),
        xycoords=("axes fraction", "data"),
        xytext=(4, -5),
        textcoords="offset points",
        va="top",
        color="dimgrey",
    )
    for run, style in zip(runs, STYLES, strict=False):
        if run.peak_gradient_bytes is None:
            continue
        label = f"{run.name}: peak {run.peak_gradient_bytes / MIB:.2f} MiB"
        live = [nbytes / MIB for nbytes in run.timeline]
        axes.plot(range(1, len(live) + 1), live, drawstyle="steps-post", label=label, color=style["color"], linewidth=2)
    axes.set(
        title="Gradient alive during the last backward pass (PyTorch, measured)",
        xlabel="gradients that have arrived, from the last layer to the first",
        ylabel="gradient alive (MiB)",
    )
    axes.set_ylim(0, 1.45 * gradient_bytes / MIB)
    axes.set_xlim(left=1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def _draw_steps(axes: Any, runs: Sequence[Run], kept_bytes: int) -> None:
    """Draw the peak of a whole step of those runs that know it; `kept_bytes` are parameters and moments."""
    known = [(run, style["color"]) for run, style in zip(runs, STYLES, strict=False) if run.peak_step_bytes is not None]
    names = [run.name.removeprefix("JAX, ").replace(" ", "\n", 1) for run, _ in known]
    values = [(run.peak_step_bytes or 0) / MIB for run, _ in known]
    axes.bar_label(axes.bar(names, values, color=[colour for _, colour in known], width=0.6), fmt="%.0f", padding=2)
    axes.axhline(kept_bytes / MIB, color="grey", linewidth=1, linestyle=":", label="parameters and moments")
    axes.set(title="Peak of a whole step\n(JAX, XLA's analysis)", ylabel="MiB")
    axes.set_ylim(top=1.3 * max([*values, kept_bytes / MIB]))
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(loc="upper right")
