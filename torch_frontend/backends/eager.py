"""The eager backend: in place, with two pieces of scratch.

The operations are those of `core.moments` in the same order, so that the result is the same bit for bit; only the
temporaries are reused. A tensor that fits one piece is updated as it is; a larger one piece by piece, so that its update
never allocates a second gradient. `core.moments` says what is computed; here it only says where it is put.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .backend import OverShards, TensorSlot
from .memory_order import along_memory
from .packed import small_together
from .piece import Piece, clipped_rate, sum_of

PIECE = 2**16
"""Elements of a piece for each thread of a CPU: 256 KiB of float32, so that the handful in use stays in a core's cache."""

PIECE_ELSEWHERE = 2**24
"""An accelerator wants few launches: 64 MiB of float32."""


class EagerBackend:
    """Updates tensors in place with torch's ordinary operations, on every device, and starts at once."""

    name = "eager"
    one_launch = False

    def __init__(self) -> None:
        self._scratch: dict[Any, Tensor] = {}

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> Tensor | None:
        """Put the gradient into the moments and step; a rule that clips takes the mean square of the whole tensor first."""
        numbers = slot.numbers()
        whole = self._whole(slot, gradient)
        squares: list[Tensor] = []
        if whole is not None:
            with whole:
                whole.accumulate(numbers, first, squares if measure else None)
                eta = numbers.learning_rate
                if slot.rule.clips_update:
                    total = whole.ratios().mean()
                    eta = clipped_rate(eta, total if first else slot.state["mean_square"] + total)
                whole.descend(numbers, eta)
        elif not slot.rule.clips_update:
            for piece in self._pieces(slot, gradient):
                piece.accumulate(numbers, first, squares if measure else None)
                piece.descend(numbers, numbers.learning_rate)
        elif keeps_wide_moments(slot):
            eta = clipped_rate(numbers.learning_rate, self._accumulate(slot, gradient, first, squares if measure else None))
            for piece in self._pieces(slot, None):
                piece.load_moments()
                piece.descend(numbers, eta)
        else:  # the step needs the moments as they are before they are rounded
            self.write(slot, gradient, first, self.mean_square(slot, gradient, first, squares if measure else None))
        slot.state.pop("mean_square", None)
        return sum_of(squares) if measure else None

    def update_all(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None) -> None:
        """Update many tensors; small ones packed into one: the same operations on the same numbers, in fewer calls."""
        batches, others = small_together(pairs, self._scratch_like)
        if over_shards is None:
            for batch in batches:
                batch.update()
            for slot, gradient in others:
                self.update(slot, gradient, first=True)
            return
        here = {id(slot): self.mean_square(slot, gradient, True) for slot, gradient in others}
        for batch in batches:
            here |= zip(map(id, batch.slots), batch.mean_squares(), strict=True)
        everywhere = over_shards([here[id(slot)] for slot, _ in pairs])
        totals = {id(slot): total for (slot, _), total in zip(pairs, everywhere, strict=True)}
        for batch in batches:
            batch.update([totals[id(slot)] for slot in batch.slots])
        for slot, gradient in others:
            self.write(slot, gradient, True, totals[id(slot)])

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """Put the gradient of one micro-batch into the moments; leave its summed mean square in the state."""
        slot.state["mean_square"] = self._accumulate(slot, gradient, first)

    def apply(self, slot: TensorSlot) -> None:
        """Step from the moments, which hold all micro-batches; take the mean square out of the state."""
        numbers = slot.numbers()
        eta = numbers.learning_rate
        if slot.rule.clips_update:
            eta = clipped_rate(eta, slot.state["mean_square"])
        whole = self._whole(slot, None)
        for piece in self._pieces(slot, None) if whole is None else (whole,):
            with piece:
                piece.load_moments()
                piece.descend(numbers, eta)
        slot.state.pop("mean_square")

    def write(self, slot: TensorSlot, gradient: Tensor, first: bool, total: Tensor) -> None:
        """The update of a rule that clips, given the summed mean square of the whole tensor."""
        numbers = slot.numbers()
        eta = clipped_rate(numbers.learning_rate, total) if slot.rule.clips_update else numbers.learning_rate
        for piece in self._pieces(slot, gradient):
            piece.accumulate(numbers, first)
            piece.descend(numbers, eta)

    def mean_square(self, slot: TensorSlot, gradient: Tensor, first: bool, squares: list[Tensor] | None = None) -> Tensor:
        """The summed mean square after this micro-batch, 0-d; nothing is written.

        squares: gets the sums of the gradient's squares.
        """
        numbers = slot.numbers()
        sums = [piece.ratios_before(numbers, first, squares).sum() for piece in self._pieces(slot, gradient)]
        return self._total(slot, gradient, sums, first)

    def _accumulate(
        self, slot: TensorSlot, gradient: Tensor, first: bool, squares: list[Tensor] | None = None
    ) -> Tensor | float:
        """The gradient into the moments; the summed mean square after it, 0 for a rule that does not clip."""
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
        here = sum_of(sums) / max(1, gradient.numel())
        return here if first else slot.state["mean_square"] + here

    # -- pieces ---------------------------------------------------------------------------------------------------------

    def _whole(self, slot: TensorSlot, gradient: Tensor | None) -> Piece | None:
        """The tensor as one piece, which the slot keeps on a CPU; None if it has no element or takes several."""
        piece = slot.plan
        if piece is None:
            parameter = slot.parameter
            if not 0 < parameter.numel() <= piece_elements(parameter):
                return None
            piece = Piece(slot, *self._scratch_like(parameter, slot.compute_dtype))
            if parameter.device.type == "cpu":  # where all pieces share their scratch
                slot.plan = piece
        state = slot.state
        piece.parameter, piece.gradient = slot.parameter, gradient
        piece.exp_avg, piece.exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        piece.kept = state.get("compensation")
        return piece

    def _pieces(self, slot: TensorSlot, gradient: Tensor | None) -> Iterator[Piece]:
        """The parameter, its gradient and its state cut alike, along memory where all of them have the same layout."""
        tensors = {"parameter": slot.parameter}
        if gradient is not None:
            tensors["gradient"] = gradient
        for name in ("exp_avg", "exp_avg_sq", "compensation"):
            if name in slot.state:
                tensors[name] = slot.state[name]
        flat = along_memory(tensors)
        if flat is None:  # rows, as they are stored
            flat = {name: tensor.detach() for name, tensor in tensors.items()}
        lead = flat["parameter"]
        if not lead.numel():
            return
        rows = max(1, piece_elements(lead) * lead.shape[0] // lead.numel())
        scratch: tuple[Tensor, Tensor] | None = None
        for start in range(0, lead.shape[0], rows):
            part = {name: tensor[start : start + rows] for name, tensor in flat.items()}
            if scratch is None or part["parameter"].shape != scratch[0].shape:
                scratch = self._scratch_like(part["parameter"], slot.compute_dtype)
            piece = Piece(slot, *scratch)
            piece.parameter, piece.gradient = part["parameter"], part.get("gradient")
            piece.exp_avg, piece.exp_avg_sq = part["exp_avg"], part["exp_avg_sq"]
            piece.kept = part.get("compensation")
            yield piece

    def _scratch_like(self, part: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors of the shape of this piece, in the compute dtype; on a CPU all pieces share their memory."""
        if part.device.type != "cpu":  # whose allocator keeps freed memory at hand
            return torch.empty_like(part, dtype=dtype), torch.empty_like(part, dtype=dtype)
        numel = part.numel()
        buffers = self._scratch.get(dtype)
        if buffers is None or buffers.shape[1] < numel:
            buffers = self._scratch[dtype] = torch.empty((2, max(numel, piece_elements(part))), dtype=dtype)
        dense = part.is_contiguous() or along_memory({"parameter": part}) is not None
        strides = part.stride() if dense else torch.empty(part.shape, device="meta").stride()
        return buffers[0].as_strided(part.shape, strides), buffers[1].as_strided(part.shape, strides, buffers.shape[1])


def piece_elements(tensor: Tensor) -> int:
    """Elements in a piece on the tensor's device."""
    return PIECE * torch.get_num_threads() if tensor.device.type == "cpu" else PIECE_ELSEWHERE


def keeps_wide_moments(slot: TensorSlot) -> bool:
    """Whether the state keeps the moments in the compute dtype, so that writing them rounds nothing."""
    dtype = slot.compute_dtype
    return slot.state["exp_avg"].dtype is dtype and slot.state["exp_avg_sq"].dtype is dtype
