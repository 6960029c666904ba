"""One call of a block in chunks: forward without a graph; in backward each chunk is computed again, with a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...core.errors import RefusedError
from ..autograd.graph import leaf_of, reachable
from ..autograd.saved_context import SavedContext
from ..release.hooks import owner_of
from .division import Division, Structure, outputs_of

HALF_PRECISION = (torch.bfloat16, torch.float16)


class Recomputed(torch.autograd.Function):
    """Computes the block's output for the whole batch, and saves only the block's input for backward.

    Parameters are inputs of this function and get their gradients from its backward: autograd itself accumulates each once
    in a backward pass, and calls the parameter's hooks.
    """

    @staticmethod
    def forward(ctx: Any, call: BlockCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the output tensors. tensors: the parameters that require a gradient, then the tensor arguments."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # parameters too, so that autograd notices a change before their backward
        ctx.call = call
        outputs = call.forward(tensors)
        ctx.mark_non_differentiable(*(x for x in outputs if not _differentiable(x)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator is not typed
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs for the whole batch."""
        return None, *ctx.call.backpropagate(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])


@dataclass
class Checks:
    """What was seen to hold for a block, and is not looked for in its later calls.

    outputs: they have a row for each sample. leaves: only the block's own tensors get gradients.
    """

    outputs: bool = False
    leaves: bool = False


