"""What every result carries: versions, device, command and time."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.core.atomic_write import replacing

PACKAGES = ("penstock", "torch", "jax", "jaxlib", "optax", "numpy", "triton", "torch-optimi", "flashoptim", "torchao")


def circumstances() -> dict[str, Any]:
    """Versions of what is installed, the processor, the number of cores, the command and the day."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions | {"python": platform.python_version()},
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "system": platform.system()},
        "command": shlex.join(["python", "-m", *_module_and_arguments()]),
        "date": datetime.date.today().isoformat(),
    }


def _module_and_arguments() -> list[str]:
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    return [specification.name if specification else Path(sys.argv[0]).name, *sys.argv[1:]]


def processor_name() -> str:
    """The processor's model name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**circumstances(), **result}, indent=2) + "\n")
