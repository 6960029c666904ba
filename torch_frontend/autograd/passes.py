"""Which backward pass a hook runs in, and what is to be done when that pass ends."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

pass_number: Callable[[], int | None] = getattr(torch._C, "_current_graph_task_id", lambda: None)
"""A number for the backward pass that is running. It is not public: None where torch does not have it, and no pass is told from
another then."""

_engine = getattr(Variable, "_execution_engine", None)  # as torch's own DistributedDataParallel has it: there is no public one


def is_nested() -> bool:
    """Whether this pass is run by another pass, from the backward of a `torch.autograd.Function` such as reentrant
    checkpointing: that function's frame is then on the stack, outside the call that runs this pass."""
    frame = sys._getframe()
    inside = False
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if name in ("backward", "grad") and module == "torch.autograd":
            inside = True
        elif inside and name == "apply" and module == "torch.autograd.function":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_compiled() -> bool:
    """Whether compiled autograd, not the engine, runs this pass."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)


def at_end_of_pass(callback: Callable[[], None]) -> bool:
    """Call `callback` when the pass that is running, nested or not, has ended without an error; False if that cannot be had.

    It comes after what others wanted called by then, such as DistributedDataParallel, which fills `.grad` there: a callback
    that is queued by a callback is the last.
    """
    engine = _engine
    if engine is None or is_compiled():  # which runs hooks by itself, and forgets what is queued
        return False
    # Where a compiled function calls backward(), the compiler would trace what the engine calls in it.
    untraced = torch.compiler.disable
    engine.queue_callback(untraced(lambda: engine.queue_callback(untraced(callback))))
    return True


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive, and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call