class BlockCall:
    """One call of a block: everything that backward needs except the tensors, which autograd saves.

    Args:
        modules: the block and those in it.
        forward: the block's own forward, called with the arguments of one chunk.
        division: of the arguments.
        checks: of the block.
        preserve_rng_state: draw the same random numbers for a chunk again in backward.
    """

    outputs: Structure
    """Of the block's output; set by `forward`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        forward: Callable[..., Any],
        division: Division,
        checks: Checks,
        *,
        preserve_rng_state: bool,
    ) -> None:
        self._modules = modules
        self._forward = forward
        self._division = division
        self._checks = checks
        self._parameters: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}  # with the places where the modules hold them
        for module in modules:
            for name, p in module._parameters.items():
                if p is not None and p.requires_grad:
                    self._parameters.setdefault(p, []).append((module._parameters, name))
        self._context = SavedContext(division.tensors, preserve_rng_state)
        self._batched = [False] * len(self._parameters) + division.batched

    def inputs(self) -> list[Tensor]:
        """Return the tensors to apply `Recomputed` to, and drop the references to the arguments among them."""
        return [*self._parameters, *self._division.take_tensors()]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the output tensors for the whole batch.

        Parameters are detached, because autocast caches casts of parameters that require a gradient: these would be made
        without a graph, and later uses of the parameter would lose its gradient.
        """
        tensors = [tensor.detach() for tensor in tensors]
        chunks = self._division.chunks
        versions, inputs = self._buffer_versions(), _versions(tensors)
        whole: list[Tensor] = []
        for chunk in chunks:
            self._context.save_rng_state()
            sliced = self._slice(tensors, chunk)

            def compute(sliced: list[Tensor] = sliced, chunk: slice = chunk) -> tuple[Structure, list[Tensor]]:
                return self._output(sliced, chunk)

            structure, outputs = self._with_parameters(tensors, compute)
            if not whole:
                self._require_unchanged_buffers(versions)
                if _versions(tensors) != inputs:
                    raise RefusedError(
                        "a block writes to its argument in place, but needs it unchanged in backward. Take inplace=True out "
                        "of the block's first modules, or the block out of microbatch_blocks."
                    )
                self.outputs = structure
                whole = [_empty_for_all(x, chunks) for x in outputs]
            if structure != self.outputs:
                raise RefusedError("a block returned outputs of different structure for two chunks of one batch.")
            for target, part in zip(whole, outputs, strict=True):
                if target is not part:
                    target[chunk].copy_(part)
        return tuple(whole)

    def require_batched_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Raise `RefusedError` if an output has as many rows as a chunk has samples only by coincidence.

        Chunks of different sizes show it; if all have one size, the block is run once on another number of samples.
        """
        if self._checks.outputs:
            return
        self._checks.outputs = True
        sizes = {chunk.stop - chunk.start for chunk in self._division.chunks}
        if len(self._division.chunks) == 1 or len(sizes) > 1:
            return
        size = sizes.pop()
        other = slice(0, size - 1 if size > 1 else 2)
        with torch.no_grad(), self._context.fork_rng():
            tensors = [tensor.detach() for tensor in tensors]
            self._with_parameters(tensors, lambda: self._output(self._slice(tensors, other), other))

    def backpropagate(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs of `Recomputed`: summed over chunks, or concatenated for divided arguments."""
        chunks = self._division.chunks
        sums = {
            index: _GradientSum(tensor, several=len(chunks) > 1)
            for index, tensor in enumerate(tensors)
            if needed[index] and not self._batched[index]
        }
        parts: dict[int, Tensor] = {}
        with self._context.fork_rng():
            for number, chunk in enumerate(chunks):
                self._context.restore_rng_state(number)
                leaves = [
                    sums[index].leaf if index in sums else tensor.detach().requires_grad_(needed[index])
                    for index, tensor in enumerate(self._slice(tensors, chunk))
                ]

                def one_chunk(leaves: list[Tensor] = leaves, chunk: slice = chunk) -> None:
                    self._differentiate(leaves, chunk, gradients)

                self._with_parameters(leaves, one_chunk)
                for index, leaf in enumerate(leaves):
                    if index in sums or leaf.grad is None:
                        continue
                    if len(chunks) == 1:
                        parts[index] = leaf.grad
                        continue
                    if index not in parts:
                        parts[index] = torch.zeros_like(tensors[index])
                    parts[index][chunk].copy_(leaf.grad)
        _record_in_ledger((p, sums[index]) for index, p in enumerate(self._parameters) if index in sums)
        return [sums[index].take() if index in sums else parts.get(index) for index in range(len(tensors))]

    def _differentiate(self, leaves: Sequence[Tensor], chunk: slice, gradients: Sequence[Tensor | None]) -> None:
        """Compute one chunk again with a graph, and run backward; the gradients are added to `.grad` of `leaves`.

        Must run with the parameters replaced, because checkpoints inside the block compute parts of it again in backward.
        """
        with torch.enable_grad():
            _, outputs = self._output(leaves, chunk)
        pairs = [
            (output, gradient[chunk])
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if not self._checks.leaves:
            _require_own_leaves([output for output, _ in pairs], leaves)
            self._checks.leaves = True
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def _slice(self, tensors: Sequence[Tensor], chunk: slice) -> list[Tensor]:
        if len(self._division.chunks) == 1 and chunk is self._division.chunks[0]:
            return list(tensors)
        return [tensor[chunk] if divided else tensor for tensor, divided in zip(tensors, self._batched, strict=True)]

    def _with_parameters(self, tensors: Sequence[Tensor], function: Callable[[], Any]) -> Any:
        """Call the function with these tensors in the place of the parameters, as `torch.func.functional_call` does."""
        before = [(owner, name, owner[name]) for places in self._parameters.values() for owner, name in places]
        for tensor, places in zip(tensors, self._parameters.values(), strict=False):
            for owner, name in places:
                owner[name] = tensor
        try:
            return function()
        finally:
            for owner, name, tensor in before:
                owner[name] = tensor

    def _output(self, tensors: Sequence[Tensor], chunk: slice) -> tuple[Structure, list[Tensor]]:
        args, kwargs = self._division.fill(tensors[len(self._parameters) :])
        with self._context.autocast():
            returned = self._forward(*args, **kwargs)
        return outputs_of(returned, chunk.stop - chunk.start, len(self._division.chunks))

    def _buffer_versions(self) -> dict[tuple[nn.Module, str], int]:
        if torch.is_inference_mode_enabled():
            return {}
        return {
            (module, name): buffer._version
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        }

    def _require_unchanged_buffers(self, before: dict[tuple[nn.Module, str], int]) -> None:
        for (module, name), version in self._buffer_versions().items():
            if before.get((module, name), version) != version:
                at = next(at for at, other in self._modules[0].named_modules() if other is module)
                raise RefusedError(
                    f"a block changes its buffer {f'{at}.{name}'.removeprefix('.')!r} in forward, and would do so again for "
                    "every chunk, and once more in backward. Take this block out of microbatch_blocks, or the buffer out of it."
                )


class _GradientSum:
    """Sums the gradient of a tensor over chunks; for half-precision tensors in float32, rounded once in `take`.

    Args:
        tensor: a parameter, or an argument that is not divided.
        several: there are several chunks.
    """

    def __init__(self, tensor: Tensor, *, several: bool) -> None:
        self.leaf = tensor.detach().requires_grad_()
        self._total: list[Tensor] = []
        if several and tensor.dtype in HALF_PRECISION:
            total = self._total  # not self: the hook must not refer to the leaf, which owns the hook

            def add(leaf: Tensor) -> None:
                if leaf.grad is not None:
                    if total:
                        total[0].add_(leaf.grad)
                    else:
                        total.append(leaf.grad.float())
                    leaf.grad = None

            self.leaf.register_post_accumulate_grad_hook(add)

    @property
    def nbytes(self) -> int:
        """Bytes of the sum as it is stored now."""
        found = self._total[0] if self._total else self.leaf.grad
        return 0 if found is None else found.untyped_storage().nbytes()

    def take(self) -> Tensor | None:
        """Return the sum in the tensor's dtype and drop it here; None if no chunk used the tensor."""
        if self._total:
            return self._total.pop().to(self.leaf.dtype)
        gradient, self.leaf.grad = self.leaf.grad, None
        return gradient


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each tensor; 0 for inference tensors, which have none."""
    return [] if torch.is_inference_mode_enabled() else [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _empty_for_all(part: Tensor, chunks: Sequence[slice]) -> Tensor:
    """Return an empty tensor for the output of all chunks, given that of the first; with one chunk that output itself."""
    return part if len(chunks) == 1 else part.new_empty((chunks[-1].stop, *part.shape[1:]))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _require_own_leaves(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Raise `RefusedError` if outputs depend on other leaves: each chunk would add to their gradient."""
    own = {id(leaf) for leaf in leaves}
    for node in reachable(output.grad_fn for output in outputs):
        for leaf in leaf_of(node):
            if id(leaf) not in own:
                raise RefusedError(
                    f"a block uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is neither one of its "
                    "parameters nor one of its arguments. Pass it as an argument of the block, or take the block out of "
                    "microbatch_blocks."
                )


def _record_in_ledger(gradients: Iterable[tuple[Tensor, _GradientSum]]) -> None:
    """Record gradients in their release's ledger now: they exist before autograd passes them to the parameters' hooks."""
    owner: Any = None
    for parameter, gradient in gradients:
        key = id(parameter)
        if owner is None or key not in owner.step.members:
            owner = owner_of(parameter)
        if owner is not None and (nbytes := gradient.nbytes):
            owner.step.ledger.arrive(key, nbytes)
