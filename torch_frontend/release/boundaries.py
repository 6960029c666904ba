"""What optimizer.step() and optimizer.zero_grad() do under release: they close the step."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import NonFiniteGradient, Refused
from ...core.release import Status, Step, ZeroGrad
from ..finiteness import all_finite
from .parts import Parts


@torch.no_grad()
def close_step(parts: Parts) -> None:
    """optimizer.step(): flush what waits, and close the step. What can be refused is, before a parameter is changed."""
    parts.hooks.check()
    if parts.lifecycle.strict:
        parts.settings.check()
    parts.optimizer.check_settings()
    parts.conditioning.check(parts.hooks.describe)
    if parts.conditioning.scaler is not None:
        parts.held_average.require_judged()
    parts.conditioning.withdraw()
    parts.end_failed_pass()
    parts.finish_round()
    if not parts.alone:  # what was unfrozen since has a gradient that no hook sent: it is averaged with those that wait
        parts.attach()
    parts.held_average.step([p for p, gradient in parts.lifecycle.waiting().items() if gradient is not None])
    _use_waiting(parts, parts.lifecycle.waiting())
    _close(parts)


def _use_waiting(parts: Parts, waiting: dict[Tensor, Tensor | None]) -> None:
    gradients = {p: gradient for p, gradient in waiting.items() if gradient is not None}
    parts.conditioning.check_waiting(gradients, parts.hooks.describe)
    # Where nothing was updated yet, gradients are judged together, as a plain step() does.
    together = all(parts.lifecycle.status(p) is Status.HELD for p in waiting)
    by_device = together and bool(gradients) and parts.optimizer.checks_on_device(gradients)
    judged = by_device or parts.optimizer.on_nonfinite == "propagate"
    if together and not judged and not all_finite(gradients.values()):
        if parts.optimizer.on_nonfinite == "raise":
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; the step was not taken.")
        parts.nonfinite.count()
        parts.forget(waiting)
        return
    usable = dict.fromkeys(gradients, True) if together else parts.nonfinite.usable(gradients)
    decisions = {p: parts.lifecycle.decide(p, Step(usable.get(p, True), waiting=g is not None)) for p, g in waiting.items()}
    with parts.conditioning.decide_waiting(gradients):
        if by_device:
            parts.launches.use(gradients, decisions, check="all")
            return
        for batch in parts.launches.batches(waiting):
            parts.launches.use({p: gradients[p] for p in batch if p in gradients}, {p: decisions[p] for p in batch})


@torch.no_grad()
def discard(parts: Parts) -> None:
    """optimizer.zero_grad(): discard gradients that were not used, and close the step.

    Those that were averaged over processes are used, as the other processes have used them.

    Raises:
        Refused: step() was not called, and a gradient that is not finite was used. The step is closed.
    """
    propagates = parts.optimizer.on_nonfinite == "propagate"
    overflow_was_used = propagates and parts.released and parts.conditioning.overflow_published
    parts.conditioning.withdraw()
    parts.end_failed_pass()
    if parts.alone:
        parts.launches.discard()
    else:
        parts.finish_round()
    decisions = {p: parts.lifecycle.decide(p, ZeroGrad()) for p in parts.lifecycle.tensors()}
    parts.lifecycle.carry_out([(p, None, decision) for p, decision in decisions.items()])
    parts.forget(parts.hooks.parameters)  # what a refusal or paused() has left
    _close(parts)
    if overflow_was_used:
        raise Refused(
            "this step was to be skipped, as its gradient is not finite, and the gradient had been used already: the "
            "parameters hold infinities or NaNs. Go back to a checkpoint, and declare the torch.amp.GradScaler, as "
            "release_gradients(scaler=...) with release.guard(loss), or construct the optimizer with on_nonfinite='skip'."
        )


def _close(parts: Parts) -> None:
    parts.lifecycle.close()
    parts.settings.forget()
    parts.arrivals.close()
    parts.communication.end_step()
    parts.held_average.close()
    parts.conditioning.close()
    parts.attach()
