"""What a trainer's settings ask of gradient release: the same for every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...core.errors import InvalidArgumentError
from ..communication import communication_name
from ..releasable import ReleasableOptimizer
from ..release import Release, release_gradients

ACCUMULATIONS = (None, "hold", "state")


def release_for_trainer(
    model: nn.Module,
    optimizer: ReleasableOptimizer,
    *,
    micro_batches: int,
    sync: Callable[[], bool],
    max_norm: float | None,
    scaler: Any = None,
    clips_itself: bool = True,
    accumulation: str | None = None,
    keep_bytes: int = 0,
) -> Release:
    """Release the gradients of a model that a trainer trains.

    One micro-batch a step: the backward pass updates; with max_norm or a scaler the loss must be guarded, and what the trainer
    unscales, clips and logs afterwards are the markers of released gradients. Several micro-batches: see `accumulation`.

    Args:
        model: as the trainer calls it, with its wrapper.
        optimizer: of this package, without a wrapper.
        micro_batches: backwards before each step().
        sync: is this the last of them?
        max_norm: what the trainer clips the global norm to, in (0, inf]; None or 0: it does not.
        scaler: its GradScaler.
        clips_itself: the trainer clips what it finds in `.grad` before step(); otherwise step() does.
        accumulation: "hold", the default with several micro-batches: gradients add up in `.grad`, exact, all of them alive;
            the last backward releases them, or step(), where the trainer clips or unscales in between. "state": straight
            into the moments, one gradient alive, an approximation; max_norm and scaler are refused with it.
        keep_bytes: see `penstock.torch_frontend.release_gradients`.

    Raises:
        InvalidArgumentError: an argument out of its range.
        RefusedError: a combination that cannot be met.
    """
    if accumulation not in ACCUMULATIONS:
        raise InvalidArgumentError(
            f"accumulation={accumulation!r} is not known; it must be 'hold' or 'state', or None: 'hold' where there are "
            "several micro-batches."
        )
    max_norm = max_norm or None
    if accumulation is None and micro_batches > 1:
        accumulation = "hold"
    if accumulation is None:
        return release_gradients(model, optimizer, max_norm=max_norm, scaler=scaler, keep_bytes=keep_bytes)
    last: Callable[[], bool] | None = sync
    waits = accumulation == "hold" and (max_norm is not None or scaler is not None)
    if waits and clips_itself and communication_name(model) != "process_group":  # there, .grad is not averaged before step()
        max_norm = last = None
    return release_gradients(
        model,
        optimizer,
        max_norm=max_norm,
        accumulation=accumulation,
        sync=last,
        scaler=scaler,
        keep_bytes=keep_bytes,
    )
