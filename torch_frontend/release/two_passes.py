"""What `guard` does in backward(): a pass that measures the gradients, then the pass that uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ...core.errors import PenstockError, Refused
from .graph import Graph
from .guard import SetAside

if TYPE_CHECKING:
    from .release import Release


def two_passes(release: Release, loss: Tensor, seed: Tensor, keep_bytes: int) -> None:
    """The backward of a guarded loss.

    The first pass adds nothing to the gradients of leaves that are not released: the second does. If the measured gradient
    must not be used, there is no second one, and those leaves get what the first gave them.

    Args:
        release: measures, and updates.
        loss: 0-d, with its graph.
        seed: what backward() came with.
        keep_bytes: gradients of that many bytes may stay alive between the passes. The second need not compute them again.
    """
    hooks = release.hooks
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
        with release.measuring(keep_bytes) as measured:
            torch.autograd.backward(loss, seed, retain_graph=True)
        for parameter in hooks.parameters:
            if parameter.grad is not None and parameter not in measured.kept:  # no hook freed it
                parameter.grad = None
                raise hooks.lost(parameter)
    except BaseException:
        aside.restore()
        release.forget(hooks.parameters)
        raise
    with release.updating(measured) as usable:
        if not usable:
            aside.restore(add=True)
            return
        if not graph.leaves.issuperset(measured.parameters):  # some are hidden, and would be computed again
            release.forget(measured.kept)
            measured.kept.clear()
        left_over = [parameter for parameter in measured.parameters if parameter not in measured.kept]
        aside.restore(add=not left_over)
        if left_over:
            others = [leaf for leaf in graph.leaves & foreign if leaf.requires_grad]
            _second_pass(loss, seed, [*left_over, *others] if measured.kept else None)
        for parameter in list(measured.kept):
            release.deliver([parameter])


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
