"""`guard(loss)`: loss.backward() runs one pass that only measures, and then the pass that updates.

Clipping and loss scaling need to know the whole gradient before the first update. Keeping all of it would give up the memory
that release saves, so the graph is walked twice: the first pass measures each gradient and frees it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from ...core.errors import NonFiniteGradientError, PenstockError, RefusedError
from ...core.release import Ledger
from ..autograd.donated import require_no_donation
from ..autograd.graph import Graph
from ..autograd.leaves import SavedGradients
from ..autograd.passes import is_compiled, keeps_graph
from ..autograd.retained import retained
from ..autograd.saved_context import SavedContext
from ..clipping import clip_coefficient, gradient_norm, is_finite
from ..communication.shards import Shard, is_sharded, sum_over_shards
from .hooks import owner_of
from .pipeline import Pipeline
from .stages import ReadyGradient, count_skipped


class Measurement:
    """The last stage of the first pass: measures norms and finiteness, without a synchronisation, and frees the gradients.

    Args:
        ledger: records the bytes of gradient alive.
        judge: check whether elements are finite; otherwise every gradient counts as finite.
        keep_bytes: most bytes of gradient to keep for the second pass.

    Attributes:
        norms: by parameter, of the local part, 0-d.
        kept: parameters whose gradients were kept, in the order in which they came.
    """

    def __init__(self, ledger: Ledger, *, judge: bool, keep_bytes: int) -> None:
        self._ledger = ledger
        self._judge = judge
        self._budget = keep_bytes
        self.norms: dict[Tensor, Tensor] = {}
        self._finite: list[tuple[Shard | None, Tensor]] = []  # of each gradient, whether its local part is finite
        self.kept: dict[Tensor, None] = {}

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        """Measure these gradients, and keep those that fit into the rest of keep_bytes."""
        for member, gradient in ready:
            assert gradient is not None
            parameter = member.parameter
            norm = self.norms[parameter] = gradient_norm(gradient)
            if self._judge:
                self._finite.append((member.shard, is_finite(gradient, norm)))
            nbytes = gradient.untyped_storage().nbytes() if self._budget else 0
            if 0 < nbytes <= self._budget:
                self._budget -= nbytes
                self.kept[parameter] = None
                self._ledger.arrive(member.key, member.nbytes)
            else:
                parameter.grad = None
                if len(parameter._post_accumulate_grad_hooks) > 1:  # others may look at it
                    member.leave_marker()
                self._ledger.arrive_and_free(member.key, member.nbytes)

    @functools.cached_property
    def finite(self) -> bool:
        """Whether every element of every gradient is finite on every process; read after the first pass.

        It synchronises if elements were checked.
        """
        if not self._finite:
            return True
        device = self._finite[0][1].device
        bad = (~torch.stack([finite.to(device) for _, finite in self._finite])).float()
        return not bool(torch.stack(sum_over_shards([shard for shard, _ in self._finite], bad.unbind())).sum())


def two_passes(pipeline: Pipeline, loss: Tensor, seed: Tensor, keep_bytes: int) -> None:
    """Run the backward of a guarded loss.

    Leaves that are not released get their gradient from the second pass, or from the first if there must not be a second.

    Args:
        pipeline: of the release.
        loss: 0-d, with its graph.
        seed: gradient of the loss that backward() was called with, 0-d.
        keep_bytes: most bytes of gradient to keep between the passes, so that the second need not compute them again.
    """
    hooks, step = pipeline.hooks, pipeline.step
    judged = not pipeline.context.finite and pipeline.decided_scale == pipeline.scale()  # the scaler was not updated since
    if step.released or judged:
        raise RefusedError(
            "a second guarded backward() before optimizer.step(): the first has taken its gradient for the whole one, for "
            "its norm and for whether it is finite. For micro-batches use accumulation='hold', which keeps all gradients, or "
            "microbatch_blocks, which keeps one block's; or add the losses up, and guard their sum. optimizer.step() or "
            "optimizer.zero_grad() closes a step."
        )
    if _is_unscaled(pipeline):
        raise RefusedError(
            "scaler.unscale_(optimizer) was called (or scaler.step(optimizer) has raised) since the last scaler.update(): "
            "scaler.step() would not look for infinities in this gradient. Call scaler.update() before the next backward()."
        )
    require_whole_loss(pipeline, hooks.parameters)
    step.clear_markers()
    pipeline.attach()
    for parameter in hooks.parameters:
        if parameter.grad is not None:
            raise RefusedError(
                f"{hooks.describe(id(parameter))} has a gradient from an earlier backward, which the measuring pass would mix "
                "up with this one. Call optimizer.zero_grad() first."
            )
    graph = Graph.of(loss)
    foreign = graph.leaves | graph.hidden | set(() if hooks.model is None else hooks.model.parameters())
    foreign -= set(hooks.parameters)
    if any(owner is not None and not owner.paused for owner in map(owner_of, foreign)):
        raise RefusedError(
            "this loss has parameters of another optimizer's release, and one guard() cannot measure for both. Run this "
            "backward inside the other release's paused() if it is not meant to update them; otherwise use one optimizer, or "
            "accumulation='hold' with max_norm in both releases."
        )
    if "CompiledFunctionBackward" in graph.functions:
        require_no_donation(loss)
    intermediate = retained()
    if intermediate or graph.has(CheckpointFunction):  # neither gets all of its gradient in a pass that leaves anything out
        keep_bytes = 0
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # where RNG states cannot be read
    aside, context = SavedGradients(foreign | intermediate), SavedContext(hooks.parameters, preserve_rng_state=not captured)
    context.save_rng_state()
    judge = pipeline.optimizer.on_nonfinite != "propagate" or pipeline.scaler is not None
    measured = Measurement(step.ledger, judge=judge, keep_bytes=keep_bytes)
    try:
        with _measuring(pipeline, measured):
            torch.autograd.backward(loss, seed, retain_graph=True)
        step.clear_markers()
        for parameter in hooks.parameters:
            if parameter.grad is not None and parameter not in measured.kept:  # no hook freed it
                parameter.grad = None
                pipeline.communication.fail()
                raise hooks.lost(parameter)
    except BaseException:
        aside.restore()
        pipeline.free_unused(hooks.parameters)
        raise
    with _updating(pipeline, measured) as usable:
        if not usable:
            aside.restore(add=True)
            return
        hidden = not graph.leaves.issuperset(measured.norms)  # some would be computed again
        # What draws random numbers in backward must draw the same in the second pass, and so leave none of them out.
        if measured.kept and (hidden or context.rng_state_has_changed(0)):
            pipeline.free_unused(measured.kept)
            measured.kept.clear()
        left_over = [parameter for parameter in measured.norms if parameter not in measured.kept]
        aside.restore(add=not left_over)
        if left_over:
            context.restore_rng_state(0)
            others = [leaf for leaf in graph.leaves & foreign if leaf.requires_grad]
            _second_pass(loss, seed, [*left_over, *others] if measured.kept else None, retain_graph=keeps_graph())
        for parameter in list(measured.kept):
            pipeline.deliver([parameter])
    step.complete()


def _is_unscaled(pipeline: Pipeline) -> bool:
    """Whether the scaler takes the gradients of the optimizer for unscaled and judged."""
    states = getattr(pipeline.scaler, "_per_optimizer_states", {})  # not public
    return states.get(id(pipeline.optimizer), {}).get("stage") is OptState.UNSCALED


@contextlib.contextmanager
def _measuring(pipeline: Pipeline, measured: Measurement) -> Iterator[None]:
    """Measure the gradients of the backward in this context, and free all but those that are kept."""
    try:
        with pipeline.measuring(measured):
            yield
            pipeline.communication.flush(always=True)
        if pipeline.optimizer.on_nonfinite == "raise" and pipeline.scaler is None and not measured.finite:
            raise NonFiniteGradientError("a gradient holds an infinity or a NaN; nothing was updated.")
    except NonFiniteGradientError:
        raise  # on all processes
    except BaseException:
        pipeline.communication.fail()
        raise


@contextlib.contextmanager
def _updating(pipeline: Pipeline, measured: Measurement) -> Iterator[bool]:
    """Gradients in this context are those that were measured, and are used; False if they must not be."""
    step, context = pipeline.step, pipeline.context
    scale = pipeline.scale()
    norms = {parameter: norm / scale for parameter, norm in measured.norms.items()}
    context.squares.clear()
    context.squares.update((id(parameter), norm.square()) for parameter, norm in norms.items())
    context.judged, context.finite = True, measured.finite
    context.norm = pipeline.norm()
    pipeline.decided_scale = scale
    step.settings.remember(pipeline.optimizer.param_groups, stepped=True)
    members = [step.members[id(parameter)] for parameter in norms if id(parameter) in step.members]
    for member in members:
        member.marker.scale = scale
    # Rounded to the gradient's dtype once, as GradScaler has it: the numbers are the same bit for bit.
    factors: list[Tensor | float] = [] if pipeline.scaler is None else [1.0 / scale]
    if pipeline.max_norm is not None and context.norm is not None:
        factors.append(clip_coefficient(context.norm, pipeline.max_norm))
    with pipeline.updating(factors):
        if not measured.finite:
            pipeline.free_unused(measured.kept)
            count_skipped(pipeline.optimizer, pipeline.skip_count)
        try:
            yield measured.finite
            if measured.finite:
                pipeline.pass_end.flush(always=True)
        except BaseException:
            pipeline.communication.fail()
            raise
    for member in members:
        if member.parameter.grad is None:
            member.leave_marker()


def _second_pass(loss: Tensor, seed: Tensor, inputs: list[Tensor] | None, *, retain_graph: bool) -> None:
    try:
        torch.autograd.backward(loss, seed, inputs=inputs, retain_graph=retain_graph)
    except PenstockError:
        raise
    except Exception as error:
        error.add_note(
            "This happened in the second of the two passes of release.guard(), which goes through the graph again; some "
            "parameters may be updated already. A torch.autograd.Function that frees its own buffers in backward() cannot be "
            "gone through twice: use accumulation='hold', which needs one pass."
        )
        raise


class _TwoPasses(torch.autograd.Function):
    """The identity on the loss, whose backward calls `run`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: list[Tensor], run: Callable[[Tensor, Tensor], None]) -> Tensor:
        """Return the value of the loss. It comes in a list so that autograd does not walk its graph: `run` does, twice."""
        ctx.loss, ctx.run = loss[0], run
        return loss[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *seeds: Any) -> tuple[Tensor, None, None]:
        """Run both passes."""
        loss, ctx.loss = ctx.loss, None
        if loss is None:
            raise RefusedError("backward() was called twice on a guarded loss; compute the loss again, and guard it.")
        ctx.run(loss, seeds[0])
        return torch.zeros((), device=loss.device), None, None  # the anchor's: compiled autograd may not take None for it


