"""The public functions of gradient release: `release_gradients` and the `Release` that it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core import compensation as compensations
from ...core.combinations import Combination, require
from ...core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from ...core.hyperparameters import Range, check_number
from ...core.release import Action, Ledger, Policy, Status
from ..array_ops import dtype_name
from ..autograd.donated import compile_without_donation
from ..autograd.passes import keeps_graph
from ..communication import communication_name, select_communication
from ..releasable import ReleasableOptimizer
from ..verification import verify
from . import boundaries
from .guard import guard_loss, two_passes
from .hooks import check_ownership
from .pipeline import Pipeline

ACCUMULATIONS = (None, "hold", "state")
CLIPPINGS = ("exact", "per_tensor")


class Release:
    """The gradient release of an optimizer, made by `release_gradients`. As a context manager it is removed at the end.

    Attributes:
        optimizer: the optimizer, whose step runs in the backward pass.
    """

    def __init__(self, pipeline: Pipeline, keep_bytes: int = 0) -> None:
        self.optimizer = pipeline.optimizer
        self._pipeline = pipeline
        self._keep_bytes = keep_bytes
        self.optimizer.release = self
        pipeline.attach()

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
        may be multiplied. Hooks on modules and tensors run in both passes, and retain_grad() keeps the sum of both. Neither
        backward(inputs=...) nor torch.autograd.grad sees through a guarded loss.

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
        training. Parameters, buffers, optimizer state and torch's random numbers are restored.

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
        verify(self, loss_fn)

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

        After a backward() that has updated parameters, it counts as its optimizer.step().

        Raises:
            RefusedError: micro-batches are in the moments and step() was not called (the release of
                `prepare_for_gradient_release`, which needs no step(), applies them instead); or what step() refuses: a
                setting, a parameter or its gradient was changed after backward() had used it. Nothing was removed.
        """
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
        if self.optimizer.release is self:
            self.optimizer.release = None

    @property
    def _removed(self) -> bool:
        return self.optimizer.release is not self

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

    def _check_ownership(self, parameters: Iterable[Tensor]) -> None:
        """Raise `RefusedError` if one of these parameters belongs to another release."""
        check_ownership(parameters)

    def _require_closed(self, call: str, *, reads: bool = False) -> None:
        """Raise `RefusedError` in the middle of a step; for a call that only reads state, after a part of it was changed."""
        for key, status in self._pipeline.step.touched():
            if not reads or status is not Status.HELD:  # a held gradient has changed nothing
                raise RefusedError(
                    f"{call} in the middle of a step: {self._pipeline.hooks.describe(key)} is {status.value}. Call "
                    "optimizer.step() first (or finish the micro-batches with optimizer_accumulation=False)."
                )

    def _close_step(self) -> None:
        boundaries.close_step(self._pipeline)

    def _discard_step(self) -> None:
        boundaries.discard_step(self._pipeline)


