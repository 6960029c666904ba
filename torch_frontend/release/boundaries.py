"""What optimizer.step() and optimizer.zero_grad() do under release: they use what waits, or discard it, and close the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import NonFiniteGradient, Refused
from ...core.release import Action, Decision, Status, ZeroGrad
from ...core.release import Step as StepCalled
from ..clipping import clip_by_norm_, clip_coefficient
from ..communication.shards import is_released
from ..finiteness import all_finite, finite
from ..groups import check_gradient
from .pipeline import count_skipped, rescale_, square_sum
from .queue import batches

if TYPE_CHECKING:
    from .release import Release


@torch.no_grad()
def close_step(release: Release) -> None:
    """optimizer.step(): use what waits, and close the step. What can be refused is, before a parameter is changed."""
    step = release.step
    if step.strict:
        step.check_settings()
    if len(step.released) < len(step.members) or not step.members:
        step.refresh()
        release.hooks.check(step.without_gradient())
    if release.scaler is not None:
        release.held_average.require_judged()
    release.end_failed_pass()
    release.finish_round()
    if not release.alone:  # what was unfrozen since has a gradient that no hook sent: it is averaged with those that wait
        release.attach()
        release.held_average.step([p for p, gradient in waiting(release).items() if gradient is not None])
    _use_waiting(release, waiting(release))
    close(release)


def waiting(release: Release) -> dict[Tensor, Tensor | None]:
    """The parameters that a step() has to look at, with the gradients that wait in `.grad`.

    Raises:
        Refused: a gradient of a parameter that was updated already, or one that a refused backward has added to.
    """
    step, found = release.step, dict[Tensor, Tensor | None]()
    for group in release.optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if is_released(gradient):
                gradient = None
            if gradient is None and not step.has_waiting:
                continue
            key = id(parameter)
            status = step.status(key)
            if gradient is None and status is Status.HELD:  # somebody took it out of `.grad`
                step.ledger.free(parameter)
                step.set_status(key, Status.IDLE)
            elif gradient is not None:
                if key in step.mixed:
                    raise Refused(
                        f"{step.disclosure.describe(key)}: a backward that was refused has added to the gradient that it "
                        "held. Call optimizer.zero_grad(), and compute this step's gradients again."
                    )
                check_gradient(parameter, gradient)
                if status is Status.RELEASED:
                    step.decide(parameter, StepCalled(waiting=True))  # refuses
                if status is Status.IDLE:  # set by hand, unfrozen since, or outside the model: what step() would use
                    step.set_status(key, Status.HELD)
                found[parameter] = gradient
            elif status is Status.ACCUMULATED:
                found[parameter] = None
    return found


def _use_waiting(release: Release, waiting: dict[Tensor, Tensor | None]) -> None:
    step, optimizer = release.step, release.optimizer
    if not waiting:
        return
    step.refresh()
    gradients = {p: gradient for p, gradient in waiting.items() if gradient is not None}
    release.check_waiting(gradients)
    # Where nothing was updated yet, gradients are judged together, as a plain step() does.
    together = not step.released and all(step.held(p) for p in waiting)
    by_device = together and bool(gradients) and optimizer.checks_on_device(gradients)
    judges = optimizer.on_nonfinite != "propagate" and not by_device
    usable = dict.fromkeys(gradients, True)
    if together and judges and not all_finite(gradients.values()):
        if optimizer.on_nonfinite == "raise":
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; the step was not taken.")
        count_skipped(optimizer, release.skip_count)
        release.forget(waiting)
        return
    if judges and not together:
        usable = dict(zip(gradients, finite(list(gradients.values())), strict=True))
        count_skipped(optimizer, release.skip_count, list(usable.values()).count(False))
    decisions = {p: step.decide(p, StepCalled(usable.get(p, True), waiting=g is not None)) for p, g in waiting.items()}
    for parameter, gradient in gradients.items():
        step.disclosure.squares[id(parameter)] = square_sum(gradient)
    norm = release.norm() if gradients else None
    factor = [] if release.max_norm is None or norm is None else [clip_coefficient(norm, release.max_norm)]
    room = 0 if release.queue is None else release.queue.room
    for batch in [list(waiting)] if by_device else batches(step, waiting, room):
        here = {p: gradients[p] for p in batch if p in gradients and decisions[p].action.steps}
        for gradient in here.values():
            rescale_(gradient, factor)
        if release.max_norm_of_each is not None:
            clip_by_norm_(list(here.values()), release.max_norm_of_each)
        if by_device:
            release.skip_count.add_unapplied(optimizer.update_if_all_finite(list(here.items())))
        else:
            used = [p for p in batch if decisions[p].action.steps]
            release.update.perform([(p, here.get(p), decisions[p].action) for p in used])
        for parameter in batch:
            step.free(parameter)
            step.set_status(id(parameter), decisions[parameter].status)
        del here


@torch.no_grad()
def discard(release: Release) -> None:
    """optimizer.zero_grad(): discard gradients that were not used, and close the step.

    Those that were averaged over processes are used, as the other processes have used them.

    Raises:
        Refused: step() was not called, and a gradient that is not finite was used. The step is closed.
    """
    step = release.step
    propagates = release.optimizer.on_nonfinite == "propagate"
    overflow_was_used = step.strict and propagates and bool(step.released) and release.norm_is_infinite
    release.end_failed_pass()
    if not release.alone:
        release.finish_round()
    elif release.queue is not None:
        release.queue.discard()
    decided: dict[int, Decision] = {}
    for key, _ in list(step.open()):
        if key in step.members:
            decided[key] = step.decide(step.members[key].parameter, ZeroGrad())
    for key, decision in decided.items():
        if decision.action is Action.DISCARD:
            step.free(step.members[key].parameter)
        if decision.status is not Status.RELEASED:
            step.released.pop(key, None)
        step.set_status(key, decision.status)
    release.forget(p for p in release.hooks.parameters if p.grad is not None)  # what a refusal or paused() has left
    close(release)
    if overflow_was_used:
        raise Refused(
            "this step was to be skipped, as its gradient is not finite, and the gradient had been used already: the "
            "parameters hold infinities or NaNs. Go back to a checkpoint, and declare the torch.amp.GradScaler, as "
            "release_gradients(scaler=...) with release.guard(loss), or construct the optimizer with on_nonfinite='skip'."
        )


def close(release: Release) -> None:
    """The step is over."""
    release.step.close()
    release.communication.end_step()
    release.held_average.close()
    release.disclosure.norm, release.disclosure.finite = None, True
    release.attach()
