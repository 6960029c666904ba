"""One thread a worker: the workers share the cores, and threads that wait for each other would take them away."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def _of_this_jaxlib(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags whose names are in jaxlib's library: XLA ends a process that sets others, without a word."""
    package = find_spec("jaxlib")
    library = package and package.origin and next(Path(package.origin).parent.glob("libjax_common.*"), None)
    if not library:
        return ()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        return tuple(flag for flag in flags if code.find(b"\0%s\0" % flag.strip("-").partition("=")[0].encode()) >= 0)


# Eight devices for the tests of sharding. The rest is about machine code only, which takes nearly all time of a JAX test: XLA's
# programs, with all their memory, stay the same. (`make test-all` compiles as users do.)
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    *_of_this_jaxlib(
        (
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        )
    ),
)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))


@pytest.fixture(scope="module", autouse=True)
def _keep_no_older_programs_and_collect_no_older_garbage() -> None:
    """The programs that JAX has compiled for other modules are 3 GB at the end, and nobody runs them again.

    Collections, of which a trainer makes one a run, look at a module's own objects: those of all imports take seconds.
    """
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    gc.freeze()
