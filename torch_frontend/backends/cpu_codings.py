"""What is coded, on a CPU and in the compute dtype float32: `core.codings` and `core.compensation`, in scratch.

Every function has the bits of core's, but for one code of a square in 4 million: a CPU that multiplies and adds in one
operation rounds once less before it chooses between two codes. Choices by a bool tensor, each of which costs as much as ten
products, are left out: parts with numbers that need them (not finite, or parameters that somebody has set to zero) go to
core's functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import codings
from ...core import compensation as compensations
from ...core.codings import EightBit
from ...core.codings.eight_bit import BLOCK, LEAST_SCALE, SIGNED, SQUARES
from ...core.compensation import Stored
from ...core.stochastic_rounding import LARGEST
from ..array_ops import dtype_name, torch_ops
from .random_words import Randomness

PIECE = 2**19
"""Elements that are coded at once: 2 MiB for each of eight tensors of scratch. To start the sixty operations of a smaller piece
takes longer than to run them."""

_MAGNITUDE, _INFINITY = torch.tensor(0x7FFF, dtype=torch.int16, device="cpu"), 0x7F80  # of a bfloat16, in its bits
_PADDED, _NUMBER, _FIELDS = 0, 5, 6  # numbers of scratch tensors; 1 to 4 are temporaries
GRADIENT = 0
"""Number of the gradient among what is upcast; fields have theirs from 1."""
_MOST_VIEWS = 256
_LARGEST = LARGEST["bfloat16"]
# torch converts a Python number to a tensor at each use, which takes longer than the operation on a small tensor.
_NUMBERS = (0.0, 0.25, 1.0, SIGNED**2, SQUARES**4)
_0, _QUARTER, _1, _127_TO_2, _255_TO_4 = torch.tensor(_NUMBERS, dtype=torch.float32, device="cpu").unbind()
_8, _16, _24 = torch.tensor((8, 16, 24), dtype=torch.int32, device="cpu").unbind()
_HALVES = {cut: torch.tensor(1 << (cut - 1), dtype=torch.int32, device="cpu") for cut in (8, 16)}


class RandomPart(NamedTuple):
    """Consecutive elements of a tensor whose words are known: `first` is the index of their first in the whole tensor."""

    of: Randomness
    first: int

    def fill(self, out: Tensor) -> Tensor:
        """Write signed words as `Randomness.fill` does."""
        return self.of.fill(out, self.first)

    def words(self, like: Tensor) -> Tensor:
        """Return words as `Randomness.words` does."""
        return self.of.words(like, self.first)


class CpuCodings:
    """Reads and writes the coded tensors of one backend, whose scratch they share."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._views: dict[Any, Tensor] = {}

    def _scratch(self, number: int, shape: Sequence[int], strides: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return scratch, contiguous unless strides are given. Views of it are kept: making one costs as much as using it."""
        key = number, *shape, strides, dtype
        if (found := self._views.get(key)) is not None:
            return found
        elements = math.prod(shape)
        memory = self._memory.get(number)
        if len(self._views) > _MOST_VIEWS:
            self._views.clear()
        if memory is None or len(memory) < elements:
            self._views.clear()  # which would keep the old memory
            memory = self._memory[number] = torch.empty(elements, dtype=torch.float32, device="cpu")
        flat = memory.view(dtype)[:elements]
        found = self._views[key] = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
        return found

    def _like(self, number: int, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return scratch of x's shape, in the order of its memory."""
        strides = None if x.is_contiguous() else torch.empty_like(x, device="meta").stride()
        return self._scratch(number, x.shape, strides, dtype)

    def upcast(self, x: Tensor, number: int) -> Tensor:
        """Return the nth field or the gradient in float32. It is scratch, overwritten by the next piece's.

        Temporaries that torch allocates between those that stay break up the heap: a tenth more memory for bfloat16.
        """
        return self._like(_FIELDS + number, x).copy_(x)

    # -- 8 bits -------------------------------------------------------------------------------------------------------------

    def decoded(self, stored: EightBit, number: int) -> Tensor:
        """Return the nth field: `core.codings.eight_bit.decoded`. It is scratch, overwritten by the next piece's."""
        out = self._scratch(_FIELDS + number, stored.codes.shape)
        for part in _parts(stored):
            if part is stored:
                self._decode(stored, out)
            else:
                self._decode(EightBit(stored.codes[part], stored.scale[part]), out[part])
        return out

    def _decode(self, stored: EightBit, out: Tensor) -> None:
        codes, scale = stored
        shape, whole = (*scale.shape, BLOCK), _is_whole(stored)
        if whole:
            x = out.copy_(codes).view(shape)
        else:
            x = self._scratch(_PADDED, shape)
            x.flatten(-2)[..., : _columns(codes)].copy_(codes.reshape(len(codes), -1))
        if codes.dtype is torch.int8:
            x.mul_(torch.abs(x, out=self._scratch(1, shape)))
            factor = scale * (1 / SIGNED**2)
        else:
            x.mul_(x).mul_(x)
            factor = scale * (1 / SQUARES**4)
        x.mul_(factor.unsqueeze(-1))
        if not whole:
            out.view(len(codes), -1).copy_(x.flatten(-2)[..., : _columns(codes)])

    def encode(self, x: Tensor, stored: EightBit, random: RandomPart | None) -> None:
        """Store a field, which stays as it is: `core.codings.eight_bit.encoded`.

        random: for squares.
        """
        for part in _parts(stored):
            if part is stored:
                self._encode(x, stored, random)
                continue
            given = None if random is None else RandomPart(random.of, random.first + part.start * _columns(stored.codes))
            self._encode(x[part], EightBit(stored.codes[part], stored.scale[part]), given)

    def _encode(self, x: Tensor, stored: EightBit, random: RandomPart | None) -> None:
        codes, scale = stored
        shape, whole = (*scale.shape, BLOCK), _is_whole(stored)
        if whole:
            given = x.reshape(shape)
        else:
            given = self._scratch(_PADDED, shape)
            rows = given.flatten(-2)
            rows[:, _columns(codes) :].zero_()
            rows[:, : _columns(codes)].copy_(x.reshape(len(codes), -1))
        size = given if random is not None else torch.abs(given, out=self._scratch(1, shape))
        largest = torch.amax(size, -1, out=scale)
        if not largest.amax().item() < math.inf:
            new = codings.store(torch_ops, x, stored, None if random is None else random.words(x))
            codes.copy_(new.codes)
            scale.copy_(new.scale)
            return
        largest.clamp_(min=LEAST_SCALE)
        if random is None:
            code = size.mul_(torch.div(_127_TO_2, scale).unsqueeze(-1)).sqrt_().round_().copysign_(given)
        else:
            code = self._rounded_squares(given, torch.div(_255_TO_4, scale).unsqueeze(-1), codes, random)
            code = self._scratch(3, shape, dtype=torch.int16).copy_(code)  # torch converts floats to uint8 one by one
        if whole:
            codes.view(shape).copy_(code)
        else:
            codes.copy_(code.flatten(-2)[:, : _columns(codes)].reshape(codes.shape))

    def _rounded_squares(self, given: Tensor, factor: Tensor, codes: Tensor, random: RandomPart) -> Tensor:
        """Return the codes as float32 in blocks.

        given: squares in blocks.
        factor: 255^4 over the scales of these.
        """
        rest, low, odd, half = (self._scratch(number, given.shape) for number in (1, 2, 3, 4))
        count = codes.numel()
        words = random.fill(self._scratch(3 if count < given.numel() else 4, (count,), dtype=torch.int32))
        words.bitwise_right_shift_(_8)
        if count == given.numel():
            half.view(count).copy_(words)  # in the memory of the words
        else:
            half.flatten(-2)[:, : _columns(codes)].copy_(words.view(len(codes), -1))
        torch.add(_QUARTER, half, alpha=2.0**-25, out=half)
        torch.mul(given, factor, out=rest)
        torch.sqrt(rest, out=low).sqrt_().floor_()
        torch.mul(low, low, out=odd)
        rest.addcmul_(odd, odd, value=-1)
        torch.add(_1, low, alpha=2, out=odd)
        half.mul_(odd)
        half.addcmul_(half, odd.mul_(odd))
        low.add_(torch.lt(half, rest, out=half))
        if given.amin().item() > 0:
            return low.clamp_(1.0, SQUARES)
        return torch.maximum(low.clamp_(max=SQUARES), torch.gt(given, _0, out=half), out=low)

    # -- low-precision parameters -------------------------------------------------------------------------------------------

    def load(self, compensation: str, stored: Stored) -> Tensor:
        """Return a number: `core.compensation.load`. It is scratch, which the next one overwrites."""
        parameter, remainder = stored
        if not _is_here(compensation, parameter):
            return compensations.load(torch_ops, compensation, stored)
        number = self._like(_NUMBER, parameter).copy_(parameter)
        if remainder is None:
            return number
        magnitude = self._like(1, parameter, torch.int16)
        least, most = torch.aminmax(torch.bitwise_and(parameter.view(torch.int16), _MAGNITUDE, out=magnitude))
        if least.item() == 0 or most.item() >= _INFINITY:
            return compensations.load(torch_ops, compensation, stored)
        units = self._like(1, parameter, torch.int32).copy_(remainder)
        number.view(torch.int32).add_(units, alpha=1 << 8 if compensation == "split8" else 1)
        return number

    def store(self, compensation: str, x: Tensor, stored: Stored, random: RandomPart | None) -> None:
        """Store a number, whose memory is overwritten: `core.compensation.store`."""
        parameter, remainder = stored
        finite = False
        if _is_here(compensation, parameter):
            least, most = torch.aminmax(x)
            finite = least.item() > -_LARGEST and most.item() < _LARGEST
        if not finite:
            bits = None if random is None else random.words(x)
            new = compensations.store(torch_ops, compensation, x, dtype_name(parameter.dtype), bits)
            parameter.copy_(new.parameter)
            if remainder is not None and new.compensation is not None:
                remainder.copy_(new.compensation)
            return
        pattern = x.view(torch.int32)
        if random is not None:
            cut = 8 if compensation == "split8" else 16
            random.fill(self._scratch(1, (x.numel(),), dtype=torch.int32))
            words = self._scratch(1, x.shape, dtype=torch.int32)
            pattern.add_(words.bitwise_right_shift_(_24 if cut == 8 else _16)).add_(_HALVES[cut])
        if remainder is not None and compensation == "split8":
            remainder.copy_(torch.bitwise_right_shift(pattern, _8, out=self._like(1, x, torch.int32)))  # its second byte
        elif remainder is not None:
            remainder.copy_(pattern)  # its lower half
        if remainder is not None:
            pattern.add_(_HALVES[16])
        parameter.view(torch.int16).copy_(pattern.bitwise_right_shift_(_16))

    def store_bfloat16(self, x: Tensor, stored: Tensor, random: RandomPart) -> None:
        """Store a field, which stays as it is, rounded stochastically: `core.codings.store`."""
        self.store("stochastic", self._like(2, x).copy_(x), Stored(stored, None), random)


def _is_here(compensation: str, parameter: Tensor) -> bool:
    """Whether the functions above know how a parameter is stored; an empty one has no largest number."""
    return compensation in ("split", "split8", "stochastic") and parameter.dtype is torch.bfloat16 and parameter.numel() > 0


def _columns(codes: Tensor) -> int:
    """Return the number of elements of a row."""
    return codes.numel() // len(codes)


def _is_whole(stored: EightBit) -> bool:
    """Whether memory is a sequence of whole blocks."""
    return stored.codes.numel() == stored.scale.numel() * BLOCK and stored.codes.is_contiguous()


def _parts(stored: EightBit) -> Iterator[Any]:
    """Yield the slices of rows that are coded at once; `stored` itself where that is all of it."""
    rows, count = len(stored.scale), stored.codes.numel()
    if stored.codes.dim() == 1 or 0 < count <= PIECE:
        yield stored
        return
    step = max(1, PIECE * rows // max(1, count))
    for start in range(0, rows, step):
        yield slice(start, start + step)
