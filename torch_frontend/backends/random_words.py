"""The words of `core.random_bits` of consecutive elements, as int32 tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core import random_bits

_SIGN = 1 << 31


class Randomness:
    """The words of one tensor at one time.

    Args:
        place: `core.random_bits.place`, a number, or a 0-d tensor on the tensor's device.
        first, count: index of the first element here in the whole tensor, and number of elements.
        device: of the words.
    """

    def __init__(self, place: random_bits.Word, first: int, count: int, device: torch.device) -> None:
        self._lowest, end = first >> random_bits.LOW_BITS, ((first + count - 1) >> random_bits.LOW_BITS) + 1
        self._table = _mixed(device)
        if isinstance(place, Tensor):
            stream = random_bits.stream(place, torch.arange(self._lowest, end, device=device))
            self._factors = stream.factor.to(torch.int32).unbind()
            self._shifts = (stream.shift - _SIGN).to(torch.int32).unbind()
        else:
            stream = random_bits.stream(place, np.arange(self._lowest, end))
            self._factors = stream.factor.tolist()
            self._shifts = torch.from_numpy((stream.shift - _SIGN).astype(np.int32)).to(device).unbind()

    def fill(self, out: Tensor, first: int) -> Tensor:
        """Write the words of consecutive elements, each less 2^31, and return `out`.

        So the highest n bits of a word are 2^(n-1) + (out >> (32-n)), where torch shifts a signed number.

        Args:
            out: int32, 1-d.
            first: index of the first element in the whole tensor.
        """
        done, count = 0, len(out)
        while done < count:
            high, low = divmod(first + done, random_bits.LOW + 1)
            length = min(count - done, random_bits.LOW + 1 - low)
            table = self._table if length == len(self._table) else self._table[low : low + length]
            part = out if length == count else out[done : done + length]
            factor, shift = self._factors[high - self._lowest], self._shifts[high - self._lowest]
            if isinstance(factor, Tensor):
                torch.mul(table, factor, out=part).add_(shift)
            else:
                torch.add(shift, table, alpha=factor, out=part)
            done += length
        return out

    def words(self, like: Tensor, first: int) -> Tensor:
        """Return the words for `core` of consecutive elements, int32, of this shape."""
        found = torch.empty(like.numel(), dtype=torch.int32, device=like.device)
        return self.fill(found, first).bitwise_xor_(-_SIGN).view(like.shape)


_TABLES: dict[torch.device, Tensor] = {}


def _mixed(device: torch.device) -> Tensor:
    """Return `core.random_bits.mix_low` of all low words, int32, [2^16]."""
    pretended = type(torch.empty(0, device=device)) is not Tensor  # under a mode, such as the planner's, tensors have no memory
    if pretended or device not in _TABLES:
        mixed = random_bits.mix_low(torch.arange(random_bits.LOW + 1, device=device)).to(torch.int32)
        if pretended:
            return mixed
        _TABLES[device] = mixed
    return _TABLES[device]
