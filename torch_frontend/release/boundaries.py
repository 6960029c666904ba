"""optimizer.step() and optimizer.zero_grad() under release: they use or discard pending gradients, and close the step."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import NonFiniteGradientError, RefusedError
from ...core.release import Action, Status, ZeroGrad
from ...core.release import Step as StepCalled
from ..checks import check_gradient
from ..clipping import clip_by_norm_, clip_coefficient, square_sum
from ..communication.shards import is_released, local, shard_of
from ..finiteness import each_finite
from .pipeline import Pipeline
from .queue import batches
from .stages import count_skipped, rescale_


@torch.no_grad()
def close_step(pipeline: Pipeline) -> None:
    """Carry out optimizer.step(): use the pending gradients, and close the step. Refusals come before any change."""
    try:
        _close_step(pipeline)
    except RefusedError:
        pipeline.context.refused = True
        raise


def _close_step(pipeline: Pipeline) -> None:
    step = pipeline.step
    if step.strict:
        step.check_settings()
        step.check_untouched()
    if len(step.released) < len(step.members) or not step.members:
        step.refresh()
        pipeline.hooks.check(step.without_gradient())
    if pipeline.scaler is not None:
        pipeline.held_average.require_judged()
    pipeline.pass_end.end_failed()
    pipeline.pass_end.flush()
    if not pipeline.single_process:
        pipeline.attach()  # a parameter that was unfrozen since has a gradient that no hook has sent: it is averaged now
        pipeline.held_average.step([p for p, gradient in pending_gradients(pipeline).items() if gradient is not None])
    _use_pending(pipeline, pending_gradients(pipeline))
    close(pipeline)


def pending_gradients(pipeline: Pipeline) -> dict[Tensor, Tensor | None]:
    """Return the parameters that step() has to update, with the gradients in `.grad`; None: all is in the moments.

    Raises:
        RefusedError: a gradient of a parameter that was updated already, or one that a refused backward has added to.
    """
    step, found = pipeline.step, dict[Tensor, Tensor | None]()
    for group in pipeline.optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if is_released(gradient):
                if local(gradient).key != id(parameter):
                    raise step.context.refuse(local(gradient), "using it as the gradient of another parameter")
                gradient = None
            if gradient is None and not step.has_pending:
                continue
            key = id(parameter)
            status = step.status(key)
            if gradient is None and status is Status.HELD:  # user code took it out of `.grad`
                step.ledger.free(key)
                step.set_status(key, Status.IDLE)
            elif gradient is not None:
                if key in step.contaminated:
                    remedy = "Call optimizer.zero_grad(), and compute this step's gradients again."
                    if step.with_status(Status.ACCUMULATED):  # zero_grad() cannot discard these
                        parameter.grad = None
                        remedy = "It is discarded now; optimizer.step() uses the micro-batches that are in the moments."
                    raise RefusedError(
                        f"{step.context.describe(key)}: a backward that was refused may have added to its gradient in "
                        f"`.grad`. {remedy}"
                    )
                check_gradient(parameter, gradient)
                if status is Status.RELEASED:
                    step.decide(parameter, StepCalled(waiting=True))  # refuses
                if status is Status.IDLE:  # set by hand, unfrozen since, or outside the model: a plain step() would use it
                    step.set_status(key, Status.HELD)
                found[parameter] = gradient
            elif status is Status.ACCUMULATED:
                found[parameter] = None
    return found


def _use_pending(pipeline: Pipeline, pending: dict[Tensor, Tensor | None]) -> None:
    step, optimizer = pipeline.step, pipeline.optimizer
    if not pending:
        return
    step.refresh()
    gradients = {p: gradient for p, gradient in pending.items() if gradient is not None}
    late = next(iter(gradients), None)
    if late is not None and pipeline.max_norm is not None and step.context.norm is not None:
        raise RefusedError(
            f"{step.context.describe(id(late))}: a gradient is in `.grad`, set by hand or left by release.paused(), which "
            "the norm that the others were clipped by does not include. Let it come from the loss that release.guard() is "
            "given, or use accumulation='hold'; optimizer.zero_grad() discards it."
        )
    if late is not None and not step.context.finite:
        raise RefusedError(
            f"{step.context.describe(id(late))}: a gradient is in `.grad`, set by hand or left by release.paused(), and the "
            "gradient of the guarded backward in this step was not finite: without release their sum would not be, either. "
            "optimizer.zero_grad() discards it."
        )
    # As long as nothing was updated, non-finite gradients skip the whole step, as in a plain step().
    together = not step.released and all(step.is_held(p) for p in pending)
    by_device = together and bool(gradients) and optimizer._checks_on_device(gradients)
    judges = optimizer.on_nonfinite != "propagate" and not by_device
    usable = dict.fromkeys(gradients, True)
    if together and judges and not all(each_finite(list(gradients.items()))):
        if optimizer.on_nonfinite == "raise":
            raise NonFiniteGradientError("a gradient holds an infinity or a NaN; the step was not taken.")
        count_skipped(optimizer, pipeline.skip_count)
        pipeline.free_unused(pending)
        return
    if judges and not together:
        usable = dict(zip(gradients, each_finite(list(gradients.items())), strict=True))
        count_skipped(optimizer, pipeline.skip_count, list(usable.values()).count(False))
    decisions = {p: step.decide(p, StepCalled(usable.get(p, True), waiting=g is not None)) for p, g in pending.items()}
    squares = step.context.squares
    for key in [key for key in squares if key not in step.released]:  # of an earlier step
        del squares[key]
    squares.update((id(parameter), square_sum(gradient)) for parameter, gradient in gradients.items())
    norm = pipeline.norm() if gradients else None
    factor = [] if pipeline.max_norm is None or norm is None else [clip_coefficient(norm, pipeline.max_norm)]
    capacity = 0 if pipeline.queue is None else pipeline.queue.capacity
    for batch in [list(pending)] if by_device else batches(step, pending, capacity):
        here = {p: gradients[p] for p in batch if p in gradients and decisions[p].action.steps}
        for gradient in here.values():
            rescale_(gradient, factor)
        if pipeline.max_norm_of_each is not None:
            clip_by_norm_(list(here.values()), [shard_of(p) for p in here], pipeline.max_norm_of_each)
        if by_device:
            pipeline.skip_count.add_unapplied(optimizer._update_if_all_finite(list(here.items())))
        else:
            used = [p for p in batch if decisions[p].action.steps]
            pipeline.update.perform([(p, here.get(p), decisions[p].action) for p in used])
        for parameter in batch:
            step.free(parameter)
            step.set_status(id(parameter), decisions[parameter].status)
        del here


@torch.no_grad()
def discard_step(pipeline: Pipeline) -> None:
    """Carry out optimizer.zero_grad(): discard gradients that were not used, and close the step.

    Gradients that were averaged over processes are used, as the other processes have used them.

    Raises:
        RefusedError: step() was not called after a backward that has updated parameters. The step is closed.
    """
    step = pipeline.step
    norm = pipeline.last_norm if step.strict and step.released else None
    finite = norm is None or bool(torch.isfinite(norm))
    overflow_was_used = not finite and pipeline.optimizer.on_nonfinite == "propagate"
    no_step = finite and bool(step.released) and step.completed and not pipeline.context.refused
    no_step = no_step and not pipeline.communication.has_failed_elsewhere()  # then every process calls zero_grad()
    pipeline.pass_end.end_failed()
    if not pipeline.single_process:
        pipeline.pass_end.flush()
    elif pipeline.queue is not None:
        pipeline.queue.discard()
    touched = [key for key, _ in step.touched() if key in step.members]
    decided = {key: step.decide(step.members[key].parameter, ZeroGrad()) for key in touched}
    for key, decision in decided.items():
        if decision.action is Action.DISCARD:
            step.free(step.members[key].parameter)
        if decision.status is not Status.RELEASED:
            step.released.pop(key, None)
        step.set_status(key, decision.status)
    parameters = (p for group in pipeline.optimizer.param_groups for p in group["params"])
    pipeline.free_unused(p for p in parameters if p.grad is not None)  # left by a refusal or paused(), or not released
    close(pipeline)
    if overflow_was_used:
        raise RefusedError(
            "this step was to be skipped, as its gradient is not finite, and the gradient had been used already: the "
            "parameters hold infinities or NaNs. Go back to a checkpoint, and declare the torch.amp.GradScaler, as "
            "release_gradients(scaler=...) with release.guard(loss), or construct the optimizer with on_nonfinite='skip'."
        )
    if no_step:
        raise RefusedError(
            "optimizer.zero_grad() without optimizer.step(): backward() has updated the parameters already. A step cannot be "
            "skipped after it, and a loss that is meant for another model trains this one, too. Run a backward that is not "
            "meant to update the parameters inside release.paused(), and call optimizer.step() after each other one. The step "
            "is closed now."
        )


def close(pipeline: Pipeline) -> None:
    """End the step, and register hooks on parameters that were unfrozen."""
    pipeline.step.close()
    pipeline.communication.end_step()
    pipeline.held_average.close()
    pipeline.context.norm, pipeline.context.finite, pipeline.context.refused = None, True, False
    pipeline.attach()
