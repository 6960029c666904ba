"""`core.array_ops.ArrayOps` for torch tensors, eager and compiled alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NAMES = ("float64", "float32", "bfloat16", "float16", "uint8", "int8", "int16", "int32", "int64")
DTYPES = {name: getattr(torch, name) for name in _NAMES}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that core knows a dtype by."""
    return str(dtype).removeprefix("torch.")


class TorchOps:
    """The casts of the specification in torch."""

    xp: Any = torch

    def dtype_name(self, x: Tensor) -> str:
        return dtype_name(x.dtype)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """x itself where it has this dtype already."""
        return x.to(DTYPES[dtype])

    def round_to(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(DTYPES[dtype]).to(x.dtype)

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        return x.view(DTYPES[dtype])

    def zeros_like(self, x: Tensor, dtype: str) -> Tensor:
        """A dense permuted layout is kept, so that state and parameter can be walked side by side."""
        return torch.zeros_like(x, dtype=DTYPES[dtype], memory_format=torch.preserve_format)

    def zeros(self, shape: Sequence[int], dtype: str, beside: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype], device=beside.device)

    def largest(self, x: Tensor) -> Tensor:
        return x.amax(-1, keepdim=True)

    def padded(self, x: Tensor, count: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, count))

    def addmm(self, base: Tensor | None, left: Tensor, right: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
        """`torch.set_float32_matmul_precision` applies to it."""
        return alpha * (left @ right) if base is None else torch.addmm(base, left, right, beta=beta, alpha=alpha)


class CompiledOps(TorchOps):
    """For a compiler that deletes a cast to a low precision and back, and bit views of the result as well."""

    def round_to(self, x: Tensor, dtype: str) -> Tensor:
        """To nearest, ties to even, on the bits of float32: half a spacing is added, the rest cut off."""
        dropped = {"bfloat16": 16, "float16": 13}[dtype]
        bits = x.view(torch.int32)
        rounded = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) & -(1 << dropped)
        near = rounded.view(torch.float32)
        if dtype == "float16":
            near = torch.where(near.abs() > 65504.0, near * math.inf, near)
            # Below 2^-14 float16 has the spacing 2^-24, as float32 has at 0.75.
            near = torch.where(x.abs() < 2.0**-14, torch.copysign((x.abs() + 0.75) - 0.75, x), near)
        return torch.where(torch.isnan(x), x, near)


class Int32RemainderOps(TorchOps):
    """Leaves a remainder of 16 bits in the lower half of an int32, which the caller stores as int16."""

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x if dtype == "int16" else super().cast(x, dtype)


torch_ops = TorchOps()
int32_remainder_ops = Int32RemainderOps()
compiled_ops = CompiledOps()
