"""What `guard` does in backward(): a pass that measures the gradients, then the pass that uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ...core.errors import NonFiniteGradient, PenstockError, Refused
from .graph import Graph
from .guard import SetAside, require_whole
from .measurement import Measurement
from .parts import Parts


def two_passes(parts: Parts, loss: Tensor, seed: Tensor, keep_bytes: int) -> None:
    """The backward of a guarded loss.

    The first pass adds nothing to the gradients of leaves that are not released: the second does. If the measured gradient
    must not be used, there is no second one, and those leaves get what the first gave them.

    Args:
        parts: measure, and update.
        loss: 0-d, with its graph.
        seed: what backward() came with.
        keep_bytes: gradients of that many bytes may stay alive between the passes. The second need not compute them again.
    """
    if parts.released or parts.conditioning.overflow_to_be_judged:
        raise Refused(
            "a second guarded backward() before optimizer.step(): the first has taken its gradient for the whole one, for "
            "its norm and for whether it is finite. Add the losses up, and guard their sum; or use accumulation='hold'. "
            "optimizer.step() or optimizer.zero_grad() closes a step."
        )
    require_whole(parts, parts.hooks.parameters)
    parts.conditioning.withdraw()
    parts.attach()
    hooks = parts.hooks
    for parameter in hooks.parameters:
        if parameter.grad is not None:
            raise Refused(
                f"{hooks.describe(parameter)} has a gradient from an earlier backward, which the measuring pass would mix "
                "up with this one. Call optimizer.zero_grad() first."
            )
    graph = Graph.of(loss)
    foreign = graph.leaves | graph.behind_checkpoints | set(() if hooks.model is None else hooks.model.parameters())
    foreign -= set(hooks.parameters)
    hooks.check_ownership(foreign)
    if graph.has(CheckpointFunction):  # it cannot run in a pass that leaves anything out
        keep_bytes = 0
    aside = SetAside(foreign)
    try:
        with _measuring(parts, keep_bytes) as measured:
            torch.autograd.backward(loss, seed, retain_graph=True)
        for parameter in hooks.parameters:
            if parameter.grad is not None and parameter not in measured.kept:  # no hook freed it
                parameter.grad = None
                parts.communication.fail()
                raise hooks.lost(parameter)
    except BaseException:
        aside.restore()
        parts.forget(hooks.parameters)
        raise
    with _updating(parts, measured) as usable:
        if not usable:
            aside.restore(add=True)
            return
        if not graph.leaves.issuperset(measured.parameters):  # some are hidden, and would be computed again
            parts.forget(measured.kept)
            measured.kept.clear()
        left_over = [parameter for parameter in measured.parameters if parameter not in measured.kept]
        aside.restore(add=not left_over)
        if left_over:
            others = [leaf for leaf in graph.leaves & foreign if leaf.requires_grad]
            _second_pass(loss, seed, [*left_over, *others] if measured.kept else None)
        for parameter in list(measured.kept):
            parts.deliver([parameter])


@contextlib.contextmanager
def _measuring(parts: Parts, keep_bytes: int) -> Iterator[Measurement]:
    """Gradients in this context are measured, and freed but for the first that fit into keep_bytes."""
    judge = parts.optimizer.on_nonfinite != "propagate" or parts.conditioning.scaler is not None
    measured = parts.measurement = Measurement(judge=judge, keep_bytes=keep_bytes)
    try:
        yield measured
        parts.communication.flush(always=True)
        if parts.optimizer.on_nonfinite == "raise" and parts.conditioning.scaler is None and not measured.finite:
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; nothing was updated.")
    except NonFiniteGradient:
        raise  # on all processes
    except BaseException:
        parts.communication.fail()
        raise
    finally:
        parts.measurement = None
        parts.arrivals.end_pass()


@contextlib.contextmanager
def _updating(parts: Parts, measured: Measurement) -> Iterator[bool]:
    """Gradients in this context are those that were measured, and are used; False if they must not be."""
    with parts.conditioning.decide(measured) as finite:
        if not finite:
            parts.forget(measured.kept)
            parts.nonfinite.count()
        try:
            yield finite
            if finite:
                parts.finish_round(always=True)
        except BaseException:
            parts.communication.fail()
            raise


def _second_pass(loss: Tensor, seed: Tensor, inputs: list[Tensor] | None) -> None:
    try:
        torch.autograd.backward(loss, seed, inputs=inputs)
    except PenstockError:
        raise
    except Exception as error:
        error.add_note(
            "This happened in the second of the two passes of release.guard(), which goes through the graph again; some "
            "parameters may be updated already. A torch.autograd.Function that frees its own buffers in backward() cannot be "
            "gone through twice: use accumulation='hold', which needs one pass."
        )
        raise
