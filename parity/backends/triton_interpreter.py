"""Corrections of Triton's interpreter, for tests and parity, so that it computes what a GPU does.

Triton 3.2 to 3.9 truncates float32 to bfloat16, whatever rounding was asked for (a GPU rounds to nearest, ties to even), and
reads bfloat16 subnormals wrongly. Triton has no public hook for this: private functions are replaced, each of them only where
it exists and is wrong. The library itself never does so: a kernel in a user's process runs on the interpreter as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def correct_interpreter() -> None:
    """Apply all corrections to this process's interpreter; nothing happens in a process that has none."""
    from ...torch_frontend.backends.triton.availability import interpreted  # needs PyTorch, which the suite does not

    if interpreted():
        _round_like_a_device()
        _count_with_scalars()
        _call_helpers_directly()
        _describe_types_once()


def _round_like_a_device() -> None:
    """Correct the conversions between float32 and bfloat16, if they need it."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original: Any = getattr(interpreter, "_convert_float", None)
    if original is None or _is_right(original, tl):
        return

    def convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16(x)
        if source == tl.bfloat16 and target == tl.float32:
            return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore"):  # what float16 cannot hold becomes infinity, on every device
            return original(x, source, target, rounding)

    interpreter._convert_float = convert


def _call_helpers_directly() -> None:
    """Halve the interpreter's time: it replaces the whole language again for every call of a helper inside a kernel.

    A helper whose module sees the replaced language already is called directly.
    """
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    function: Any = getattr(interpreter, "InterpretedFunction", None)
    if not hasattr(function, "rewrite") or getattr(function.__call__, "direct", False):
        return
    original = function.__call__
    is_builtin: Any = tl.core.is_builtin

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        seen = self.fn.__globals__.values()
        if any(is_builtin(language.load) for language in (tl, tl.core) if any(value is language for value in seen)):
            return original(self, *arguments, **keywords)
        return self.rewrite()(*arguments, **keywords)

    call.direct = True  # type: ignore[attr-defined]
    function.__call__ = call


def _describe_types_once() -> None:
    """Take a third off the interpreter's time: it describes type and shape again for the result of every operation.

    What follows from a type is kept with it, and the types of blocks of numbers by their elements and shape.
    """
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    core: Any = tl.core
    in_numpy: Any = getattr(interpreter, "_get_np_dtype", None)
    if in_numpy is None or getattr(core.tensor.__init__, "once", False):
        return
    dtypes: dict[str, np.dtype] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = type(element_ty) is core.dtype and (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key and key in blocks:
            self.__dict__ |= blocks[key]
            return
        make_block(self, element_ty, shape)
        if key:
            self.of_tensors = {}
            blocks[key] = dict(self.__dict__)

    def of_tensor(self: Any, handle: Any, given: Any) -> None:
        kept = given.__dict__.get("of_tensors")
        if kept is None and type(given) is core.dtype:
            kept = given.of_tensors = {}
        if kept:
            self.__dict__ |= kept
            self.handle, self.type = handle, given
            return
        make_tensor(self, handle, given)
        if kept is not None:
            kept |= {name: value for name, value in self.__dict__.items() if name not in ("handle", "type")}

    def dtype_of(given: Any) -> np.dtype:
        if given.name not in dtypes:
            dtypes[given.name] = in_numpy(given)
        return dtypes[given.name]

    interpreter._get_np_dtype = dtype_of
    of_tensor.once = True  # type: ignore[attr-defined]
    core.block_type.__init__, core.tensor.__init__ = of_block, of_tensor


def _count_with_scalars() -> None:
    """Let a scalar of a kernel be the end of a range.

    Before Triton 3.7 the interpreter converts an array of one element for it, which numpy 2.4 rejects and an older one
    deprecates. The conversion is set again for each launch, so the function that sets it is extended.
    """
    import triton.runtime.interpreter as interpreter

    original: Any = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None or getattr(original, "counts", False):
        return

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch.counts = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers rounded to bfloat16, to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def _is_right(convert: Any, tl: Any) -> bool:
    """Whether 1 + 3*2^-9 goes up to 1 + 2^-7, and the smallest bfloat16 is read as 2^-133."""
    up = convert(np.array([1 + 3 * 2.0**-9], np.float32), tl.float32, tl.bfloat16, None)
    least = convert(np.array([1], np.uint16), tl.bfloat16, tl.float32, None)
    return bool(np.asarray(up).view(np.uint16)[0] == 0x3F81 and np.asarray(least).view(np.float32)[0] == 2.0**-133)
