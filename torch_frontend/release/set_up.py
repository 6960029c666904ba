"""Setting up gradient release: everything that can be wrong is found here, before a hook is on any parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core import compensation as compensations
from ...core.combinations import Combination, require
from ...core.errors import InvalidArgument, Refused, UnsupportedTensor
from ...core.hyperparameters import Range, check_number
from ...core.release import Policy
from ..array_ops import dtype_name
from ..communication import communication_name, select_communication
from ..optimizers import ReleasableOptimizer
from .hooks import active_releases
from .release import Release

ACCUMULATIONS = (None, "hold", "state")
CLIPPINGS = ("exact", "per_tensor")


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

    After backward, `.grad` of the smallest released parameter holds the norm of the gradient, in its first element, and zeros:
    what unscales, clips or logs gradients sees the right norm. `.grad` of the others is None.

    Returns:
        The release: `.guard(loss)`, `.paused()`, `.remove()`, `.last_norm`, `.skipped`, `.ledger`.

    Raises:
        InvalidArgument: an argument out of its range.
        Refused: a combination that cannot be met (`core.combinations`), parameters that another release has already,
            an optimizer without parameters of this model, on_nonfinite="raise" in a single pass.
    """
    if accumulation not in ACCUMULATIONS:
        raise InvalidArgument(f"accumulation={accumulation!r} is not known; it must be None, 'hold' or 'state'.")
    if clipping not in CLIPPINGS:
        raise InvalidArgument(f"clipping={clipping!r} is not known; it must be one of {', '.join(CLIPPINGS)}.")
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1:
            raise InvalidArgument(f"max_norm is a tensor of shape {tuple(max_norm.shape)}; it must be a number in (0, inf].")
        max_norm = max_norm.item()
    if max_norm is not None and max_norm != float("inf"):
        check_number("max_norm", max_norm, Range(0.0, low_included=False))
    if clipping == "per_tensor" and max_norm is None:
        raise InvalidArgument("clipping='per_tensor' needs max_norm, the norm that each gradient is clipped to.")
    if sync is not None and not callable(sync):
        raise InvalidArgument(f"sync={sync!r} must be a function without arguments: is this the last micro-batch?")
    if isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int) or keep_bytes < 0:
        raise InvalidArgument(f"keep_bytes={keep_bytes!r} must be a whole number of bytes in [0, inf).")
    scaler = _enabled(scaler)
    if sync is not None and accumulation is None:
        raise InvalidArgument("sync tells the last micro-batch from the others; it needs accumulation='hold' or 'state'.")
    clip = "none" if max_norm is None else {"exact": "global_norm", "per_tensor": "per_tensor"}[clipping]
    _check_setup(model, optimizer, clip, accumulation or "none", scaler, process_group)
    guarded = accumulation is None and (clip == "global_norm" or scaler is not None)
    if keep_bytes and not guarded:
        raise InvalidArgument(
            f"keep_bytes={keep_bytes} shortens the second pass of guard(), which there is only with max_norm or a scaler, and "
            "without accumulation; leave it out."
        )
    name = communication_name(model, process_group)
    if scaler is not None and accumulation == "hold" and name == "process_group" and sync is None:
        raise Refused(
            "a scaler judges the held gradients before step(), when they must be averaged over the processes already; give "
            "sync=, which tells the last micro-batch from the others."
        )
    if keep_bytes and name != "local":
        raise Refused(
            f"keep_bytes={keep_bytes}: over several processes the second pass of guard() is always a whole one, as what a rank "
            "keeps may depend on its graph; leave it out."
        )
    holds_until_step = sync is None or (accumulation == "hold" and (clip == "global_norm" or scaler is not None))
    at_once = guarded or (accumulation == "hold" and holds_until_step)
    if optimizer.on_nonfinite == "raise" and not at_once:
        raise Refused(
            "on_nonfinite='raise' promises that nothing was changed, which a single pass cannot keep: earlier layers are "
            "updated already. Use on_nonfinite='skip', or max_norm=float('inf') with release.guard(loss)."
        )
    last = (lambda: False) if holds_until_step else sync
    policy = {None: Policy.RELEASE, "hold": Policy.HOLD, "state": Policy.STATE}[accumulation]
    assert last is not None
    communication = select_communication(model, _trained(optimizer), process_group)
    averages = sync if communication.name == "process_group" and accumulation == "hold" and holds_until_step else None
    return Release(
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
        keep_bytes=keep_bytes,
    )


def lenient_release(model: nn.Module, optimizer: ReleasableOptimizer) -> Release:
    """The release of `prepare_for_gradient_release`: every backward is an update, unless optimizer_accumulation is on."""
    _check_setup(model, optimizer, "none", "state")
    if optimizer.on_nonfinite == "raise":
        raise Refused("on_nonfinite='raise' promises that nothing was changed, which release cannot keep; use 'skip'.")
    return Release(
        model,
        optimizer,
        select_communication(model, _trained(optimizer)),
        policy=Policy.STATE,
        strict=False,
        last=lambda: not optimizer.optimizer_accumulation,
    )


def _trained(optimizer: ReleasableOptimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def _enabled(scaler: Any) -> Any:
    """The scaler, or None where it does nothing."""
    if scaler is None:
        return None
    if not all(callable(getattr(scaler, name, None)) for name in ("get_scale", "is_enabled", "unscale_")):
        raise InvalidArgument(f"scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler.")
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
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}; gradient release needs penstock.torch_frontend's StableAdamW, AdamW "
            "or Adam."
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is a {type(model).__name__}; give the torch.nn.Module whose parameters are released.")
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = set(model.parameters())
    if not any(parameter in known and parameter.requires_grad for parameter in optimized):
        raise Refused("optimizer has no trainable parameter of this model; construct it from model.parameters().")
    if optimizer.release is not None:
        raise Refused("this optimizer's gradients are released already; call remove() on that release first.")
    if any(release.hooked(parameter) for release in active_releases() for parameter in optimized):
        raise Refused("a parameter is in another optimizer's release already; call remove() on that release first.")
    if clipping == "global_norm" and any(p.requires_grad and p not in known for p in optimized):
        raise Refused(
            "optimizer has parameters outside this model, which max_norm would leave out of the norm; use release_gradients on "
            "the module that holds all of them."
        )
    if scaler is not None and any(parameter.dtype is torch.float16 for parameter in optimized):
        raise Refused(
            "a scaler unscales gradients in place, and torch's refuses float16 ones; use float32 parameters under "
            "torch.autocast(dtype=torch.float16), or bfloat16 parameters, which need no scaler."
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and any(parameter in set(optimized) for parameter in module.parameters()):
            raise UnsupportedTensor(f"module {name!r} gives sparse gradients; construct it with sparse=False.")
    for parameter in optimized:
        group = optimizer.group_of(parameter)
        require(
            Combination(
                clipping=clipping,
                loss_scaling="none" if scaler is None else "dynamic",
                accumulation=accumulation,
                communication=communication_name(model, process_group),
                compensation=compensations.resolve(group["compensation"], dtype_name(parameter.dtype)),
                backend=optimizer.backend,
            )
        )
