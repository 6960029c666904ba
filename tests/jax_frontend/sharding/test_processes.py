"""Two processes that hold half of every array each: the walk is that of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from penstock.jax_frontend import dynamic_loss_scale, init_train_state, make_release_step, make_update, stable_adamw
from tests.walk_support import STACK, batch, parameters

mesh = Mesh(np.array(jax.devices()), ("data",))
assert jax.device_count() == 4 and jax.local_device_count() == 2


def over_all(leaf, axis):
    value = np.asarray(leaf)
    axes = PartitionSpec(*[None] * axis, "data") if value.ndim > axis else PartitionSpec()
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, axes), lambda index: value[index])


def spread(params):
    outer = jax.tree.map(lambda leaf: over_all(leaf, 1), params["outer"])
    return {"outer": outer, "layers": jax.tree.map(lambda leaf: over_all(leaf, 1), params["layers"])}


def check(state, alone):
    for part, whole in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        assert part.shape == () or len(part.sharding.device_set) == 4
        for shard in part.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(whole)[shard.index], rtol=1e-12, atol=1e-12)


tx = stable_adamw(1e-2)
step = make_release_step(STACK, tx, max_norm=0.05)
params, data = parameters("float64", width=8), batch(8)
state = init_train_state(tx, spread(params), loss_scale=dynamic_loss_scale())
alone = init_train_state(tx, params, loss_scale=dynamic_loss_scale())
shared = jax.tree.map(lambda leaf: over_all(leaf, 0), data)
for _ in range(2):
    state, metrics = step(state, shared)
    alone, expected = step(alone, data)
assert not state.params["layers"]["up"].is_fully_addressable
np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=1e-12)
check(state, alone)

update = make_update(tx)
params, grads = parameters("float64", width=8), parameters("float64", width=8)
check(update(spread(grads), tx.init(spread(params)), spread(params)), update(grads, tx.init(params), params))
print("equal")
"""


def test_two_processes_are_one() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(port), str(index)],
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
            assert out.splitlines()[-1] == "equal"
    finally:
        for process in processes:
            process.kill()
