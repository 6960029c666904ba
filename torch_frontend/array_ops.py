"""`core.array_ops.ArrayOps` for torch tensors, eager and compiled alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16", "int16", "int32", "int64")}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that core knows a dtype by."""
    return str(dtype).removeprefix("torch.")


class TorchOps:
    """The casts of the specification in torch."""

    xp: Any = torch

    def dtype_name(self, x: Tensor) -> str:
        """See `ArrayOps`."""
        return dtype_name(x.dtype)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """See `ArrayOps`. x itself where it has this dtype already."""
        return x.to(DTYPES[dtype])

    def round_to(self, x: Tensor, dtype: str) -> Tensor:
        """See `ArrayOps`. Inductor would delete the casts there and back: the compiled backend asks it not to."""
        return x.to(DTYPES[dtype]).to(x.dtype)

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        """See `ArrayOps`."""
        return x.view(DTYPES[dtype])

    def zeros_like(self, x: Tensor, dtype: str) -> Tensor:
        """See `ArrayOps`. A dense permuted layout is kept, so that state and parameter can be walked side by side."""
        return torch.zeros_like(x, dtype=DTYPES[dtype], memory_format=torch.preserve_format)


torch_ops = TorchOps()