def release_gradients(
    model: nn.Module,
    optimizer: ReleasableOptimizer,
    *,
    max_norm: float | None = None,
    clipping: str = "exact",
    accumulation: str | None = None,
    sync: Callable[[], bool] | None = None,
    scaler: Any = None,
    process_group: Any = None,
    keep_bytes: int = 0,
) -> Release:
    """Run the optimizer's step for each parameter inside the backward pass, and free each gradient at once.

    Never more than about one layer's gradient is alive. Keep `optimizer.step()` and `optimizer.zero_grad()` in the loop: they
    close the step. Without micro-batches the result equals that of the plain optimizer, bit for bit.

    After backward, `.grad` of a released parameter is a marker without memory. Code that unscales, clips or logs gradients
    gets the right norm from it; any other use raises. step() and zero_grad() clear it.

    Args:
        model: the module with the parameters. Hooks that are on them stay, and run first.
        optimizer: StableAdamW, AdamW or Adam of this package, over parameters of `model`.
        max_norm: clip the global norm of the gradient to this, in (0, inf]. It is exact: call `release.guard(loss).backward()`
            (two passes), or use accumulation="hold" (step() clips).
        clipping: "exact", or "per_tensor": clip each gradient by its own norm, in one pass.
        accumulation: what to do with micro-batches, the backwards between two step() calls. None: one backward a step; a second
            one raises. "hold": add up gradients in `.grad`: exact, with all gradients alive. "state": put each into the
            moments, with one alive: an approximation (AdamA, https://arxiv.org/abs/2305.19982) that squares the K shares g/K
            one by one. AdamW's steps are as long as with "hold" where micro-batches are noise (2.3e-3 for 2.3e-3 after 100
            steps at lr 1e-2), and sqrt(K) times as long where they agree (2.0e-2 for 1.0e-2 with K = 4). Gradients of
            micro-batches are summed: divide the loss.
        sync: function without arguments, called inside each backward, that returns whether this is the last micro-batch: its
            backward then releases the gradients. Without `sync`, step() does. With max_norm and "hold", step() always does,
            and over a process group `sync` says when to average.
        scaler: an unmodified `torch.amp.GradScaler`. Use it as always, and guard the loss:
            `scaler.scale(release.guard(loss)).backward()`, `scaler.step(optimizer)`, `scaler.update()`. A step whose
            gradient overflows changes nothing. A disabled scaler is ignored. Parameters must not be float16.
        process_group: processes over which the gradients of a plain module are averaged; None: all, if torch.distributed is
            initialised. DistributedDataParallel and fully_shard have their own: wrap the model first, and give the wrapped one.
        keep_bytes: most bytes of gradient, in [0, inf), that stay alive between the two passes of guard(), which makes the
            second pass shorter. For one process only.

    Returns:
        The release: `.guard(loss)`, `.paused()`, `.remove()`, `.last_norm`, `.skipped`, `.ledger`.

    Raises:
        InvalidArgumentError: an argument is out of its range.
        RefusedError: the combination is impossible (`core.combinations`), a parameter belongs to another release, the optimizer
            has no parameter of this model, or on_nonfinite="raise" with a single pass.

    Example:
        release = release_gradients(model, optimizer)
        for batch in loader:
            model(batch).loss.backward()  # parameters are updated here
            optimizer.step()
            optimizer.zero_grad()

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """
    if accumulation not in ACCUMULATIONS:
        raise InvalidArgumentError(f"accumulation={accumulation!r} is not known; it must be None, 'hold' or 'state'.")
    if clipping not in CLIPPINGS:
        raise InvalidArgumentError(f"clipping={clipping!r} is not known; it must be one of {', '.join(CLIPPINGS)}.")
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1:
            raise InvalidArgumentError(
                f"max_norm is a tensor of shape {tuple(max_norm.shape)}; it must be a number in (0, inf]."
            )
        max_norm = max_norm.item()
    if max_norm is not None and max_norm != float("inf"):
        check_number("max_norm", max_norm, Range(0.0, low_included=False))
    if clipping == "per_tensor" and max_norm is None:
        raise InvalidArgumentError("clipping='per_tensor' needs max_norm, the norm that each gradient is clipped to.")
    if sync is not None and not callable(sync):
        raise InvalidArgumentError(f"sync={sync!r} must be a function without arguments: is this the last micro-batch?")
    if isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int) or keep_bytes < 0:
        raise InvalidArgumentError(f"keep_bytes={keep_bytes!r} must be a whole number of bytes in [0, inf).")
    scaler = _enabled(scaler)
    if sync is not None and accumulation is None:
        raise InvalidArgumentError("sync tells the last micro-batch from the others; it needs accumulation='hold' or 'state'.")
    clip = "none" if max_norm is None else {"exact": "global_norm", "per_tensor": "per_tensor"}[clipping]
    _check_setup(model, optimizer, clip, accumulation or "none", scaler, process_group)
    guarded = accumulation is None and (clip == "global_norm" or scaler is not None)
    if keep_bytes and not guarded:
        raise InvalidArgumentError(
            f"keep_bytes={keep_bytes} shortens the second pass of guard(), which there is only with max_norm or a scaler, and "
            "without accumulation; leave it out."
        )
    name = communication_name(model, process_group)
    if scaler is not None and accumulation == "hold" and name == "process_group" and sync is None:
        raise RefusedError(
            "a scaler judges the held gradients before step(), when they must be averaged over the processes already; give "
            "sync=, which tells the last micro-batch from the others."
        )
    if keep_bytes and name != "local":
        raise RefusedError(
            f"keep_bytes={keep_bytes}: over several processes the second pass of guard() is always a whole one, as what a rank "
            "keeps may depend on its graph; leave it out."
        )
    holds_until_step = sync is None or (accumulation == "hold" and (clip == "global_norm" or scaler is not None))
    at_once = guarded or (accumulation == "hold" and holds_until_step)
    if optimizer.on_nonfinite == "raise" and not at_once:
        raise RefusedError(
            "on_nonfinite='raise' promises that nothing was changed, which a single pass cannot keep: earlier layers are "
            "updated already. Use on_nonfinite='skip', or max_norm=float('inf') with release.guard(loss)."
        )
    last = (lambda: False) if holds_until_step else sync
    if guarded:
        compile_without_donation()
    policy = {None: Policy.RELEASE, "hold": Policy.HOLD, "state": Policy.STATE}[accumulation]
    assert last is not None
    communication = select_communication(model, _trained(optimizer), process_group)
    averages = sync if communication.name == "process_group" and accumulation == "hold" and holds_until_step else None
    pipeline = Pipeline(
        model,
        optimizer,
        communication,
        policy=policy,
        strict=True,
        last=last,
        averages=averages,
        max_norm=max_norm,
        clipping=clipping,
        scaler=scaler,
    )
    return Release(pipeline, keep_bytes)


