"""The running backward pass: its number, whether it is nested in another pass, and callbacks at its end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

pass_number: Callable[[], int | None] = getattr(torch._C, "_current_graph_task_id", lambda: None)
"""Number of the running backward pass, -1 outside of one. It is not public: None if torch lacks it, and passes cannot be
distinguished then."""

_autograd = getattr(torch._C, "_autograd", None)

keeps_graph: Callable[[], bool] = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: False)
"""Whether the running pass was called with retain_graph=True. It is not public: False if torch lacks it."""

_engine = getattr(Variable, "_execution_engine", None)  # not public; DistributedDataParallel uses it in the same way


def is_nested() -> bool:
    """Whether the running pass was started inside another one, by the backward of a `torch.autograd.Function`.

    Reentrant checkpointing does so. torch does not say it: the function's frame is then on the stack, outside the call of
    backward() that runs this pass.
    """
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
    """Whether compiled autograd runs this pass, and not the engine."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)


def at_end_of_pass(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running pass, nested or not, has ended without an error; return False if this is not possible.

    The callback is queued by a queued callback, so that it runs after those of others: DistributedDataParallel fills `.grad`
    in one.
    """
    engine = _engine
    if engine is None or is_compiled():  # compiled autograd drops queued callbacks
        return False
    # If a compiled function calls backward(), torch.compile would trace the callbacks.
    untraced = torch.compiler.disable
    engine.queue_callback(untraced(lambda: engine.queue_callback(untraced(callback))))
    return True


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive; it does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call
