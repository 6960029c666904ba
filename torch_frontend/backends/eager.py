"""The eager backend: in place, piece by piece, with a few pieces of scratch.

The operations are those of `core.moments` in the same order, so that the result is the same bit for bit; only the
temporaries are reused. A piece is small enough to stay in a processor's cache, and bounds the scratch memory: a tensor's
update never allocates a second gradient. `core.moments` says what is computed; here it only says where it is put.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...core import compensation as compensations
from ...core.compensation import Stored
from ...core.dtypes import compute_dtype
from ...core.moments import SMALLEST_NORMAL_FLOAT32, clipped_learning_rate, is_zero
from ..array_ops import DTYPES, dtype_name, torch_ops
from .backend import OverShards, TensorSlot
from .memory_order import along_memory

PIECE = {"cpu": 2**17}
"""Elements in a piece, by device: on a CPU 512 KiB of float32, so that the handful in use stays in its caches."""

PIECE_ELSEWHERE = 2**24
"""An accelerator wants few launches: 64 MiB of float32."""


class EagerBackend:
    """See `Backend`."""

    name = "eager"
    one_launch = False

    def update_all(
        self,
        pairs: Sequence[tuple[TensorSlot, Tensor]],
        *,
        grad_scale: Tensor | None = None,
        over_shards: OverShards | None = None,
    ) -> None:
        """See `Backend`."""
        if over_shards is None:
            for slot, gradient in pairs:
                self.update(slot, gradient, first=True, grad_scale=grad_scale)
            return
        totals = over_shards([self.mean_square(slot, gradient, True, grad_scale) for slot, gradient in pairs])
        for (slot, gradient), total in zip(pairs, totals, strict=True):
            self.write(slot, gradient, True, grad_scale, total)

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """See `Backend`. Where the rule clips, the mean square is taken first, from moments not written yet."""
        total = self.mean_square(slot, gradient, first, grad_scale) if slot.rule.clips_update else None
        self.write(slot, gradient, first, grad_scale, total)
        slot.state.pop("mean_square", None)

    def write(
        self, slot: TensorSlot, gradient: Tensor, first: bool, grad_scale: Tensor | None, mean_square: Tensor | None
    ) -> None:
        """The update, given the summed mean square where the rule clips."""
        eta = self._learning_rate(slot, mean_square)
        for piece in _pieces(slot, gradient, grad_scale):
            exp_avg, exp_avg_sq, wide, _ = piece.accumulate(first)
            piece.descend(wide, exp_avg, exp_avg_sq, eta)

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """See `Backend`."""
        clips = slot.rule.clips_update
        total = self.mean_square(slot, gradient, first, grad_scale) if clips else 0.0
        for piece in _pieces(slot, gradient, grad_scale):
            piece.accumulate(first)
        slot.state["mean_square"] = total

    def apply(self, slot: TensorSlot) -> None:
        """See `Backend`."""
        eta = self._learning_rate(slot, slot.state["mean_square"])
        for piece in _pieces(slot, None):
            piece.descend(piece.wide_parameter(), piece.wide("exp_avg"), piece.wide("exp_avg_sq"), eta)
        slot.state.pop("mean_square")

    def mean_square(self, slot: TensorSlot, gradient: Tensor, first: bool, grad_scale: Tensor | None) -> Tensor:
        """The summed mean square after this micro-batch, 0-d; nothing is written."""
        sums = [piece.sum_of_squares(first) for piece in _pieces(slot, gradient, grad_scale)]
        if sums:
            here = (sums[0] if len(sums) == 1 else torch.stack(sums).sum()) / gradient.numel()
        else:
            here = torch.zeros((), dtype=DTYPES[compute_dtype(dtype_name(gradient.dtype))], device=gradient.device)
        return here if first else slot.state["mean_square"] + here

    def _learning_rate(self, slot: TensorSlot, total: Tensor | None) -> Tensor | float:
        if not slot.rule.clips_update:
            return slot.hyperparameters.learning_rate
        return clipped_learning_rate(slot.hyperparameters.learning_rate, total, torch)


class _Piece:
    """The same part of a parameter, its gradient and its state, with scratch of that size."""

    def __init__(self, slot: TensorSlot, tensors: dict[str, Tensor], scratch: list[Tensor], grad_scale: Tensor | None) -> None:
        self.slot = slot
        self.grad_scale = grad_scale
        self.tensors = tensors
        self.scratch = scratch
        self.dtype = scratch[0].dtype

    def wide(self, name: str) -> Tensor:
        """A tensor of this piece in the compute dtype; itself where it has it already."""
        return self.tensors[name].to(self.dtype)

    def moment(self, name: str, first: bool) -> Tensor:
        """`core.moments.remembered` of one moment, if this is the first micro-batch."""
        wide, current = self.wide(name), self.slot.hyperparameters
        beta = current.beta1 if name == "exp_avg" else current.beta2
        return torch.zeros_like(wide) if first and is_zero(beta) else wide

    def wide_parameter(self) -> Tensor:
        """The parameter with its compensation; itself where nothing needs to be cast."""
        stored = Stored(self.tensors["parameter"], self.tensors.get("compensation"))
        return compensations.load(torch_ops, self.slot.compensation, stored)

    def gradient(self, first: bool, parameter: Tensor) -> Tensor:
        """`core.update.prepared_gradient`, times grad_scale; never the caller's gradient changed."""
        slot, ready = self.slot, self.wide("gradient")
        if self.grad_scale is not None:
            ready = ready * self.grad_scale.to(ready)
        if slot.hyperparameters.maximize:
            ready = -ready
        if slot.rule.l2 and first and slot.hyperparameters.weight_decay != 0:
            ready = ready + slot.hyperparameters.weight_decay * parameter
        return ready

    def sum_of_squares(self, first: bool) -> Tensor:
        """`core.moments.mean_square` times the number of elements, from a second moment that is not written."""
        square, moment = self.scratch[0], self.scratch[1]
        exp_avg_sq = self.moment("exp_avg_sq", first)
        gradient = self.gradient(first, self.wide_parameter() if self.slot.rule.l2 else self.tensors["parameter"])
        torch.mul(gradient, gradient, out=square)
        torch.sub(square, exp_avg_sq, out=moment) if first else moment.copy_(square)
        moment.mul_(self.slot.complements.second).add_(exp_avg_sq)
        eps = self.slot.hyperparameters.eps
        moment.clamp_(min=max(eps * eps, SMALLEST_NORMAL_FLOAT32))
        return torch.div(gradient, moment, out=square).mul_(gradient).sum()

    def accumulate(self, first: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`core.moments.first_moments` or `later_moments`: the wide moments, written to the state as well."""
        parameter = self.wide_parameter()
        gradient = self.gradient(first, parameter)
        exp_avg, exp_avg_sq = self.moment("exp_avg", first), self.moment("exp_avg_sq", first)
        change = self.scratch[0]
        if first:
            torch.sub(gradient, exp_avg, out=change)
            exp_avg.add_(change.mul_(self.slot.complements.first))
            torch.mul(gradient, gradient, out=change)
            exp_avg_sq.add_(change.sub_(exp_avg_sq).mul_(self.slot.complements.second))
        else:
            torch.mul(gradient, self.slot.complements.first, out=change)
            exp_avg.add_(change)
            torch.mul(gradient, gradient, out=change)
            exp_avg_sq.add_(change.mul_(self.slot.complements.second))
        self._write("exp_avg", exp_avg)
        self._write("exp_avg_sq", exp_avg_sq)
        return exp_avg, exp_avg_sq, parameter, gradient

    def descend(self, parameter: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eta: Tensor | float) -> None:
        """p - eta*`core.moments.direction`, stored with its compensation."""
        hyperparameters = self.slot.hyperparameters
        step, other = self.scratch[0], self.scratch[1]
        torch.sqrt(exp_avg_sq, out=other)
        torch.div(exp_avg, other.add_(hyperparameters.eps), out=step)
        decay = 0.0 if self.slot.rule.l2 else hyperparameters.decay_rate
        if decay != 0:
            torch.mul(parameter, decay, out=other)
            step.add_(other)
        parameter.sub_(step.mul_(eta))
        if parameter is self.tensors["parameter"]:
            return
        stored = compensations.store(torch_ops, self.slot.compensation, parameter, dtype_name(self.slot.parameter.dtype))
        self.tensors["parameter"].copy_(stored.parameter)
        if stored.compensation is not None:
            self.tensors["compensation"].copy_(stored.compensation)

    def _write(self, name: str, value: Tensor) -> None:
        if value is not self.tensors[name]:
            self.tensors[name].copy_(value)


def _pieces(slot: TensorSlot, gradient: Tensor | None, grad_scale: Tensor | None = None) -> Iterator[_Piece]:
    """The parameter, its gradient and its state cut alike, along memory where all of them lie alike."""
    tensors = {"parameter": slot.parameter}
    if gradient is not None:
        tensors["gradient"] = gradient
    for name in ("exp_avg", "exp_avg_sq", "compensation"):
        if name in slot.state:
            tensors[name] = slot.state[name]
    flat = along_memory(tensors)
    if flat is None:  # rows, as they lie
        flat = {name: tensor.detach() for name, tensor in tensors.items()}
    lead = next(iter(flat.values()))
    piece = PIECE.get(lead.device.type, PIECE_ELSEWHERE)
    rows = max(1, piece * max(1, lead.shape[0]) // max(1, lead.numel()))
    dtype = DTYPES[compute_dtype(dtype_name(slot.parameter.dtype))]
    scratch: list[Tensor] = []
    for start in range(0, lead.shape[0] if lead.numel() else 0, rows):
        part = {name: tensor[start : start + rows] for name, tensor in flat.items()}
        shape = part["parameter"].shape
        if not scratch or shape != scratch[0].shape:
            scratch = [torch.empty(shape, dtype=dtype, device=lead.device) for _ in range(2)]
        yield _Piece(slot, part, scratch, grad_scale)
