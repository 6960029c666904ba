"""Batches of small tensors, packed into one tensor so that each operation of the eager backend is called once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as _pack  # what DistributedDataParallel packs its buckets with
from torch._utils import _unflatten_dense_tensors as _views

from .adam_piece import piece_class
from .backend import TensorSlot
from .numbers import UpdateNumbers
from .piece import Piece, clipped_rate

SMALL = 2**14
"""Largest number of elements of a small tensor: up to here, calling an operation costs about as much as running it."""

BATCH_ELEMENTS = 2**16
"""Largest number of elements of a batch, so that its five to ten packed tensors stay in a core's cache."""

Pair = tuple[TensorSlot, Tensor]
Scratch = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Returns two scratch tensors of the shape of the given one, in this dtype."""


class Batch:
    """Small tensors that are updated as one `Piece`; every list is in the order of the slots.

    Args:
        pairs: slots and gradients, at least two; all of one group, with the same dtypes and the same number of updates.
        numbers: the scalars of this update.
        scratch: makes the scratch of the piece.
    """

    def __init__(self, pairs: Sequence[Pair], numbers: UpdateNumbers, scratch: Scratch) -> None:
        self.slots = [slot for slot, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]
        self._numbers = numbers
        self._scratch = scratch

    def update(self, squares: Sequence[Tensor] | None = None) -> None:
        """Update all tensors: `core.update.update` with first=True.

        squares: the mean squares of the whole tensors, each 0-d; None to compute them from these tensors.
        """
        piece, numbers, rule = self._packed(), self._numbers, self.slots[0].rule
        piece.accumulate(numbers, True)
        eta = numbers.step_size
        if rule.clips_update:
            means = self._means(piece.ratios()) if squares is None else torch.stack(list(squares))
            sizes = torch.tensor([slot.parameter.numel() for slot in self.slots], device=means.device)
            eta = clipped_rate(eta, means).repeat_interleave(sizes, output_size=len(piece.a))
        piece.descend(numbers, eta)
        views: dict[torch.dtype, tuple[Tensor, list[Tensor]]] = {}
        keys = (*self.slots[0].keys, "compensation")
        for key, packed in zip(keys, (*piece.fields, piece.compensation), strict=True):
            if packed is not None:
                _unpack(packed, [slot.state[key] for slot in self.slots], views)
        _unpack(piece.parameter, [slot.parameter for slot in self.slots], views)

    def mean_squares(self) -> Sequence[Tensor]:
        """Return the mean square that `update` will compute for each tensor, each 0-d; nothing is written."""
        return self._means(self._packed().ratios_before(self._numbers, True, None)).unbind()

    def _packed(self) -> Piece:
        slots = self.slots
        gradient = _pack(self._gradients)
        piece = piece_class(slots[0].rule)(slots[0], *self._scratch(gradient, slots[0].compute_dtype))
        piece.gradient, piece.parameter = gradient, _pack([slot.parameter for slot in slots])
        piece.fields = [_pack([slot.state[key] for slot in slots]) for key in slots[0].keys]
        compensated = slots[0].state.get("compensation") is not None
        piece.compensation = _pack([slot.state["compensation"] for slot in slots]) if compensated else None
        return piece

    def _means(self, ratios: Tensor) -> Tensor:
        """Return the mean over each tensor, [tensors]."""
        parts = ratios.split([slot.parameter.numel() for slot in self.slots])
        sizes = torch.tensor([part.numel() for part in parts], dtype=ratios.dtype, device=ratios.device)
        return torch.stack([part.sum() for part in parts]).div_(sizes)


def _unpack(packed: Tensor, tensors: list[Tensor], views: dict[torch.dtype, tuple[Tensor, list[Tensor]]]) -> None:
    """Copy a packed tensor into the tensors that it was packed from.

    views: by dtype, a tensor that was unpacked before and its views, which are reused: making views costs more than a copy.
    """
    known = views.get(packed.dtype)
    if known is None:
        known = views[packed.dtype] = packed, list(_views(packed, tensors))
    else:
        known[0].copy_(packed)
    torch._foreach_copy_(tensors, known[1])  # pyright: ignore[reportPrivateImportUsage]  (documented: Foreach Operations)


def batch_small_tensors(pairs: Sequence[Pair], scratch: Scratch, small: int) -> tuple[list[Batch], list[Pair]]:
    """Return batches of tensors of at most `small` elements, and the other pairs, which are to be updated one by one."""
    others: list[Pair] = []
    groups: dict[Any, list[Pair]] = {}
    sharing = _overlapping([slot.parameter for slot, _ in pairs])
    for position, pair in enumerate(pairs):
        slot, gradient = pair
        parameter, state = slot.parameter, slot.state
        apart = slot.capturable or slot.random or slot.coded or slot.rule.of_matrix is not None
        if apart or not 0 < parameter.numel() <= small or position in sharing:
            others.append(pair)
            continue
        contiguous, dtypes = parameter.is_contiguous() and gradient.is_contiguous(), [parameter.dtype, gradient.dtype]
        for kept in slot.fields_of(state):
            contiguous = contiguous and kept.is_contiguous()
            dtypes.append(kept.dtype)
        if (compensation := state.get("compensation")) is not None:
            contiguous = contiguous and compensation.is_contiguous()
        if not contiguous:  # sums are taken in memory order
            others.append(pair)
            continue
        groups.setdefault((id(slot.settings), slot.step_number, parameter.device, slot.compensation, *dtypes), []).append(pair)
    batches = []
    for group in itertools.chain.from_iterable(map(_split, groups.values())):
        if len(group) == 1:
            others += group
            continue
        lead = group[0][0]
        numbers = lead.settings.numbers(lead.step_number, lead.compute_dtype)
        batches.append(Batch(group, numbers, scratch))
    return batches, others


def _overlapping(parameters: Sequence[Tensor]) -> set[int]:
    """Return the positions of parameters whose memory may overlap another's, as after `b.data = a.data`.

    They must be updated one after the other: packed, each would be a copy, and one update would be lost.
    """
    found: set[int] = set()
    furthest, end = 0, 0  # the parameter with the highest end address so far, and that address
    for start, position in sorted((parameter.data_ptr(), position) for position, parameter in enumerate(parameters)):
        if start < end:
            found.update((position, furthest))
        reach = start + extent(parameters[position])
        if reach > end:
            furthest, end = position, reach
    return found


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from the tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


def _split(group: list[Pair]) -> Iterator[list[Pair]]:
    """Yield the group in parts of at most `BATCH_ELEMENTS` elements."""
    start = elements = 0
    for end, (slot, _) in enumerate(group):
        elements += slot.parameter.numel()
        if elements > BATCH_ELEMENTS:
            yield group[start:end]
            start, elements = end, slot.parameter.numel()
    yield group[start:]
