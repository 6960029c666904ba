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

from ...core import compensation as compensations
from ...core.compensation import Stored
from ...core.moments import SMALLEST_NORMAL_FLOAT32, is_zero
from ..array_ops import dtype_name, torch_ops
from .backend import OverShards, TensorSlot
from .foreach import update_small
from .memory_order import along_memory
from .numbers import UpdateNumbers

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
        """Update many tensors; small ones together, through torch's foreach functions: the same operations, fewer calls."""
        if over_shards is None:
            for slot, gradient in update_small(pairs):
                self.update(slot, gradient, first=True)
            return
        totals = over_shards([self.mean_square(slot, gradient, True) for slot, gradient in pairs])
        for (slot, gradient), total in zip(pairs, totals, strict=True):
            self.write(slot, gradient, True, total)

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

    def _whole(self, slot: TensorSlot, gradient: Tensor | None) -> _Piece | None:
        """The tensor as one piece, which the slot keeps on a CPU; None if it has no element or takes several."""
        piece = slot.plan
        if piece is None:
            parameter = slot.parameter
            if not 0 < parameter.numel() <= piece_elements(parameter):
                return None
            piece = _Piece(slot, *self._scratch_like(parameter, slot.compute_dtype))
            if parameter.device.type == "cpu":  # where all pieces share their scratch
                slot.plan = piece
        state = slot.state
        piece.parameter, piece.gradient = slot.parameter, gradient
        piece.exp_avg, piece.exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        piece.kept = state.get("compensation")
        return piece

    def _pieces(self, slot: TensorSlot, gradient: Tensor | None) -> Iterator[_Piece]:
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
            piece = _Piece(slot, *scratch)
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


