"""The public face of gradient release: `release_gradients` and what it returns."""

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
from ..communication import communication_name, select_communication
from ..releasable import ReleasableOptimizer
from . import boundaries
from .guard import guard_loss, two_passes
from .hooks import check_ownership
from .pipeline import Pipeline

ACCUMULATIONS = (None, "hold", "state")
CLIPPINGS = ("exact", "per_tensor")


class Release:
    """Gradient release in force; made by `release_gradients`. Use it as a context manager to remove it at the end.

    Attributes:
        optimizer: whose step runs in the backward pass.
    """

    def __init__(self, pipeline: Pipeline, keep_bytes: int = 0) -> None:
        self.optimizer = pipeline.optimizer
        self._pipeline = pipeline
        self._keep_bytes = keep_bytes
        self.optimizer.release = self
        pipeline.attach()

    @property
    def ledger(self) -> Ledger:
        """Bytes of gradient alive, now and at most."""
        return self._pipeline.step.ledger

    @property
    def skipped(self) -> int:
        """Number of gradients that were not used because they held an infinity or a NaN: single ones
        (on_nonfinite="skip"), or whole steps (a scaler, held gradients). Synchronises if the device counts them."""
        return self._pipeline.skip_count.total

    @property
    def last_norm(self) -> Tensor | None:
        """The global norm of the last gradient, unscaled and before clipping: a 0-d float64 tensor.

        It is there after backward(), or after step() where that is what releases. None before the first, and with
        accumulation="state", where nobody sees the whole gradient. It is summed from one float32 sum of squares a parameter
        (float64 for float64 parameters; guard() measures in float64): nothing waits for it.
        """
        return self._pipeline.last_norm

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once nobody else holds it."""
        return self._pipeline.hooks.model

    def guard(self, loss: Tensor) -> Tensor:
        """The loss, with a backward() that measures first and updates second.

        So the clipping of the global norm is exact, and a step whose gradient overflows changes nothing, with one gradient
        alive. Costs a second walk through the graph, less with keep_bytes. A loss without a graph, or a release without
        max_norm and scaler, or one that holds its gradients anyway, needs no second pass and gets its loss back as it is.

        Once a step, around all of the loss: what it decides, it decides of the whole gradient. What the loss is multiplied by
        may be outside, another term may not: guard(loss + regulariser). Hooks on modules and tensors
        run in both passes. backward(inputs=...) and torch.autograd.grad find no parameters behind a guarded loss.

        Args:
            loss: 0-d; scaled already, or to be scaled: `scaler.scale(release.guard(loss)).backward()`.

        Raises:
            InvalidArgumentError: loss is no 0-d tensor.
            RefusedError: in backward(), before anything is changed, if gradients of an earlier backward are still there, a
                guarded one ran in this step already, or it is of more than this loss.
        """
        if not isinstance(loss, Tensor):
            raise InvalidArgumentError(
                f"loss is a {type(loss).__name__}; guard() takes the 0-d tensor that backward() is called on."
            )
        if not (self._pipeline.needs_guard and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        if loss.dim() != 0:
            raise InvalidArgumentError(f"loss has shape {tuple(loss.shape)}; guard() takes a scalar, for instance loss.mean().")
        run: Any = torch.compiler.disable(self._backward_of_guarded)
        return guard_loss(loss, run, self._pipeline.step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in this context leave gradients in `.grad`, as without release; step() and zero_grad() treat them so."""
        pipeline = self._pipeline
        pipeline.step.clear_markers()
        pipeline.paused += 1
        pipeline.compose()
        try:
            yield
        finally:
            pipeline.paused -= 1
            pipeline.compose()

    def remove(self) -> None:
        """Take the hooks off. Gradients that were not used stay in `.grad`, and the optimizer goes on as a plain one.

        Raises:
            RefusedError: micro-batches are in the moments and wait for their step. (Under the lenient release of
                `prepare_for_gradient_release`, whose step() closes nothing, they are applied instead.)
        """
        pipeline, step = self._pipeline, self._pipeline.step
        pending = step.with_status(Status.ACCUMULATED)
        if pending and step.strict:
            raise RefusedError(
                f"{pipeline.hooks.describe(pending[0].key)}: micro-batches of it are in the optimizer's moments and wait for "
                "their step. Call optimizer.step() before remove()."
            )
        if pipeline.queue is not None:
            (pipeline.queue.move_to_grad if pipeline.single_process else pipeline.queue.flush)()
        with torch.no_grad():
            self.optimizer._refresh()
            self.optimizer._perform_all([(member.parameter, None, Action.APPLY) for member in pending])
        step.clear_markers()
        pipeline.communication.detach()
        pipeline.hooks.remove()
        if self.optimizer.release is self:
            self.optimizer.release = None

    def __enter__(self) -> Release:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # the exception is what matters
            if self._pipeline.queue is not None:
                self._pipeline.queue.move_to_grad()
            self._pipeline.step.abandon()
        self.remove()

    def _backward_of_guarded(self, loss: Tensor, seed: Tensor) -> None:
        if self._pipeline.paused:
            torch.autograd.backward(loss, seed)
        else:
            two_passes(self._pipeline, loss, seed, self._keep_bytes)

    def _check_ownership(self, parameters: Iterable[Tensor]) -> None:
        """Raise `RefusedError` if another release has one of these parameters already."""
        check_ownership(parameters, mine=self._pipeline)

    def _require_closed(self, call: str) -> None:
        """Raise `RefusedError` unless no update is under way."""
        for key, status in self._pipeline.step.touched():
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
    """Run the optimizer's step for each parameter inside the backward pass, and free its gradient at once.

    Never more than about one layer's gradient is alive. `optimizer.step()` and `optimizer.zero_grad()` stay in the loop:
    they close the step. Without micro-batches the result equals that of the plain optimizer, bit for bit.

    Args:
        model: holds the parameters; hooks that are on them already stay, and run first.
        optimizer: of this package, over parameters of `model`.
        max_norm: clip the global norm of the gradient to this, in (0, inf]. Exact: call `release.guard(loss).backward()`
            (two passes), or use accumulation="hold" (the gradients are there anyway, step() clips them).
        clipping: "exact", or "per_tensor": each gradient by its own norm, in one pass.
        accumulation: micro-batches between two step() calls. None: one backward a step; a second one raises.
            "hold": gradients add up in `.grad`, exact, all of them alive. "state": straight into the moments, one alive;
            an approximation (AdamA, https://arxiv.org/abs/2305.19982). Micro-batch gradients are summed: divide the loss.
        sync: called without arguments inside the backward: is this the last micro-batch? Then parameters are released
            during it. Without `sync`, step() does what waits.
            With max_norm and "hold", step() clips and releases; over a process group `sync` then says when to average.
        scaler: an unmodified `torch.amp.GradScaler`; use it as always, and guard the loss:
            `scaler.scale(release.guard(loss)).backward()`, `scaler.step(optimizer)`, `scaler.update()`. A step whose
            gradient overflows changes nothing. One that is disabled is as None. Not with float16 parameters.
        process_group: of a plain module, the processes to average gradients over; None: all, if torch.distributed is
            initialised. DistributedDataParallel and fully_shard bring their own: wrap the model before this call, and give the
            wrapped one.
        keep_bytes: gradients of that many bytes, in [0, inf), stay alive between the two passes of guard(), so that the
            second is shorter: it does not compute them again. Of one process only.

    After backward, `.grad` of a released parameter is a marker without memory: what unscales, clips or logs gradients finds the
    right norm, and whatever else uses it is refused. step() and zero_grad() clear it.

    Returns:
        The release: `.guard(loss)`, `.paused()`, `.remove()`, `.last_norm`, `.skipped`, `.ledger`.

    Raises:
        InvalidArgumentError: an argument out of its range.
        RefusedError: a combination that cannot be met (`core.combinations`), parameters that another release has already,
            an optimizer without parameters of this model, on_nonfinite="raise" in a single pass.
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
    """The release of `prepare_for_gradient_release`: every backward is an update, unless optimizer_accumulation is on."""
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
    """The scaler, or None where it does nothing."""
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
            f"optimizer is a {type(optimizer).__name__}; gradient release needs penstock.torch_frontend's StableAdamW, AdamW "
            "or Adam."
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
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and any(parameter in set(optimized) for parameter in module.parameters()):
            raise UnsupportedTensorError(f"module {name!r} gives sparse gradients; construct it with sparse=False.")
    kinds = {(group["compensation"], dtype_name(p.dtype)) for group in optimizer.param_groups for p in group["params"]}
    loss_scaling, communication = "none" if scaler is None else "dynamic", communication_name(model, process_group)
    for kind in kinds:
        compensation = compensations.resolve(*kind)
        require(Combination(clipping, loss_scaling, accumulation, communication, compensation, optimizer.backend))