_will_run = getattr(torch._C, "_will_engine_execute_node", None)  # not public; without it, extra terms are refused later

_GUARDED: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
"""The graph nodes of guarded losses, with the step that each belongs to."""


def guard_loss(loss: Tensor, run: Callable[[Tensor, Tensor], None], owner: object) -> Tensor:
    """Return a tensor with the value of the loss, whose backward() calls `run(loss, seed)`.

    Args:
        owner: the step of the release.
    """
    if Graph.of(loss).has(_TwoPasses):
        raise RefusedError(
            "the loss is guarded already; one release guards a loss, others use accumulation='hold' with max_norm."
        )
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    result: Tensor = _TwoPasses.apply(anchor, [loss], run)
    _GUARDED[result.grad_fn] = owner
    return result


def require_whole_loss(pipeline: Pipeline, parameters: Iterable[Tensor]) -> None:
    """Raise `RefusedError` if the running backward is of more than one guarded loss.

    Args:
        pipeline: of the release.
        parameters: the released ones. Sharded ones are left out: FSDP2 computes gradients of others in their place.
    """
    if _will_run is None or is_compiled():
        return
    others = [node for node, owner in list(_GUARDED.items()) if owner is pipeline.step and node.loss is not None]
    edges = (get_gradient_edge(parameter) for parameter in parameters if parameter.requires_grad and not is_sharded(parameter))
    if any(_will_run(node) for node in others) or any(_will_run(edge.node) for edge in edges):
        raise RefusedError(
            "this backward() is of more than one guarded loss, as release.guard(loss) + regulariser is, or the sum of two "
            "guarded ones: the norm would be of a part of the gradient. Guard all of it: "
            "release.guard(loss + regulariser).backward()."
        )
