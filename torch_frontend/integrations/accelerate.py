"""Gradient release in a loop of Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.errors import InvalidArgumentError, MissingDependencyError
from ..releasable import ReleasableOptimizer
from ..release import Release
from .trainer_settings import release_for_trainer

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "penstock.torch_frontend.integrations.accelerate needs Accelerate; install it with: pip install 'penstock[trainers]'"
    ) from error


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

    The loop stays as it is, with `accelerator.backward(release.guard(loss))`. How many micro-batches make a step, which is the
    last, and the loss scaling are the accelerator's.

    Args:
        accelerator: with its final gradient_accumulation_steps.
        model: as `accelerator.prepare` returned it.
        optimizer: of this package, as `accelerator.prepare` returned it.
        max_norm: what the loop clips to; `accelerator.clip_grad_norm_(model.parameters(), max_norm)` may stay in the loop,
            and returns the norm before clipping. Clipping that is not declared here raises in step().
        accumulation: "hold", the default with gradient_accumulation_steps above 1: gradients add up, exact, all of them
            alive. "state": straight into the moments, one alive, an approximation, and without max_norm or fp16.
        keep_bytes: of gradient, kept between the two passes of guard(), so that the second is shorter.

    Raises:
        InvalidArgumentError: an argument out of its range, or a model or optimizer that is not prepared.
        RefusedError: a combination that cannot be met.
    """
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
    """The optimizer itself, without Accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