class _Piece:
    """The same part of a parameter, its gradient and its state, with scratch of that size.

    parameter, gradient, exp_avg, exp_avg_sq, kept: as they are stored; gradient and kept (the compensation) may be None.
    wide_gradient, wide_exp_avg, wide_exp_avg_sq: in the compute dtype; themselves where they have it.
    """

    __slots__ = (
        "a", "b", "dtype", "exp_avg", "exp_avg_sq", "gradient", "kept", "parameter", "slot",
        "wide_exp_avg", "wide_exp_avg_sq", "wide_gradient",
    )  # fmt: skip
    parameter: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    kept: Tensor | None
    wide_gradient: Any
    wide_exp_avg: Any
    wide_exp_avg_sq: Any

    def __init__(self, slot: TensorSlot, a: Tensor, b: Tensor) -> None:
        self.slot = slot
        self.a, self.b, self.dtype = a, b, a.dtype

    def __enter__(self) -> None:
        """Between updates it keeps no gradient and no moment in another dtype alive."""

    def __exit__(self, *_: object) -> None:
        self.gradient = self.wide_gradient = self.wide_exp_avg = self.wide_exp_avg_sq = None

    def load_parameter(self) -> Tensor:
        """The parameter with its compensation in the compute dtype; itself where it has that."""
        if self.parameter.dtype is self.dtype:
            return self.parameter
        return compensations.load(torch_ops, self.slot.compensation, Stored(self.parameter, self.kept))

    def load_moments(self) -> None:
        """The moments in the compute dtype; themselves where they have it."""
        dtype = self.dtype
        self.wide_exp_avg = self.exp_avg if self.exp_avg.dtype is dtype else self.exp_avg.to(dtype)
        self.wide_exp_avg_sq = self.exp_avg_sq if self.exp_avg_sq.dtype is dtype else self.exp_avg_sq.to(dtype)

    def prepare(self, first: bool, squares: list[Tensor] | None) -> None:
        """`core.update.prepared_gradient`; never the caller's gradient changed. squares: as in `accumulate`."""
        gradient, rule, current = self.gradient, self.slot.rule, self.slot.settings.hyperparameters
        assert gradient is not None
        if gradient.dtype is not self.dtype:
            gradient = gradient.to(self.dtype)
        if rule.l2 or current.maximize:  # their squares are another gradient's
            if squares is not None:
                squares.append(torch.mul(gradient, gradient, out=self.a).sum())
            if current.maximize:
                gradient = -gradient
            if rule.l2 and first and not is_zero(current.weight_decay):
                gradient = gradient + current.weight_decay * self.load_parameter()
        self.wide_gradient = gradient

    def accumulate(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None = None) -> None:
        """`core.moments.first_moments` or `later_moments`: the moments in the compute dtype, and in the state.

        squares: gets the sum of the gradient's squares.
        """
        self.load_moments()
        if numbers.plain and self.gradient is not None and self.gradient.dtype is self.dtype:
            self.wide_gradient = self.gradient
        else:
            self.prepare(first, squares)
            squares = squares if self.squares_are_the_gradients() else None
        gradient, change, exp_avg, exp_avg_sq = self.wide_gradient, self.a, self.wide_exp_avg, self.wide_exp_avg_sq
        if first:
            if not numbers.plain:
                self.reset()
            torch.sub(gradient, exp_avg, out=change)
            exp_avg.add_(change.mul_(numbers.first))
            torch.mul(gradient, gradient, out=change)
            if squares is not None:
                squares.append(change.sum())
            exp_avg_sq.add_(change.sub_(exp_avg_sq).mul_(numbers.second))
        else:
            torch.mul(gradient, numbers.first, out=change)
            exp_avg.add_(change)
            torch.mul(gradient, gradient, out=change)
            if squares is not None:
                squares.append(change.sum())
            exp_avg_sq.add_(change.mul_(numbers.second))
        if exp_avg is not self.exp_avg:
            self.exp_avg.copy_(exp_avg)
        if exp_avg_sq is not self.exp_avg_sq:
            self.exp_avg_sq.copy_(exp_avg_sq)

    def reset(self) -> None:
        """`core.moments.remembered`: what an update takes of moments whose beta is 0."""
        current = self.slot.settings.hyperparameters
        if is_zero(current.beta1):
            self.wide_exp_avg.zero_()
        if is_zero(current.beta2):
            self.wide_exp_avg_sq.zero_()

    def squares_are_the_gradients(self) -> bool:
        """Whether the square of what enters the moments is that of the gradient; `prepare` has measured it otherwise."""
        return not (self.slot.rule.l2 or self.slot.settings.hyperparameters.maximize)

    def ratios(self) -> Tensor:
        """What `core.moments.mean_square` is the mean of, in scratch, once the moments are accumulated."""
        return self._ratios(self.wide_exp_avg_sq)

    def ratios_before(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None) -> Tensor:
        """The same from a second moment that is not written."""
        self.load_moments()
        self.prepare(first, squares)
        gradient, square, moment = self.wide_gradient, self.a, self.b
        exp_avg_sq = self.wide_exp_avg_sq
        torch.mul(gradient, gradient, out=square)
        if squares is not None and self.squares_are_the_gradients():
            squares.append(square.sum())
        if first and is_zero(self.slot.settings.hyperparameters.beta2):
            moment.copy_(square.mul_(numbers.second))
        elif first:
            torch.add(exp_avg_sq, square.sub_(exp_avg_sq).mul_(numbers.second), out=moment)
        else:
            torch.add(exp_avg_sq, square.mul_(numbers.second), out=moment)
        return self._ratios(moment)

    def _ratios(self, exp_avg_sq: Tensor) -> Tensor:
        """g*g / max(v, eps^2), in scratch."""
        eps = self.slot.settings.hyperparameters.eps
        floored = torch.clamp(exp_avg_sq, min=max(eps * eps, SMALLEST_NORMAL_FLOAT32), out=self.a)
        return torch.div(self.wide_gradient, floored, out=floored).mul_(self.wide_gradient)

    def descend(self, numbers: UpdateNumbers, eta: Tensor) -> None:
        """p - eta*`core.moments.direction`, stored with its compensation."""
        step, other, parameter = self.a, self.b, self.load_parameter()
        torch.sqrt(self.wide_exp_avg_sq, out=other)
        torch.div(self.wide_exp_avg, other.add_(numbers.eps), out=step)
        if numbers.decay is not None:
            step.add_(torch.mul(parameter, numbers.decay, out=other))
        parameter.sub_(step.mul_(eta))
        if parameter is self.parameter:
            return
        stored = compensations.store(torch_ops, self.slot.compensation, parameter, dtype_name(self.parameter.dtype))
        self.parameter.copy_(stored.parameter)
        if stored.compensation is not None:
            assert self.kept is not None
            self.kept.copy_(stored.compensation)


def keeps_wide_moments(slot: TensorSlot) -> bool:
    """Whether the state keeps the moments in the compute dtype, so that writing them rounds nothing."""
    dtype = slot.compute_dtype
    return slot.state["exp_avg"].dtype is dtype and slot.state["exp_avg_sq"].dtype is dtype


def clipped_rate(learning_rate: Tensor, mean_square: Tensor | float) -> Tensor:
    """`core.moments.clipped_learning_rate`, 0-d."""
    assert isinstance(mean_square, Tensor)
    return torch.div(learning_rate, mean_square.sqrt().clamp_(min=1.0))


def sum_of(sums: Sequence[Tensor]) -> Tensor:
    """The sum of 0-d tensors, 0-d."""
    if not sums:
        return torch.zeros(())
    return sums[0] if len(sums) == 1 else torch.stack(list(sums)).sum()


def piece_elements(tensor: Tensor) -> int:
    """Elements in a piece on the tensor's device."""
    return PIECE * torch.get_num_threads() if tensor.device.type == "cpu" else PIECE_ELSEWHERE
