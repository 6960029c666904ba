"""What the operations of PTX without memory compute in the 32 lanes of a warp, on numpy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

LANES = np.arange(32)


def to_bfloat16(x: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even; return the bits."""
    bits = x.view("u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bfloat16(bits: Any) -> Any:
    """Return the float32 of the bits of a bfloat16."""
    return (bits.astype("u4") << 16).view("f4")


def flushed(x: Any) -> Any:
    """Return x with zeros of the same sign instead of subnormal numbers."""
    return np.where(np.abs(x) < np.finfo("f4").tiny, np.copysign(np.float32(0), x), x)


def to_integer(x: Any, kind: str, rounding: Any) -> Any:
    """Round a float by this function and clamp it to the integers of this kind; NaN becomes 0."""
    limits = np.iinfo(kind)
    whole = rounding(x.astype("f8"))
    inside = np.where(np.isnan(whole), 0.0, whole).clip(-(2.0**62), 2.0**62).astype("i8")
    return inside.clip(max(limits.min, -(2**62)), min(limits.max, 2**62)).astype(kind)


def shifted_left(x: Any, by: Any) -> Any:
    """Return x << by; 0 from the number of bits on."""
    bits = 8 * x.itemsize
    return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), 0).astype(x.dtype)


def shifted_right(x: Any, by: Any) -> Any:
    """Return x >> by, with signs for signed x; as by one less than the number of bits from there on."""
    bits = 8 * x.itemsize
    near = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return near if x.dtype.kind == "i" else np.where(by < bits, near, 0).astype(x.dtype)


def fused(a: Any, b: Any, c: Any) -> Any:
    """Return a*b + c with one more precision in between."""
    wide = "f8" if a.dtype == np.float32 else np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def high_half(a: Any, b: Any) -> Any:
    """Return the upper half of the bits of a product."""
    bits = 8 * a.itemsize
    return np.array([(int(x) * int(y)) >> bits for x, y in zip(a, b, strict=True)]).astype(a.dtype)


def quotient(a: Any, b: Any) -> Any:
    """Return a/b of integers, towards zero."""
    return np.array([abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, b, strict=True)]).astype(
        a.dtype
    )


def remainder(a: Any, b: Any) -> Any:
    """Return a - b*(a/b) of integers."""
    return a - b * quotient(a, b)


def field(x: Any, first: Any, count: Any) -> Any:
    """Return `count` bits from bit `first` on."""
    return (x >> first) & ((np.uint64(1) << count.astype("u8")) - np.uint64(1)).astype(x.dtype)


def chosen_bytes(a: Any, b: Any, choice: Any) -> Any:
    """Return four of the eight bytes of a and b, by four bits each; the fourth bit copies the byte's sign over it."""
    given = np.stack([a, b], 1).view("u1").reshape(len(a), 8)
    result = np.zeros((len(a), 4), "u1")
    for place in range(4):
        nibble = (choice >> (4 * place)) & 0xF
        byte = given[np.arange(len(a)), (nibble & 7).astype("i4")]
        result[:, place] = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    return result.view("u4").ravel()


def looked_up(a: Any, b: Any, c: Any, table: Any) -> Any:
    """Return the bitwise function of three words that a table of eight bits describes."""
    result = np.zeros_like(a)
    for case in range(8):
        bits = [x if case & flag else ~x for x, flag in ((a, 4), (b, 2), (c, 1))]
        result |= np.where((table >> case) & 1, bits[0] & bits[1] & bits[2], 0).astype(a.dtype)
    return result


def halves(a: Any) -> tuple[Any, Any]:
    """Return the lower and the upper half of the bits."""
    kind, bits = f"u{a.itemsize // 2}", 4 * a.itemsize
    return a.astype(kind), (a >> np.array(bits, a.dtype)).astype(kind)


def joined(low: Any, high: Any) -> Any:
    """Return the bits of two halves."""
    kind, bits = f"u{2 * low.itemsize}", 8 * low.itemsize
    return low.astype(kind) | (high.astype(kind) << np.array(bits, kind))


def compared(kind: str, a: Any, b: Any) -> Any:
    """Return a comparison; of floats one that ends with "u" holds for NaN, others do not."""
    if kind in ("num", "nan"):
        return (np.isnan(a) | np.isnan(b)) == (kind == "nan")
    floats = a.dtype.kind == "f"
    unordered = np.isnan(a) | np.isnan(b) if floats else np.zeros(len(a), bool)
    plain = kind[:-1] if len(kind) == 3 else {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(kind, kind)
    result = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
                          "ge": "greater_equal"}[plain])(a, b)  # fmt: skip
    return result | unordered if len(kind) == 3 else result & ~unordered


def exchanged(mode: str, x: Any, by: Any) -> Any:
    """Return for each lane the value of another."""
    lane = {"bfly": LANES ^ by, "idx": by & 31, "up": LANES - by, "down": LANES + by}[mode].astype("i4")
    return np.where((lane >= 0) & (lane < 32), x[lane & 31], x)