def release_leniently(model: nn.Module, optimizer: ReleasableOptimizer) -> Release:
    """Return the release of `prepare_for_gradient_release`: every backward is an update, without optimizer_accumulation."""
    _check_setup(model, optimizer, "none", "state")
    if optimizer.on_nonfinite == "raise":
        raise RefusedError("on_nonfinite='raise' promises that nothing was changed, which release cannot keep; use 'skip'.")
    pipeline = Pipeline(
        model,
        optimizer,
        select_communication(model, _trained(optimizer)),
        policy=Policy.STATE,
        strict=False,
        last=lambda: not optimizer.optimizer_accumulation,
    )
    return Release(pipeline)


def _trained(optimizer: ReleasableOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _enabled(scaler: Any) -> Any:
    """Return the scaler, or None for a disabled one."""
    if scaler is None:
        return None
    if not all(callable(getattr(scaler, name, None)) for name in ("get_scale", "is_enabled", "unscale_")):
        raise InvalidArgumentError(f"scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler.")
    return scaler if scaler.is_enabled() else None


def _check_setup(
    model: nn.Module,
    optimizer: ReleasableOptimizer,
    clipping: str,
    accumulation: str,
    scaler: Any = None,
    process_group: Any = None,
) -> None:
    if not isinstance(optimizer, ReleasableOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__qualname__}; gradient release needs StableAdamW, "
            "AdamW or Adam of penstock.torch_frontend."
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; give the torch.nn.Module whose parameters are released."
        )
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = set(model.parameters())
    if not any(parameter in known and parameter.requires_grad for parameter in optimized):
        raise RefusedError("optimizer has no trainable parameter of this model; construct it from model.parameters().")
    if optimizer.release is not None:
        raise RefusedError("this optimizer's gradients are released already; call remove() on that release first.")
    check_ownership(optimized)
    if clipping == "global_norm" and any(p.requires_grad and p not in known for p in optimized):
        raise RefusedError(
            "optimizer has parameters outside this model, which max_norm would leave out of the norm; use release_gradients on "
            "the module that holds all of them."
        )
    if scaler is not None and any(parameter.dtype is torch.float16 for parameter in optimized):
        raise RefusedError(
            "a scaler unscales gradients in place, and torch's refuses float16 ones; use float32 parameters under "
            "torch.autocast(dtype=torch.float16), or bfloat16 parameters, which need no scaler."
        )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype) and parameter in set(optimized):
            raise UnsupportedTensorError(
                f"parameter {name!r} has grad_dtype {parameter.grad_dtype}, and release supports gradients of the parameter's "
                f"dtype {parameter.dtype} only; leave grad_dtype as it is."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module is not model:
            raise RefusedError(
                f"module {name!r} is wrapped in DistributedDataParallel, which would average the gradients of its parameters "
                "after their release. Wrap the whole model and release that, or release the model without "
                "DistributedDataParallel: release_gradients averages its gradients by itself."
            )
        if getattr(module, "sparse", False) and any(parameter in set(optimized) for parameter in module.parameters()):
            raise UnsupportedTensorError(f"module {name!r} gives sparse gradients; construct it with sparse=False.")
    kinds = {(group["compensation"], dtype_name(p.dtype)) for group in optimizer.param_groups for p in group["params"]}
    loss_scaling, communication = "none" if scaler is None else "dynamic", communication_name(model, process_group)
    for kind in kinds:
        compensation = compensations.resolve(*kind)
        require(Combination(clipping, loss_scaling, accumulation, communication, compensation, optimizer.backend))
