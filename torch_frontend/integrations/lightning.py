"""Gradient release in Lightning's Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from ...core.errors import RefusedError, not_installed
from ..releasable import ReleasableOptimizer
from ..release import Release
from .trainer_settings import release_for_trainer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise not_installed("penstock.torch_frontend.integrations.lightning", "Lightning", "trainers") from error


class GradientRelease(Callback):
    """Callback that releases the module's gradients during `Trainer.fit`.

    gradient_clip_val, accumulate_grad_batches and precision keep their meaning. The module's `configure_optimizers` must
    return one optimizer of penstock.torch_frontend; nothing else changes.

    Args:
        accumulation: "hold", the default if accumulate_grad_batches > 1: gradients are summed; exact, all of them alive.
            "state": added to the moments; one gradient alive, an approximation, not with gradient_clip_val or "16-mixed".
        keep_bytes: bytes of gradients to keep between the two passes of guard(), which shortens the second.

    Attributes:
        release: the release of the latest fit(), set at its first batch; None before. `release.last_norm` is the norm before
            clipping.

    Raises:
        RefusedError: in fit(), before the first batch: there are several optimizers, or one of another package, or manual
            optimization, or clipping by value, or the combination is not possible.

    Example:
        >>> trainer = Trainer(callbacks=[GradientRelease()], gradient_clip_val=1.0)
    """

    def __init__(self, *, accumulation: str | None = None, keep_bytes: int = 0) -> None:
        self.release: Release | None = None
        self._options: dict[str, Any] = {"accumulation": accumulation, "keep_bytes": keep_bytes}
        self._in_fit = contextlib.ExitStack()
        self._in_step = False  # optimizer.step() was called for this batch
        self._stepped = False  # this batch is the last micro-batch of a step, which GradScaler may have skipped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the release: Lightning has loaded checkpoints and wrapped the module."""
        optimizer = _the_optimizer(trainer, pl_module)
        with contextlib.ExitStack() as stack:
            # Lightning runs backward of the last micro-batch, and only of that, in the closure of step().
            stack.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
            self.release = release = stack.enter_context(
                release_for_trainer(
                    cast(nn.Module, trainer.model),
                    optimizer,
                    micro_batches=trainer.accumulate_grad_batches,
                    sync=lambda: self._in_step,
                    max_norm=trainer.gradient_clip_val,
                    max_norm_name="Trainer's gradient_clip_val",
                    scaler=getattr(trainer.precision_plugin, "scaler", None),
                    **self._options,
                )
            )
            stack.enter_context(_guarded_backward(pl_module, release))
            self._in_fit = stack.pop_all()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget the previous batch."""
        self._in_step = self._stepped = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that backward of the last micro-batch has ended."""
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close a step that GradScaler skipped, before Lightning saves a checkpoint."""
        if self._stepped and self.release is not None:
            self.release.optimizer.zero_grad()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the release."""
        self._in_fit.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the release in whatever state the step is."""
        self._in_fit.__exit__(type(exception), exception, exception.__traceback__)

    def _step_begins(self, *_: Any) -> None:
        self._in_step = True


def _the_optimizer(trainer: Trainer, module: LightningModule) -> ReleasableOptimizer:
    """Return the trainer's only optimizer, or raise `RefusedError` if its gradients cannot be released."""
    if not module.automatic_optimization:
        raise RefusedError(
            "automatic_optimization=False: the loop is the module's own; call release_gradients(module, optimizer) in it, and "
            "self.manual_backward(release.guard(loss))."
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise RefusedError(
            "gradient_clip_algorithm='value' would clip gradients that are released already; use 'norm', or StableAdamW, which "
            "needs no clipping."
        )
    optimizers = trainer.optimizers
    if len(optimizers) != 1 or not isinstance(optimizers[0], ReleasableOptimizer):
        raise RefusedError(
            f"configure_optimizers gave {', '.join(type(optimizer).__name__ for optimizer in optimizers) or 'no optimizer'}; "
            "gradient release needs one optimizer of penstock.torch_frontend."
        )
    return optimizers[0]


@contextlib.contextmanager
def _guarded_backward(module: LightningModule, release: Release) -> Iterator[None]:
    """Guard the loss in the module's hook `backward`, which Lightning calls with the loss after scaling."""
    backward = module.backward

    def guarded(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(release.guard(loss), *args, **kwargs)

    module.backward = guarded
    try:
        yield
    finally:
        del module.backward
