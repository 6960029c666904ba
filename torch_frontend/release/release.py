"""`Release`: what `release_gradients` returns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidArgumentError, RefusedError
from ...core.release import Action, Ledger, Policy, Status
from ..autograd.passes import keeps_graph
from ..groups import rule_of
from ..verification import verify
from . import boundaries
from .guard import guard_loss, two_passes
from .hooks import check_ownership
from .pipeline import Pipeline
from .shared_memory import check_memory


class Release:
    """The gradient release of an optimizer, made by `release_gradients`. As a context manager it is removed at the end.

    Attributes:
        optimizer: the optimizer, whose step runs in the backward pass.
    """

    def __init__(self, pipeline: Pipeline, keep_bytes: int = 0) -> None:
        self.optimizer = pipeline.optimizer
        self._pipeline = pipeline
        self._keep_bytes = keep_bytes
        self.optimizer._released = _Found(self)

    @property
    def ledger(self) -> Ledger:
        """Bytes of gradient alive: now (`live`) and at most (`peak`)."""
        return self._pipeline.step.ledger

    @property
    def skipped(self) -> int:
        """Number of gradients (on_nonfinite="skip") or whole steps (a scaler, held gradients) that were skipped because of an
        infinity or a NaN. It synchronises if the device counts them."""
        return self._pipeline.skip_count.total

    @property
    def last_norm(self) -> Tensor | None:
        """Global norm of the last gradient, unscaled and before clipping: a 0-d float64 tensor.

        It is available after backward(), or after step() if that releases held gradients. It is None before the first gradient,
        and with accumulation="state", where the whole gradient never exists. It is summed, without a synchronisation, from one
        float32 sum of squares for each parameter (float64 for float64 parameters, and in guard()).
        """
        return self._pipeline.last_norm

    @property
    def max_norm(self) -> float | None:
        """The declared norm. It cannot be changed: remove the release and call `release_gradients` again."""
        return self._pipeline.max_norm if self._pipeline.max_norm_of_each is None else self._pipeline.max_norm_of_each

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it no longer exists."""
        return self._pipeline.hooks.model

    def guard(self, loss: Tensor) -> Tensor:
        """Return the loss with a backward() of two passes: the first measures the gradient, the second uses it.

        So the global norm is clipped exactly, and a step whose gradient overflows changes nothing, with about one layer's
        gradient alive. It costs a second pass through the graph, which keep_bytes shortens. The loss is returned as it is if no
        second pass is needed: it has no graph, the release has neither max_norm nor scaler, or gradients are held anyway.

        Call it once a step on the whole loss: `guard(loss + regulariser)`, not `guard(loss) + regulariser`. The guarded loss
        may be multiplied. Hooks on modules and tensors run in both passes. Neither backward(inputs=...) nor torch.autograd.grad
        sees through a guarded loss.

        Args:
            loss: 0-d; it may be scaled before or after: `scaler.scale(release.guard(loss)).backward()`.

        Raises:
            InvalidArgumentError: loss is not a 0-d tensor.
            RefusedError: in backward(), before anything is changed: `.grad` holds gradients of an earlier backward, a guarded
                backward ran in this step already, or the backward is of more than this loss.
        """
        if not isinstance(loss, Tensor):
            raise InvalidArgumentError(
                f"loss is a {type(loss).__name__}; guard() takes the 0-d tensor that backward() is called on."
            )
        if self._removed or not (self._pipeline.needs_guard and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        if loss.dim() != 0:
            raise InvalidArgumentError(f"loss has shape {tuple(loss.shape)}; guard() takes a scalar, for instance loss.mean().")
        run: Any = torch.compiler.disable(self._backward_of_guarded)
        return guard_loss(loss, run, self._pipeline.step)

    def verify(self, loss_fn: Callable[[], Tensor]) -> None:
        """Compare a plain and a released step on your own model and batch, bit for bit, and restore everything.

        It finds what release cannot see: code that reads a parameter during backward after its update. Run it once, before
        training. Parameters, buffers, optimizer state, torch's random numbers and `ledger.peak` are restored.

        Args:
            loss_fn: function without arguments that computes the loss of one batch, 0-d; called two or three times.

        Raises:
            RefusedError: the steps differ (the text names the first parameter that does); loss_fn is not deterministic; a step
                is not closed; the release has a scaler, or accumulation="state", which is not exact.

        Example:
            release = release_gradients(model, optimizer)
            release.verify(lambda: model(batch).loss)
        """
        self._require_closed("verify()")
        if self._pipeline.scaler is not None:
            raise RefusedError("verify() does not scale losses; verify a release without scaler=, which computes the same.")
        if self._pipeline.step.policy is Policy.STATE and self._pipeline.step.strict:
            raise RefusedError("accumulation='state' is an approximation, and its bits differ; verify a release without it.")
        peak = self.ledger.peak
        try:
            verify(self, loss_fn)
        finally:
            self.ledger.peak = peak

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients in `.grad` in this context, as without release; step() uses them, and zero_grad() discards them."""
        pipeline = self._pipeline
        pipeline.step.clear_markers()
        pipeline.paused += 1
        pipeline.compose()
        try:
            yield
        finally:
            pipeline.paused -= 1
            pipeline.compose()
            if not pipeline.paused:
                pipeline.step.restore_markers()

    def remove(self) -> None:
        """Remove the hooks. Unused gradients stay in `.grad`, and the optimizer works as without release.

        After a backward() that has updated parameters, it counts as its optimizer.step(). A second call
        has no effect.

        Raises:
            RefusedError: micro-batches are in the moments and step() was not called (the release of
                `prepare_for_gradient_release`, which needs no step(), applies them instead); or what step() refuses: a
                setting, a parameter or its gradient was changed after backward() had used it. Nothing was removed.
        """
        if self._removed:
            return
        pipeline, step = self._pipeline, self._pipeline.step
        pending = step.with_status(Status.ACCUMULATED)
        if pending and step.strict:
            raise RefusedError(
                f"{pipeline.hooks.describe(pending[0].key)}: micro-batches of it are in the optimizer's moments and wait for "
                "their step. Call optimizer.step() before remove()."
            )
        if step.strict:
            step.check_settings()
            step.check_untouched()
        if pipeline.queue is not None:
            (pipeline.queue.move_to_grad if pipeline.single_process else pipeline.queue.flush)()
        with torch.no_grad():
            self.optimizer._refresh()
            self.optimizer._perform_all([(member.parameter, None, Action.APPLY) for member in pending])
        step.clear_markers()
        pipeline.communication.detach()
        pipeline.hooks.remove()
        pipeline.drop_stages()
        self.optimizer._released = None

    def __repr__(self) -> str:
        """Return what is released, and how: <Release of 4 parameters of AdamW, accumulation='hold', max_norm=1.0>."""
        step, state = self._pipeline.step, "removed" if self._removed else "paused" if self._pipeline.paused else None
        accumulation = step.policy.value if step.strict and step.policy is not Policy.RELEASE else None
        said = [
            f"Release of {len(self._pipeline.hooks.parameters)} parameters of {type(self.optimizer).__name__}",
            f"accumulation={accumulation!r}",
            f"max_norm={self.max_norm!r}",
            *([] if state is None else [state]),
        ]
        return f"<{', '.join(said)}>"

    @property
    def _removed(self) -> bool:
        return self.optimizer.release is not self

    def __reduce_ex__(self, _: object) -> Any:
        raise RefusedError(
            "a release cannot be copied or pickled, as its hooks are on the parameters of this model. Copy model and optimizer "
            "in one call, copy.deepcopy((model, optimizer)), and call release_gradients with the copies; keep the release out "
            "of objects that are copied (optimizer.release returns it)."
        )

    def __enter__(self) -> Release:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # the exception is what matters
            if self._pipeline.queue is not None:
                self._pipeline.queue.move_to_grad()
            self._pipeline.step.abandon()
        self.remove()

    def _backward_of_guarded(self, loss: Tensor, seed: Tensor) -> None:
        if self._pipeline.paused or self._removed:
            torch.autograd.backward(loss, seed, retain_graph=keeps_graph())
        else:
            two_passes(self._pipeline, loss, seed, self._keep_bytes)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise `RefusedError` for a new group of another release's parameters, of shared memory, or of an unsuitable rule."""
        check_ownership(group["params"])
        check_memory(self.model, (p for of_optimizer in self.optimizer.param_groups for p in of_optimizer["params"]))
        if self._pipeline.step.policy is Policy.STATE and self._pipeline.step.strict:
            rule_of(group).check_accumulates("release_gradients(..., accumulation='hold') has a place for it")

    def _require_closed(self, call: str, *, reads: bool = False) -> None:
        """Raise `RefusedError` in the middle of a step; for a call that only reads state, after a part of it was changed."""
        for key, status in self._pipeline.step.touched():
            if not reads or status is not Status.HELD:  # a held gradient has changed nothing
                remedy = (
                    "call optimizer.step() first, or optimizer.zero_grad() after a backward() that failed"
                    if self._pipeline.step.strict
                    else "run the backward() of the last micro-batch, with optimizer.optimizer_accumulation=False, first"
                )
                raise RefusedError(
                    f"{call} in the middle of a step: {self._pipeline.hooks.describe(key)} is {status.value}; {remedy}."
                )

    def _close_step(self) -> None:
        boundaries.close_step(self._pipeline)

    def _discard_step(self) -> None:
        boundaries.discard_step(self._pipeline)


class _Found:
    """What the optimizer holds in place of its release, which holds the optimizer: no cycle keeps them from being freed."""

    def __init__(self, release: Release) -> None:
        self._release = weakref.ref(release)
        self._parts = release._pipeline, release._keep_bytes

    def __call__(self) -> Release:
        """Return the release, or another one of the same pipeline if nobody held it."""
        return self._release() or Release(*self._parts)
