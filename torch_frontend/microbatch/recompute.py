"""One call of a block, chunk by chunk: forward without a graph; backward by computing each chunk again, with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ...core.errors import RefusedError
from ..autograd.graph import Graph
from ..release.hooks import owner_of
from .division import Division, Outputs, outputs_of
from .surroundings import Surroundings

HALF_PRECISION = (torch.bfloat16, torch.float16)


class Recomputed(torch.autograd.Function):
    """The block's output for the whole batch; its graph keeps the block's input and nothing else.

    Parameters are inputs of this function, and their gradients its outputs: each is accumulated once in a backward, by
    autograd itself, with the hooks that are on the parameter.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: the parameters that require a gradient, then the tensor arguments."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # parameters as well: one that changes before its backward is noticed
        ctx.call = call
        outputs = call.forward(tensors)
        ctx.mark_non_differentiable(*(x for x in outputs if not _differentiable(x)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator is not typed
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the whole batch."""
        return None, *ctx.call.backward(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])


class Room(nn.Module):
    """Holds a block so that its parameters can be replaced for as long as some work takes (`functional_call`)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, work: Callable[[], Any]) -> Any:
        """Do the work."""
        return work()


class Call:
    """What belongs to one call of a block, besides the tensors, which autograd keeps.

    Args:
        room: holds the block.
        forward: the block's own, called with the arguments of one chunk.
        division: of the arguments.
        preserve_rng_state: draw the same random numbers for a chunk again in backward.
    """

    outputs: Outputs  # of the first chunk, without its tensors

    def __init__(self, room: Room, forward: Callable[..., Any], division: Division, *, preserve_rng_state: bool) -> None:
        self._room = room
        self._forward = forward
        self._division = division
        self._parameters = {name: p for name, p in room.named_parameters() if p.requires_grad}
        self._surroundings = Surroundings(division.tensors, preserve_rng_state)
        self._batched = [False] * len(self._parameters) + division.batched

    def inputs(self) -> list[Tensor]:
        """The tensors that `Recomputed` is applied to. The arguments among them are not held here afterwards."""
        return [*self._parameters.values(), *self._division.take_tensors()]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The output for the whole batch. Parameters are detached, too: autocast would keep casts of those that are not,
        without a graph, and everybody else who uses them would lose their gradient."""
        tensors = [tensor.detach() for tensor in tensors]
        chunks = self._division.chunks
        versions, inputs = self._buffer_versions(), _versions(tensors)
        whole: list[Tensor] = []
        for chunk in chunks:
            self._surroundings.remember_random_state()
            cut = self._cut(tensors, chunk)

            def work(cut: list[Tensor] = cut, chunk: slice = chunk) -> Outputs:
                return self._output(cut, chunk)

            outputs = self._with_parameters_of(tensors, work)
            if not whole:
                self._require_unchanged_buffers(versions)
                if _versions(tensors) != inputs:
                    raise RefusedError(
                        "a block writes to its argument in place, which it has to find again in backward. Take inplace=True "
                        "out of the block's first modules, or the block out of microbatch_blocks."
                    )
                self.outputs = outputs.without_tensors()
                whole = [_for_all(x, chunks) for x in outputs.tensors]
            outputs.require_like(self.outputs)
            for target, part in zip(whole, outputs.tensors, strict=True):
                if target is not part:
                    target[chunk].copy_(part)
        return tuple(whole)

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradient of every input of `Recomputed`: summed over chunks where they share it, put together otherwise."""
        chunks = self._division.chunks
        sums = {
            index: _Sum(tensor, several=len(chunks) > 1)
            for index, tensor in enumerate(tensors)
            if needed[index] and not self._batched[index]
        }
        parts: dict[int, Tensor] = {}
        with self._surroundings.own_random_numbers():
            for number, chunk in enumerate(chunks):
                self._surroundings.restore_random_state(number)
                cut = self._cut(tensors, chunk)
                leaves = [
                    sums[index].leaf if index in sums else tensor.detach().requires_grad_(needed[index])
                    for index, tensor in enumerate(cut)
                ]

                def work(leaves: list[Tensor] = leaves, chunk: slice = chunk, first: bool = number == 0) -> None:
                    self._differentiate(leaves, chunk, gradients, first)

                self._with_parameters_of(leaves, work)
                for index, leaf in enumerate(leaves):
                    if index not in sums and leaf.grad is not None:
                        if index not in parts:
                            parts[index] = torch.zeros_like(tensors[index])
                        parts[index][chunk].copy_(leaf.grad)
        for parameter, index in zip(self._parameters.values(), sums, strict=False):
            _book(parameter, sums[index].nbytes)
        return [sums[index].take() if index in sums else parts.get(index) for index in range(len(tensors))]

    def _differentiate(self, leaves: Sequence[Tensor], chunk: slice, gradients: Sequence[Tensor | None], first: bool) -> None:
        """Compute one chunk again, with a graph, and walk it back: gradients arrive in `leaves`.

        The parameters stay replaced meanwhile, because checkpointing inside the block computes parts of it once more.
        """
        with torch.enable_grad():
            outputs = self._output(leaves, chunk)
        pairs = [
            (output, gradient[chunk])
            for output, gradient in zip(outputs.tensors, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if first:
            _require_own_leaves([output for output, _ in pairs], leaves)
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def _cut(self, tensors: Sequence[Tensor], chunk: slice) -> list[Tensor]:
        return [tensor[chunk] if its else tensor for tensor, its in zip(tensors, self._batched, strict=True)]

    def _with_parameters_of(self, tensors: Sequence[Tensor], work: Callable[[], Any]) -> Any:
        return functional_call(self._room, dict(zip(self._parameters, tensors, strict=False)), (work,))

    def _output(self, tensors: Sequence[Tensor], chunk: slice) -> Outputs:
        args, kwargs = self._division.arguments(tensors[len(self._parameters) :])
        with self._surroundings.autocast():
            returned = self._forward(*args, **kwargs)
        return outputs_of(returned, chunk.stop - chunk.start, len(self._division.chunks))

    def _buffer_versions(self) -> dict[str, int]:
        if torch.is_inference_mode_enabled():
            return {}
        return {name: buffer._version for name, buffer in self._room.named_buffers() if not buffer.is_inference()}

    def _require_unchanged_buffers(self, before: dict[str, int]) -> None:
        for name, version in self._buffer_versions().items():
            if before.get(name, version) != version:
                raise RefusedError(
                    f"a block changes its buffer {name.removeprefix('block.')!r} in forward, and would do so again for every "
                    "chunk, and once more in backward. Take this block out of microbatch_blocks, or the buffer out of it."
                )


class _Sum:
    """The sum over chunks of the gradient of a tensor that all of them use.

    Chunks' gradients of half-precision tensors are summed in float32 and rounded once, in `take`.

    Args:
        tensor: a parameter, or an argument that is not divided.
        several: there are several chunks.
    """

    def __init__(self, tensor: Tensor, *, several: bool) -> None:
        self.leaf = tensor.detach().requires_grad_()
        self._total: list[Tensor] = []
        if several and tensor.dtype in HALF_PRECISION:
            total = self._total  # the hook must not hold the leaf, which holds the hook

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
        """Of the sum as it is."""
        found = self._total[0] if self._total else self.leaf.grad
        return 0 if found is None else found.untyped_storage().nbytes()

    def take(self) -> Tensor | None:
        """The sum in the tensor's dtype, which is not held here afterwards; None if no chunk used the tensor."""
        if self._total:
            return self._total.pop().to(self.leaf.dtype)
        gradient, self.leaf.grad = self.leaf.grad, None
        return gradient


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to."""
    return [] if torch.is_inference_mode_enabled() else [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _for_all(part: Tensor, chunks: Sequence[slice]) -> Tensor:
    """Room for the output of all chunks, from that of the first."""
    return part if len(chunks) == 1 else part.new_empty((chunks[-1].stop, *part.shape[1:]))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _require_own_leaves(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse a block that reaches tensors from elsewhere: chunk by chunk, they would get a gradient several times."""
    own = {id(leaf) for leaf in leaves}
    for output in outputs:
        for leaf in Graph.of(output).leaves:
            if id(leaf) not in own:
                raise RefusedError(
                    f"a block uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is neither one of its "
                    "parameters nor one of its arguments. Pass it as an argument of the block, or take the block out of "
                    "microbatch_blocks."
                )


def _book(parameter: Tensor, nbytes: int) -> None:
    """The gradient of a block's parameter exists from here on, though autograd delivers it later."""
    owner = owner_of(parameter)
    if nbytes and owner is not None:
        owner.step.ledger.arrive(id(parameter), nbytes)
