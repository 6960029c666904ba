"""`microbatch_blocks`: checks its arguments and replaces the forward of each block."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...core.errors import InvalidArgumentError, RefusedError
from .division import divide
from .recompute import BlockCall, Checks, Recomputed

_untraced: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""`torch.compiler.disable` that imports the compiler at the first call, as torch.optim does; not public."""


def microbatch_blocks(
    blocks: Iterable[nn.Module], *, chunks: int, batched: Collection[str] | None = None, preserve_rng_state: bool = True
) -> MicrobatchedBlocks:
    """Run each block over micro-batches: the gradient of the whole batch, with the gradients of one block alive.

        g_block = sum over the chunks x_i of the batch of  d loss / d block(x_i) * d block(x_i) / d parameters

    Forward computes chunk by chunk without a graph and saves only the block's input. Backward handles one block after the
    other: each chunk is computed again with a graph and differentiated, and each parameter gets the sum of its gradients
    once. Gradient release then frees the block's gradients before the next block begins. Model and loss see the whole batch:
    the training loop does not change, and a mean over tokens is the mean over all tokens of the batch. The cost is one more
    forward, as with activation checkpointing; `chunks=1` is activation checkpointing.

    Samples must not depend on each other inside a block, and dimension 0 of its batched arguments and outputs must be the
    batch. Random numbers (dropout) are drawn for each chunk, and the same ones again in backward; they differ from those of
    an undivided batch. Gradients of half-precision parameters are summed over chunks in float32. Hooks on modules inside a
    block run for every chunk, forward and backward. Blocks in eval mode run undivided if no gradient is needed.

    Args:
        blocks: the modules, for instance `model.layers`. One that occurs twice is divided once and may run twice.
        chunks: number of micro-batches, at least 1; a smaller batch is divided into single samples. The sizes differ by at
            most one sample if the batch cannot be divided evenly; the gradient is the same.
        batched: names of the block's arguments whose tensors hold the batch; others are passed to every chunk unchanged.
            Default: the first tensor, and every other one of the same size in dimension 0; a call where another dimension
            has this size too is refused.
        preserve_rng_state: False skips saving the RNG state of each chunk, for blocks without random numbers.

    Returns:
        A handle with `remove()`, which restores the blocks; also a context manager.

    Raises:
        InvalidArgumentError: an argument is out of range; in a call, `batched` does not fit the arguments.
        RefusedError: a block has a module whose samples depend on each other (BatchNorm) or whose batch is not dimension 0;
            a block is divided already, or inside another one. In a call: arguments or outputs cannot be divided.

    Example:
        >>> with microbatch_blocks(model.layers, chunks=4):
        ...     model(batch).loss.backward()

    Source: Pudipeddi et al., 2020, Training Large Neural Networks with Constant Memory using a New Execution Algorithm
    (L2L), https://arxiv.org/abs/2002.05645.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise InvalidArgumentError(f"chunks={chunks!r} must be a whole number, at least 1.")
    if isinstance(batched, str):
        raise InvalidArgumentError(f"batched={batched!r} must be several names: ({batched!r},).")
    if not isinstance(blocks, Iterable):
        raise InvalidArgumentError(f"blocks is a {type(blocks).__name__}; give its blocks, for instance model.layers.")
    modules = list(dict.fromkeys(blocks))
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(
                f"blocks holds a {type(module).__name__}; it must hold modules, for instance model.layers."
            )
    if not modules:
        raise InvalidArgumentError("blocks is empty; give the model's blocks, for instance model.layers.")
    for module in modules:
        inside = list(module.modules())
        if any(isinstance(part.__dict__.get("forward"), DividedForward) for part in inside):
            raise RefusedError(
                "a block is divided into micro-batches already; call remove() on what microbatch_blocks returned."
            )
        if any(part is other for part in inside[1:] for other in modules):
            raise RefusedError("a block is inside another one; give the outer blocks, or the inner ones, and not both.")
        _require_independent_samples(module, inside)
        if batched is None:
            _require_batch_first(module)
    return MicrobatchedBlocks(modules, chunks, None if batched is None else tuple(batched), preserve_rng_state)


class MicrobatchedBlocks:
    """The handle that `microbatch_blocks` returns; a context manager that calls `remove()` at its end.

    Attributes:
        chunks: number of micro-batches.
    """

    def __init__(self, blocks: list[nn.Module], chunks: int, batched: tuple[str, ...] | None, preserve_rng_state: bool) -> None:
        self.chunks = chunks
        self._divided = {block: DividedForward(block, chunks, batched, preserve_rng_state) for block in blocks}
        for block, divided in self._divided.items():
            block.forward = divided  # pyright: ignore[reportAttributeAccessIssue]

    def remove(self) -> None:
        """Restore the forward of every block. A second call does nothing.

        Raises:
            RefusedError: a block's forward was replaced by something else since; nothing was changed.
        """
        for block, divided in self._divided.items():
            if block.__dict__.get("forward") is not divided:
                raise RefusedError("a block's forward was replaced after microbatch_blocks; undo that first.")
        for block, divided in self._divided.items():
            divided.restore(block)
        self._divided.clear()

    def __enter__(self) -> MicrobatchedBlocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class DividedForward:
    """Replaces the forward of a block and calls the original for each chunk. A copy of the block gets a copy of this.

    The block holds it, and it holds the block weakly, so that nothing but the model keeps parameters alive.
    """

    def __init__(self, block: nn.Module, chunks: int, batched: tuple[str, ...] | None, preserve_rng_state: bool) -> None:
        self._block = weakref.ref(block)
        self._chunks = chunks
        self._batched = batched
        self._preserve_rng_state = preserve_rng_state
        self._before = block.__dict__.get("forward")  # one that was set on the instance; None if there is only the class's
        self._names = _positional_names(block.forward)
        self._checks = Checks()

    @_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output for the whole batch."""
        block = self._its_block()
        if not block.training and not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        modules = _inside(block)
        _require_independent_samples(block, modules)
        division = divide(self._names, args, kwargs, self._chunks, self._batched)
        call = BlockCall(modules, self._forward, division, self._checks, preserve_rng_state=self._preserve_rng_state)
        inputs = call.inputs()
        call.require_batched_outputs(inputs)
        outputs = Recomputed.apply(call, *inputs)
        return call.outputs.fill(outputs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._its_block()
        own = self._before if self._before is not None else type(block).forward.__get__(block)
        return own(*args, **kwargs)

    def _its_block(self) -> nn.Module:
        block = self._block()
        if block is None:
            raise RefusedError("this forward's block no longer exists; keep the module, and call that.")
        return block

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": self._its_block()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _block=weakref.ref(state["_block"]))

    def restore(self, block: nn.Module) -> None:
        """Restore the block's own forward."""
        if self._before is None:
            del block.forward
        else:
            block.forward = self._before


def _positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _inside(block: nn.Module) -> list[nn.Module]:
    """Return a block and the modules in it, each once, without the names that make `modules()` several times slower."""
    found = {block: None}
    waiting = [block]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def _require_independent_samples(block: nn.Module, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        statistics = isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
        )
        if statistics and (module.training or not module.track_running_stats):
            name = next(name for name, other in block.named_modules() if other is module)
            raise RefusedError(
                f"{type(module).__name__} {name!r} in a block takes statistics over the batch, which micro-batches would "
                "change. Call its eval(), use LayerNorm or GroupNorm, or leave the block out of microbatch_blocks."
            )


def _require_batch_first(block: nn.Module) -> None:
    for name, module in block.named_modules():
        if getattr(module, "batch_first", True) is False:
            raise RefusedError(
                f"{type(module).__name__} {name!r} in a block has batch_first=False: its dimension 0 is not the batch. "
                "Construct it with batch_first=True; or, if the block's own arguments have the batch in dimension 0, name them "
                "in batched=."
            )
