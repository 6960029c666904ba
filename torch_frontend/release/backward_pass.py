"""Which backward pass a hook runs in, and what is to be done when that pass ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.autograd import Variable

_graph_task = getattr(torch._C, "_current_graph_task_id", None)  # not public: without it, no pass is told from another
_engine = getattr(Variable, "_execution_engine", None)  # as torch's own DistributedDataParallel has it: there is no public one


def pass_number() -> int | None:
    """A number for the backward pass that is running; None where it cannot be told."""
    return None if _graph_task is None else _graph_task()


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


def current_pass() -> int | None:
    """A number for the pass that the user started; None in a nested one, which belongs to it, or where it cannot be told."""
    return None if _graph_task is None or is_nested() else _graph_task()


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
