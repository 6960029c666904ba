"""Donated buffers: saved tensors that the backward of a compiled graph may overwrite, so that it can run only once."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ...core.errors import RefusedError
from .graph import reachable


def compile_without_donation() -> None:
    """Have graphs that are compiled from now on keep their saved tensors, so that backward can run twice.

    torch decides it for all graphs by one setting, which is part of the key of its caches.
    """
    import torch._functorch.config as settings

    settings.donated_buffer = False


def require_no_donation(loss: Tensor) -> None:
    """Raise `RefusedError` if a graph of the loss was compiled before `compile_without_donation`."""
    for node in reachable([loss.grad_fn]):
        if type(node).__name__ == "CompiledFunctionBackward" and _donates(node):
            raise RefusedError(
                "the model was compiled, and has run, before release_gradients: its backward overwrites what the second pass "
                "of guard() needs. Call torch.compiler.reset() after release_gradients, or release before the first forward."
            )


def _donates(node: Any) -> bool:
    """Whether the compiled graph of this node has donated buffers. Where torch does not show its metadata: True."""
    backward = getattr(getattr(node, "_forward_cls", None), "_backward_impl", None)
    if backward is None:
        return True
    metadata = inspect.getclosurevars(backward).nonlocals.get("fw_metadata")
    return bool(getattr(metadata, "bw_donated_idxs", True))
