"""Gradient release in a training loop with Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core.errors import InvalidArgumentError, in_wrong_order, not_installed
from ..releasable import ReleasableOptimizer
from ..release import Release
from .trainer_settings import release_for_trainer

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise not_installed("penstock.torch_frontend.integrations.accelerate", "Accelerate", "trainers") from error


def release_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    max_norm: float | None = None,
    accumulation: str | None = None,
    keep_bytes: int = 0,
) -> Release:
    """Release the gradients of a model that an Accelerator prepared.

    The loop does not change, except for `accelerator.backward(release.guard(loss))`. The accelerator determines the number of
    micro-batches in a step, which of them is the last, and the loss scaling.

    Args:
        accelerator: its gradient_accumulation_steps must be final.
        model: as returned by `accelerator.prepare`.
        optimizer: of this package, as returned by `accelerator.prepare`.
        max_norm: the norm that the loop clips to, in (0, inf]; `accelerator.clip_grad_norm_(model.parameters(), max_norm)` may
            stay in the loop, and returns the norm before clipping. Clipping that is not declared here raises in step().
        accumulation: "hold", the default if gradient_accumulation_steps > 1: gradients are summed; exact, all of them alive.
            "state": added to the moments; one gradient alive, an approximation, not with max_norm or fp16.
        keep_bytes: bytes of gradients to keep between the two passes of guard(), which shortens the second.

    Returns:
        The release; its `guard` takes the loss.

    Raises:
        InvalidArgumentError: an argument is out of range, or model or optimizer are not prepared.
        RefusedError: the combination is not possible; the message gives the remedy.

    Example:
        >>> model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        >>> release = release_gradients(accelerator, model, optimizer)
        >>> accelerator.backward(release.guard(model(batch).loss))
        >>> optimizer.step()
    """
    if not isinstance(accelerator, Accelerator) or isinstance(model, Optimizer) or isinstance(optimizer, nn.Module):
        raise in_wrong_order(accelerator=accelerator, model=model, optimizer=optimizer)
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise InvalidArgumentError("optimizer is not prepared; call accelerator.prepare(model, optimizer) first.")
    return release_for_trainer(
        model,
        plain_optimizer(optimizer),
        micro_batches=accelerator.gradient_accumulation_steps,
        sync=lambda: accelerator.sync_gradients,
        max_norm=max_norm,
        scaler=optimizer.scaler,
        clips_itself=False,
        accumulation=accumulation,
        keep_bytes=keep_bytes,
    )


def plain_optimizer(optimizer: Any) -> ReleasableOptimizer:
    """Return the optimizer without Accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
