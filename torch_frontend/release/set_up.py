"""`release_gradients`: checks the arguments, and sets up the release that they ask for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core import compensation as compensations
from ...core.combinations import Combination, require
from ...core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError, in_wrong_order
from ...core.hyperparameters import Range, check_number
from ...core.release import Policy
from ..array_ops import dtype_name
from ..autograd.donated import compile_without_donation
from ..autograd.retained import note_retained
from ..communication import communication_name, select_communication
from ..groups import hyperparameters, plain_settings, rule_of, storage_of
from ..releasable import ReleasableOptimizer
from .hooks import check_ownership
from .pipeline import Pipeline
from .release import Release
from .shared_memory import check_memory

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
    """Run the optimizer's step for each parameter inside the backward pass, and free each gradient at once.

    Never more than about one layer's gradient is alive. Keep `optimizer.step()` and `optimizer.zero_grad()` in the loop: they
    close the step. Without micro-batches the result equals that of the plain optimizer, bit for bit.

    After backward, `.grad` of a released parameter is a marker without memory. Code that unscales, clips or logs gradients
    gets the right norm from it; any other use raises. step() and zero_grad() clear it.

    Args:
        model: the module with the parameters. Hooks that are on them stay, and run first.
        optimizer: one of this package, over parameters of `model`.
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
        note_retained()
    policy = {None: Policy.RELEASE, "hold": Policy.HOLD, "state": Policy.STATE}[accumulation]
    assert last is not None
    asked = {"max_norm": max_norm, "clipping": clipping, "accumulation": accumulation}
    communication = select_communication(
        model, _trained(optimizer), lambda: {**asked, **plain_settings(optimizer.param_groups)}, process_group
    )
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
    pipeline.attach()
    return Release(pipeline, keep_bytes)


def release_leniently(model: nn.Module, optimizer: ReleasableOptimizer) -> Release:
    """Return the release of `prepare_for_gradient_release`: every backward is an update, without optimizer_accumulation."""
    _check_setup(model, optimizer, "none", "state")
    if optimizer.on_nonfinite == "raise":
        raise RefusedError("on_nonfinite='raise' promises that nothing was changed, which release cannot keep; use 'skip'.")
    weakly_held = weakref.proxy(optimizer)
    pipeline = Pipeline(
        model,
        optimizer,
        select_communication(model, _trained(optimizer), lambda: plain_settings(optimizer.param_groups)),
        policy=Policy.STATE,
        strict=False,
        last=lambda: not weakly_held.optimizer_accumulation,
    )
    pipeline.attach()
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
    if isinstance(model, Optimizer) or isinstance(optimizer, nn.Module):
        raise in_wrong_order(model=model, optimizer=optimizer)
    if not isinstance(optimizer, ReleasableOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__qualname__}; gradient release needs an "
            "optimizer of penstock.torch_frontend."
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
    check_memory(model, optimized)
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
    kinds = {
        (rule_of(group).accumulation, group["compensation"], dtype_name(p.dtype), storage_of(group, p, current).states)
        for group, current in zip(optimizer.param_groups, map(hyperparameters, optimizer.param_groups), strict=True)
        for p in group["params"]
    }
    loss_scaling, communication = "none" if scaler is None else "dynamic", communication_name(model, process_group)
    for rule, compensation, dtype, states in kinds:
        kept = compensations.resolve(compensation, dtype), states
        require(Combination(clipping, loss_scaling, accumulation, communication, *kept, optimizer.backend, rule))
