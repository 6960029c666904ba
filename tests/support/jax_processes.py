"""Two processes with two devices each, and arrays that are sharded over all four."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.conftest import XLA_FLAGS

ROOT = Path(__file__).resolve().parents[2]

START = """
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
"""


def in_two_processes(script: str, last_line: str, *arguments: str) -> None:
    """Run a script twice; both must end with this line. sys.argv[3:] are the arguments."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "XLA_FLAGS": " ".join(("--xla_force_host_platform_device_count=2", *XLA_FLAGS[1:])),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + script, str(port), str(index), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            if "gloo" in err and "not" in err and "implementation" in err.splitlines()[-1]:
                pytest.skip("this jaxlib has no collectives between processes on a CPU")
            assert process.returncode == 0, err
            assert out.splitlines()[-1] == last_line
    finally:
        for process in processes:
            process.kill()


def over_all(leaf: Any, axis: int) -> jax.Array:
    """An array on all devices, cut along an axis if it has it."""
    value, mesh = np.asarray(leaf), Mesh(np.array(jax.devices()), ("data",))
    axes = PartitionSpec(*[None] * axis, "data") if value.ndim > axis else PartitionSpec()
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, axes), lambda index: value[index])


def spread(params: Any) -> dict[str, Any]:
    """The parameters of a stack, cut along their second axis: none is whole anywhere."""
    return jax.tree.map(lambda leaf: over_all(leaf, 1), params)
