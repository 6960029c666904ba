"""The eager backend: torch's ordinary operations, in place, with two scratch tensors.

The operations are those of the specification in the same order, so the result is the same bit for bit; only temporaries are
reused. A tensor larger than a piece is updated piece by piece, so that its update never allocates a second gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.codings.eight_bit import BLOCK
from . import cpu_codings
from .adam_piece import piece_class
from .backend import OverShards, TensorSlot, scale_key
from .cpu_codings import CpuCodings
from .memory_order import along_memory
from .packed import SMALL, batch_small_tensors
from .piece import Piece, clipped_rate, sum_of
from .random_words import Randomness

PIECE, LARGEST_PIECE = 2**18, 2**22
"""Elements of a piece for each CPU thread, and of any piece: 1 MiB of float32 a thread, so that starting an operation on all
threads takes a small part of its time, while the tensors of a piece stay in the caches; never more than 16 MiB.
"""

PIECE_ON_ACCELERATORS = 2**24
"""Elements of a piece on an accelerator: 64 MiB of float32, for few launches."""

PIECE_WITH_RANDOM_BITS = 2**21
"""The same where numbers are coded, for which they take up to 40 bytes an element."""


class EagerBackend:
    """Updates tensors in place with torch's ordinary operations, on every device; compiles nothing."""

    name = "eager"
    small = SMALL
    """Most elements of a tensor that is batched with others; the compiled backend compiles only larger ones."""
    one_launch = False

    def __init__(self, *, scratch_on_cpus: bool = True) -> None:
        """scratch_on_cpus: whether codings on a CPU have scratch and look at numbers; False plans for another device."""
        self._scratch: dict[Any, Tensor] = {}
        self._codings = CpuCodings() if scratch_on_cpus else None

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> Tensor | None:
        """Add the gradient to the moments and step; a rule that clips first computes the mean square of the whole tensor."""
        numbers = slot.numbers()
        whole = self._whole(slot, gradient)
        squares: list[Tensor] = []
        if whole is not None:
            with whole:
                whole.accumulate(numbers, first, squares if measure else None)
                eta = numbers.step_size
                if slot.rule.clips_update:
                    total = whole.ratios().mean()
                    eta = clipped_rate(eta, total if first else slot.state["mean_square"] + total)
                whole.descend(numbers, eta)
        elif not slot.rule.clips_update:
            for piece in self._pieces(slot, gradient):
                piece.accumulate(numbers, first, squares if measure else None)
                piece.descend(numbers, numbers.step_size)
        elif fields_in_compute_dtype(slot):
            eta = clipped_rate(numbers.step_size, self._accumulate(slot, gradient, first, squares if measure else None))
            for piece in self._pieces(slot, None):
                piece.load_fields()
                piece.descend(numbers, eta)
        else:  # the step needs the moments before they are rounded to the state's dtype
            self.write(slot, gradient, first, self.mean_square(slot, gradient, first, squares if measure else None))
        if slot.random:
            slot.close()
        else:
            slot.state.pop("mean_square", None)
        return sum_of(squares) if measure else None

    def update_all(
        self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None, measure: bool = False
    ) -> None:
        """Update many tensors; small ones are packed, which gives the same bits in fewer calls."""
        batches, others = batch_small_tensors(pairs, self._scratch_like, self.small)
        if over_shards is None:
            for batch in batches:
                batch.update()
            for slot, gradient in others:
                self.update(slot, gradient, first=True)
            return
        local = {id(slot): self.mean_square(slot, gradient, True) for slot, gradient in others}
        for batch in batches:
            local |= zip(map(id, batch.slots), batch.mean_squares(), strict=True)
        whole = over_shards([local[id(slot)] for slot, _ in pairs])
        totals = {id(slot): total for (slot, _), total in zip(pairs, whole, strict=True)}
        for batch in batches:
            batch.update([totals[id(slot)] for slot in batch.slots])
        for slot, gradient in others:
            self.write(slot, gradient, True, totals[id(slot)])

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        slot.keep_open(self._accumulate(slot, gradient, first))

    def apply(self, slot: TensorSlot) -> None:
        numbers = slot.numbers()
        eta = numbers.step_size
        if slot.rule.clips_update:
            eta = clipped_rate(eta, slot.state["mean_square"])
        whole = self._whole(slot, None)
        for piece in self._pieces(slot, None) if whole is None else (whole,):
            with piece:
                piece.load_fields()
                piece.descend(numbers, eta)
        slot.close()

    def write(self, slot: TensorSlot, gradient: Tensor, first: bool, total: Tensor) -> None:
        """Update a tensor of a rule that clips. total: the summed mean square of the whole tensor, 0-d."""
        numbers = slot.numbers()
        eta = clipped_rate(numbers.step_size, total) if slot.rule.clips_update else numbers.step_size
        for piece in self._pieces(slot, gradient):
            piece.accumulate(numbers, first)
            piece.descend(numbers, eta)

    def mean_square(self, slot: TensorSlot, gradient: Tensor, first: bool, squares: list[Tensor] | None = None) -> Tensor:
        """Return the summed mean square after this micro-batch, 0-d; write nothing.

        squares: the sums of the gradient's squares are appended here.
        """
        numbers = slot.numbers()
        sums = [piece.ratios_before(numbers, first, squares).sum() for piece in self._pieces(slot, gradient)]
        return self._total(slot, gradient, sums, first)

    def _accumulate(
        self, slot: TensorSlot, gradient: Tensor, first: bool, squares: list[Tensor] | None = None
    ) -> Tensor | float:
        """Add the gradient to the moments; return the summed mean square after it, 0 for a rule that does not clip."""
        numbers = slot.numbers()
        whole = self._whole(slot, gradient)
        sums = []
        for piece in self._pieces(slot, gradient) if whole is None else (whole,):
            with piece:
                piece.accumulate(numbers, first, squares)
                if slot.rule.clips_update:
                    sums.append(piece.ratios().sum())
        return self._total(slot, gradient, sums, first) if slot.rule.clips_update else 0.0

    def _total(self, slot: TensorSlot, gradient: Tensor, sums: list[Tensor], first: bool) -> Tensor:
        if not sums:
            sums = [torch.zeros((), dtype=slot.compute_dtype, device=gradient.device)]
        mean = sum_of(sums) / max(1, gradient.numel())
        return mean if first else slot.state["mean_square"] + mean

    # -- pieces ---------------------------------------------------------------------------------------------------------

    def _whole(self, slot: TensorSlot, gradient: Tensor | None) -> Piece | None:
        """Return the tensor as one piece, cached in the slot on a CPU; None if it is empty or larger than a piece.

        A rule that needs the whole matrix gets it as one piece of any size, with scratch that torch makes where it is used; an
        empty part of it, too, which takes part in the exchange of the others.
        """
        piece = slot.plan
        if piece is None:
            parameter = slot.parameter
            needs_matrix = slot.rule.of_matrix is not None
            if not (needs_matrix or 0 < parameter.numel() <= most_elements(slot)):
                return None
            if needs_matrix:
                scratch = parameter.new_empty(0, dtype=slot.compute_dtype), parameter.new_empty(0, dtype=slot.compute_dtype)
            else:
                scratch = self._scratch_like(parameter, slot.compute_dtype)
            on_cpu = parameter.device.type == "cpu"
            piece = piece_class(slot.rule)(slot, *scratch, self._codings if on_cpu else None)
            if not needs_matrix and on_cpu:  # here all pieces share their scratch
                slot.plan = piece
        state = slot.state
        piece.parameter, piece.gradient = slot.parameter, gradient
        piece.fields = slot.fields_of(state)
        piece.compensation = state.get("compensation")
        piece.first_index = slot.first_index
        if slot.random:
            piece.random = {}
        return piece

    def _pieces(self, slot: TensorSlot, gradient: Tensor | None) -> Iterator[Piece]:
        """Yield the tensor in pieces: in memory order if parameter, gradient and state have the same layout, else by rows.

        Random bits and 8-bit codes are those of rows.
        """
        tensors = slot.tensors(gradient)
        by_rows = bool(slot.random) and not slot.parameter.is_contiguous()
        if slot.coded:
            in_blocks = not math.prod(slot.parameter.shape[1:]) % BLOCK
            by_rows = not (in_blocks and all(map(Tensor.is_contiguous, tensors.values())))
        vectors = None if by_rows else along_memory(list(tensors.values()))
        of_blocks = () if vectors is None or not slot.coded else tuple(map(scale_key, slot.keys))
        vectors = vectors or [tensor.detach() for tensor in tensors.values()]
        flat = dict(zip(tensors, vectors, strict=True))
        lead = flat["parameter"]
        if not lead.numel():
            return
        rows = max(1, most_elements(slot) * lead.shape[0] // lead.numel())
        if of_blocks:
            rows = max(BLOCK, rows - rows % BLOCK)
        scratch: tuple[Tensor, Tensor] | None = None
        random: dict[int, Randomness] = {}
        for start in range(0, lead.shape[0], rows):
            part = {name: tensor[start : start + rows] for name, tensor in flat.items() if name not in of_blocks}
            part |= {name: flat[name][start // BLOCK : (start + rows) // BLOCK] for name in of_blocks if name in flat}
            if scratch is None or part["parameter"].shape != scratch[0].shape:
                scratch = self._scratch_like(part["parameter"], slot.compute_dtype)
            piece = piece_class(slot.rule)(slot, *scratch, self._codings if lead.is_cpu else None)
            piece.parameter, piece.gradient = part["parameter"], part.get("gradient")
            piece.fields = slot.fields_of(part)
            piece.compensation = part.get("compensation")
            piece.first_index = slot.first_index + start * (lead.numel() // lead.shape[0])
            piece.random = random
            yield piece

    def _scratch_like(self, part: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return two scratch tensors of the shape of this piece; on a CPU all pieces share their memory."""
        if part.device.type != "cpu":  # an accelerator's allocator caches freed memory
            return torch.empty_like(part, dtype=dtype), torch.empty_like(part, dtype=dtype)
        numel = part.numel()
        buffers = self._scratch.get(dtype)
        if buffers is None or buffers.shape[1] < numel:
            buffers = self._scratch[dtype] = torch.empty((2, max(numel, piece_elements(part))), dtype=dtype, device="cpu")
        dense = part.is_contiguous() or along_memory([part]) is not None
        strides = part.stride() if dense else torch.empty(part.shape, device="meta").stride()
        return buffers[0].as_strided(part.shape, strides), buffers[1].as_strided(part.shape, strides, buffers.shape[1])


def piece_elements(tensor: Tensor) -> int:
    """Return the number of elements of a piece on the tensor's device."""
    if tensor.device.type == "cpu":
        return min(PIECE * torch.get_num_threads(), LARGEST_PIECE)
    return PIECE_ON_ACCELERATORS


def most_elements(slot: TensorSlot) -> int:
    """Return the number of elements of a piece of this tensor."""
    most = piece_elements(slot.parameter)
    if not (slot.random or slot.coded):
        return most
    return cpu_codings.PIECE if slot.parameter.is_cpu else min(most, PIECE_WITH_RANDOM_BITS)


def fields_in_compute_dtype(slot: TensorSlot) -> bool:
    """Whether the state stores the fields in the compute dtype, so that storing them does not round."""
    return all(slot.state[key].dtype is slot.compute_dtype for key in slot.keys)
