"""Checks of what torch.compile can do on this machine."""

from __future__ import annotations

import functools
import importlib
import math
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..array_ops import dtype_name, torch_ops

KEEP_CASTS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
"""Without this option Inductor removes casts to a low precision and back, which makes every kahan compensation zero."""


@functools.cache
def why_not(device_type: str) -> str | None:
    """Return why torch.compile does not work for this type of device, or None if it works; checked once per process.

    On a CPU only the C++ compiler can be missing, so torch's own search for it is the check; elsewhere, or if torch does not
    have that function, a small graph is compiled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it imports its compiler
        try:
            importlib.import_module("torch.utils.mkldnn")
            find_compiler = _cpp_compiler_of_torch() if device_type == "cpu" else None
            if find_compiler is not None:
                find_compiler()
            else:
                torch.compile(lambda x: torch.sqrt(x) + math.e, fullgraph=True)(
                    torch.ones(8, dtype=torch.float32, device=device_type)
                )
        except Exception as error:  # a compiler, a driver or a full disk may raise any type
            return " ".join(str(error).split()[:40]) or type(error).__name__
    return None


@functools.cache
def keeps_casts(dtype: torch.dtype, device_type: str) -> bool:
    """Whether a graph compiled with `KEEP_CASTS` rounds in a cast to this dtype and back; tested once per process."""
    probe = torch.compile(lambda x: x - torch_ops.round_to(x, dtype_name(dtype)), fullgraph=True, options=KEEP_CASTS)
    return bool(probe(torch.full((8,), 1 + 2.0**-12, dtype=torch.float32, device=device_type)).all())


@functools.cache
def skip_vector_isa_search() -> bool:
    """Skip torch's search for this processor's vector instructions, once per process; return whether it was skipped.

    torch compiles and runs a program for each instruction set, which takes ten seconds with an empty cache. This function
    instead checks once that the C++ compiler accepts the flags of all of them, and tells torch so. It does nothing if the
    compiler does not accept them, or if torch lacks the names used here, which are not public.
    """
    find_compiler = _cpp_compiler_of_torch()
    try:
        isa: Any = importlib.import_module("torch._inductor.cpu_vec_isa")
        config: Any = importlib.import_module("torch._inductor.config")
        here, kinds = set(isa.x86_isa_checker()), isa.supported_vec_isa_list
        flags = [flag for kind in kinds if set(str(kind).split()) <= here for flag in kind.build_arch_flags().split()]
        if find_compiler is None or not flags or config.cpp.vec_isa_ok is not None:
            return False
        command = [find_compiler(), "-fsyntax-only", "-x", "c++", "-", *dict.fromkeys(flags)]
        asked = subprocess.run(command, input=b"#include <immintrin.h>", capture_output=True, timeout=60, check=False)
        if asked.returncode != 0:
            return False
        with config.patch({"cpp.vec_isa_ok": True}):
            isa.valid_vec_isa_list()  # caches its result
    except (AttributeError, ImportError, OSError, RuntimeError, subprocess.SubprocessError):
        return False
    return True


def _cpp_compiler_of_torch() -> Callable[[], str] | None:
    """Return torch's function that finds a working C++ compiler or raises; None if torch lacks it, as it is not public."""
    builder = importlib.import_module("torch._inductor.cpp_builder")
    return getattr(builder, "get_cpp_compiler", None)
