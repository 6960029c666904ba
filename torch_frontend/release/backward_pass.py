"""Which backward pass a hook runs in, so that a second one is noticed at its first gradient."""

from __future__ import annotations

import sys

import torch

_graph_task = getattr(torch._C, "_current_graph_task_id", None)  # not public: without it, no pass is told from another


def current_pass() -> int | None:
    """A number for the backward pass that is running; None inside a pass that another pass runs, or where it cannot be told.

    Reentrant checkpointing runs passes of its own inside the pass that the user started, from the backward of a
    `torch.autograd.Function`: those belong to it, and are known by that function's frame on the stack.
    """
    if _graph_task is None:
        return None
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function":
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return _graph_task()
