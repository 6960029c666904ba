"""What the compiler of this machine can do, asked before anything is compiled."""

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
"""Without this option Inductor deletes casts to a low precision and back, and every kahan compensation would be zero."""


@functools.cache
def why_not(device_type: str) -> str | None:
    """Why nothing can be compiled for this device, or None; looked up once a process.

    On a CPU a C++ compiler is all that may be missing; elsewhere, and where torch does not tell, a small graph is compiled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it imports its compiler
        try:
            importlib.import_module("torch.utils.mkldnn")
            find_compiler = _cpp_compiler_of_torch() if device_type == "cpu" else None
            if find_compiler is not None:
                find_compiler()
            else:
                torch.compile(lambda x: torch.sqrt(x) + math.e, fullgraph=True)(torch.ones(8, device=device_type))
        except Exception as error:  # whatever a compiler, a driver or a full disk may raise
            return " ".join(str(error).split()[:40]) or type(error).__name__
    return None


@functools.cache
def keeps_casts(dtype: torch.dtype, device_type: str) -> bool:
    """Whether the compiler, when asked to, keeps a cast to this dtype and back: found out by compiling, once a process."""
    probe = torch.compile(lambda x: x - torch_ops.round_to(x, dtype_name(dtype)), fullgraph=True, options=KEEP_CASTS)
    return bool(probe(torch.full((8,), 1 + 2.0**-12, device=device_type)).all())


@functools.cache
def spare_search() -> bool:
    """Spare torch the search for this processor's vector instructions, once a process; whether that was done.

    torch compiles a program for each kind of them, which takes ten seconds where its cache is empty. Here the C++ compiler is
    asked once whether it takes all of their flags; if it does, torch is told that it can use them. Otherwise nothing is done,
    also where torch does not have the names that are used here, which are not public.
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
            isa.valid_vec_isa_list()  # which keeps what it finds
    except (AttributeError, ImportError, OSError, RuntimeError, subprocess.SubprocessError):
        return False
    return True


def _cpp_compiler_of_torch() -> Callable[[], str] | None:
    """What finds a working C++ compiler, or raises; not public: None where torch does not have it."""
    builder = importlib.import_module("torch._inductor.cpp_builder")
    return getattr(builder, "get_cpp_compiler", None)
