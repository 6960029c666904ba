"""Translation of a trainer's settings into those of `release_gradients`, for all frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...core.errors import PenstockError
from ..communication import communication_name
from ..releasable import ReleasableOptimizer
from ..release import Release, release_gradients


def release_for_trainer(
    model: nn.Module,
    optimizer: ReleasableOptimizer,
    *,
    micro_batches: int,
    sync: Callable[[], bool],
    max_norm: float | None,
    max_norm_name: str = "max_norm",
    scaler: Any = None,
    clips_itself: bool = True,
    accumulation: str | None = None,
    keep_bytes: int = 0,
) -> Release:
    """Release the gradients of a model that a trainer trains.

    With one micro-batch per step the backward pass updates; with max_norm or a scaler the loss must be guarded, and the
    trainer then unscales, clips and logs the markers of released gradients. For several micro-batches see `accumulation`.

    Args:
        model: as the trainer calls it, with its wrapper.
        optimizer: of this package, without a wrapper.
        micro_batches: number of backward passes before each step().
        sync: returns whether the current micro-batch is the last of its step.
        max_norm: the global norm that the trainer clips to, in (0, inf]; None or 0 if it does not clip.
        max_norm_name: what the trainer calls max_norm.
        scaler: the trainer's GradScaler, or None.
        clips_itself: the trainer clips the gradients in `.grad` before step(); otherwise step() clips them.
        accumulation: "hold", the default with several micro-batches: gradients are summed in `.grad`; exact, all of them
            alive; released in the last backward, or in step() if the trainer clips or unscales in between. "state": added to
            the moments; one gradient alive, an approximation, refused with max_norm or scaler.
        keep_bytes: as in `penstock.torch_frontend.release_gradients`.

    Raises:
        InvalidArgumentError: an argument is out of range.
        RefusedError: the combination is not possible.
    """
    max_norm = max_norm or None
    if accumulation is None and micro_batches > 1:
        accumulation = "hold"
    is_last = None if accumulation is None else sync
    clips_held = clips_itself and accumulation == "hold" and (max_norm is not None or scaler is not None)
    if clips_held and communication_name(model) != "process_group":  # which averages held gradients only in step()
        max_norm = is_last = None
    try:
        return release_gradients(
            model,
            optimizer,
            max_norm=max_norm,
            accumulation=accumulation,
            sync=is_last,
            scaler=scaler,
            keep_bytes=keep_bytes,
        )
    except PenstockError as error:
        if max_norm is not None and max_norm_name != "max_norm":
            error.add_note(f"max_norm is {max_norm_name} here, {max_norm}; None or 0 does not clip.")
        raise
