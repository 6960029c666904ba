"""Fields in 8 bits in the kernels: `core.codings.eight_bit`, operation by operation, and where a tile's elements are.

A tile consists of whole blocks of 128 elements of rows, each of which has a scale: it is a matrix, [blocks, 128], and the
thread that stores a block's scale has seen all of it. Where a row is not a multiple of a block, positions in a tensor count its
last block as a whole one: they are those of the scales, times 128, and `element_at` is where they are in memory.

`ROWS` says what the length of a row is a multiple of: 128, 16 (for wide accesses) or 1; 0: nothing is in 8 bits.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .rounding import highest

SCALED = tl.constexpr(128)
"""Elements of a block: `core.codings.eight_bit.BLOCK`."""


@triton.jit
def row_length(columns, ROWS: tl.constexpr):
    """Return the length of a row as int32, so that the compiler sees what it is a multiple of."""
    if ROWS == 0:
        return columns
    else:
        return columns.to(tl.int32) // ROWS * ROWS


@triton.jit
def elements(n, columns, ROWS: tl.constexpr):
    """Return the number of elements of a tensor of n positions."""
    if ROWS == 0 or ROWS == SCALED:
        return n
    else:
        return n // (tl.cdiv(columns, SCALED) * SCALED) * columns


@triton.jit
def element_at(position, columns, ROWS: tl.constexpr):
    """Return the element that a block begins with, by its position; both are int64."""
    if ROWS == 0 or ROWS == SCALED:
        return position
    else:
        blocks = tl.cdiv(columns, SCALED)
        block = position // SCALED
        row = block // blocks
        element = row * columns + (block - row * blocks) * SCALED
        return tl.multiple_of(element, ROWS)


@triton.jit
def offsets(position, left, columns, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the offsets of a tile's elements from its first one, int32, and whether each is one of the tensor's.

    Args:
        position: of the tile.
        left: positions from there to the end of the tensor.
        columns: int32, the length of a row, if it is not a multiple of a block.
    """
    if ROWS == 0:
        offset = tl.arange(0, SIZE)
        return offset, offset < left
    else:
        block, lane = tl.arange(0, SIZE // SCALED), tl.arange(0, SCALED)
        if ROWS == SCALED:
            offset = (block * SCALED)[:, None] + lane[None, :]
            return offset, offset < left
        else:
            blocks = tl.cdiv(columns, SCALED)
            first = ((position // SCALED) % blocks).to(tl.int32)
            row = (first + block) // blocks
            column = (first + block - row * blocks) * SCALED
            start = row * columns + (column - first * SCALED)
            mask = (column[:, None] + lane[None, :] < columns) & ((block * SCALED)[:, None] < left)
            return start[:, None] + lane[None, :], mask


@triton.jit
def starts(offset, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return offsets between which no index passes a multiple of 128: a block begins at one if all rows of the tensor do."""
    if ROWS == SCALED:
        return (tl.arange(0, SIZE // SCALED) * SCALED)[:, None]
    else:
        return offset


@triton.jit
def decoded(codes, scale):
    """Return the numbers, float32, of int8 or uint8 codes [blocks, 128] with scales [blocks]."""
    number, scale = codes.to(tl.float32), scale[:, None]
    if tl.int8 == codes.dtype:
        return number * tl.abs(number) * (scale * (1 / 127**2))
    else:
        return _fourth_power(number) * (scale * (1 / 255**4))


@triton.jit
def encoded(x, words, CODES: tl.constexpr):
    """Return float32 numbers [blocks, 128] as codes of the dtype `CODES`, and the scales [blocks].

    The largest magnitude is found among bits, whose order is that of the magnitudes, with infinity and NaN above them.
    """
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    usable = largest < 0x7F800000
    scale = tl.maximum(tl.where(usable, largest, 0), 0x10800000).to(tl.float32, bitcast=True)  # 2^-94
    x = tl.where(usable[:, None], x, 0.0)
    if CODES == tl.int8:
        size = tl.sqrt(tl.abs(x) * (127.0**2 / scale)[:, None])
        size = (size + 12582912.0) - 12582912.0  # 1.5 * 2^23, where the spacing is 1: to nearest, ties to even
        code = tl.where(x < 0, -size, size)
    else:  # a GPU's quotients, products and roots may exceed 255
        code = tl.minimum(_rounded_squares(x * (255.0**4 / scale)[:, None], words), 255.0)
        code = tl.maximum(code, (x > 0).to(tl.float32))
    stored = tl.where(usable, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    return code.to(tl.int32).to(CODES), stored.to(tl.float32, bitcast=True)


@triton.jit
def _rounded_squares(z, words):
    low = tl.floor(tl.sqrt(tl.sqrt(z)))
    odd = 2.0 * low + 1.0
    half = highest(words, 24).to(tl.float32) * 2.0**-25 * odd
    return low + (half + half * (odd * odd) < z - _fourth_power(low)).to(tl.float32)


@triton.jit
def _fourth_power(x):
    square = x * x
    return square * square
