"""The first section: what the machine has, so that what is missing can be brought along with the next command."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from .peers import candidates
from .setting import Setting
from .tools import run_tool

TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "gcc")
"""gcc: Triton builds its launchers with it."""

FOUND = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,utilization.gpu"


def machine(setting: Setting) -> Iterator[dict[str, Any]]:
    """Find the tools and packages that later sections use, and ask the driver for the state of the card."""
    tools = {name: shutil.which(name) for name in TOOLS}
    packages = {"jax", "optax", *(candidate.module.partition(".")[0] for candidate in candidates(setting))}
    yield {"tools": tools, "missing_packages": sorted(name for name in packages if find_spec(name) is None)}
    if tools["nvidia-smi"] is not None and not setting.dry:
        yield {"card": run_tool([tools["nvidia-smi"], f"--query-gpu={FOUND}", "--format=csv"], 20).last_words}
