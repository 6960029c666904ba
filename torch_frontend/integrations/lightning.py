"""Gradient release in the Trainer of Lightning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from ...core.errors import MissingDependencyError, RefusedError
from ..releasable import ReleasableOptimizer
from ..release import Release
from .trainer_settings import release_for_trainer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "penstock.torch_frontend.integrations.lightning needs Lightning; install it with: pip install 'penstock[trainers]'"
    ) from error


class GradientRelease(Callback):
    """Releases the gradients of the module while `Trainer.fit` trains it.

    gradient_clip_val, accumulate_grad_batches and precision mean what they do without it. The module's `configure_optimizers`
    returns one optimizer of penstock.torch_frontend; everything else stays as it is.

    Args:
        accumulation: "hold", the default with accumulate_grad_batches above 1: gradients add up, exact, all of them alive.
            "state": straight into the moments, one alive, an approximation, and without gradient_clip_val or "16-mixed".
        keep_bytes: of gradient, kept between the two passes of guard(), so that the second is shorter.

    Attributes:
        release: of the latest fit(), from its first batch on; None before. `release.last_norm` is the norm before clipping.

    Raises:
        RefusedError: in fit(), before the first batch: several optimizers, one of another kind, manual optimization, clipping
            by value, or a combination that cannot be met.
    """

    def __init__(self, *, accumulation: str | None = None, keep_bytes: int = 0) -> None:
        self.release: Release | None = None
        self._options: dict[str, Any] = {"accumulation": accumulation, "keep_bytes": keep_bytes}
        self._in_fit = contextlib.ExitStack()
        self._in_step = False  # optimizer.step() has begun, with this batch
        self._stepped = False  # the batch is the last of its group; its step may have been skipped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up: checkpoints are loaded, and the module is wrapped."""
        optimizer = _the_optimizer(trainer, pl_module)
        with contextlib.ExitStack() as stack:
            # Lightning runs the backward of the last micro-batch, and only that, in the closure of step().
            stack.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
            self.release = release = stack.enter_context(
                release_for_trainer(
                    cast(nn.Module, trainer.model),
                    optimizer,
                    micro_batches=trainer.accumulate_grad_batches,
                    sync=lambda: self._in_step,
                    max_norm=trainer.gradient_clip_val,
                    scaler=getattr(trainer.precision_plugin, "scaler", None),
                    **self._options,
                )
            )
            stack.enter_context(_guarded_backward(pl_module, release))
            self._in_fit = stack.pop_all()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """No step yet."""
        self._in_step = self._stepped = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The last micro-batch is through."""
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step that GradScaler skipped is still open; a checkpoint is to find it closed."""
        if self._stepped and self.release is not None:
            self.release.optimizer.zero_grad()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over: the module's gradients are its own again."""
        self._in_fit.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, whatever state the step is in."""
        self._in_fit.__exit__(type(exception), exception, exception.__traceback__)

    def _step_begins(self, *_: Any) -> None:
        self._in_step = True


def _the_optimizer(trainer: Trainer, module: LightningModule) -> ReleasableOptimizer:
    """The only optimizer of the trainer, if its gradients can be released."""
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
            "gradient release needs one StableAdamW, AdamW or Adam of penstock.torch_frontend."
        )
    return optimizers[0]


@contextlib.contextmanager
def _guarded_backward(module: LightningModule, release: Release) -> Iterator[None]:
    """The module's hook `backward`, which Lightning calls with the loss, scaled if it is, guards it here."""
    backward = module.backward

    def guarded(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(release.guard(loss), *args, **kwargs)

    module.backward = guarded
    try:
        yield
    finally:
        del module.backward
