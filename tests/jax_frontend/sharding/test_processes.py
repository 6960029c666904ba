"""Two processes that hold half of every array each: the walk equals that of one process, and state is written by both."""

from __future__ import annotations

from pathlib import Path

from tests.support.jax_processes import in_two_processes

WALK = """
from pathlib import Path

import numpy as np
from penstock.core.errors import PenstockError
from penstock.jax_frontend import (
    dynamic_loss_scale, export_state, import_state, init_train_state, make_release_step, make_update,
)
from tests.support.jax_processes import over_all, spread
from tests.support.jax_walk import STACK, TX, batch, parameters

assert jax.device_count() == 4 and jax.local_device_count() == 2


def check(state, alone):
    for part, whole in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        assert part.shape == () or len(part.sharding.device_set) == 4
        for shard in part.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(whole)[shard.index], rtol=1e-12, atol=1e-12)


step = make_release_step(STACK, TX, max_norm=0.05)
params, data = parameters("float64", width=8), batch(8)
state = init_train_state(TX, spread(params), loss_scale=dynamic_loss_scale())
alone = init_train_state(TX, params, loss_scale=dynamic_loss_scale())
shared = jax.tree.map(lambda leaf: over_all(leaf, 0), data)
for _ in range(2):
    state, metrics = step(state, shared)
    alone, expected = step(alone, data)
assert not state.params["layers"]["up"].is_fully_addressable
np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=1e-12)
check(state, alone)

update = make_update(TX)
params, grads = parameters("float64", width=8), parameters("float64", width=8)
check(update(spread(grads), TX.init(spread(params)), spread(params)), update(grads, TX.init(params), params))
"""

EXPORT = """
params, path = parameters("bfloat16", width=8), Path(sys.argv[3])
state = init_train_state(TX, spread(params))
assert not state.params["layers"]["up"].is_fully_addressable
export_state(path, TX, state, parameters=True)
content = path.read_bytes()  # it is there when the call returns, in both processes
found = import_state(path, TX, init_train_state(TX, spread(jax.tree.map(np.ones_like, params))), parameters=True)
for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
    assert a.sharding == b.sharding
    for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
first = jax.process_index() == 0


def fails(said, function, where, *arguments, **options):
    try:
        function(where, TX, *arguments, **options)
    except PenstockError as error:
        assert said in str(error), error
        return
    raise AssertionError(said)


nowhere = path.parent / "nowhere" / "state"
fails("could not be written" if first else "process 0 failed: ", export_state, nowhere, state)
fails("process 1 failed: " if first else "cannot be read", import_state, path if first else nowhere, state)
fails("process 1 failed: " if first else "not a TrainState", import_state, path, state if first else None)
fails("other arguments", import_state, path, state, parameters=first)
assert path.read_bytes() == content
print("equal, refused")
"""


def test_two_processes_equal_one_and_export_and_fail_together(tmp_path: Path) -> None:
    """Nobody holds a whole array. What fails on one fails on both, and neither waits for ever."""
    in_two_processes(WALK + EXPORT, "equal, refused", str(tmp_path / "state"))
