"""The walk over two processes that hold half of every array each equals that of one process."""

from __future__ import annotations

from tests.support.jax_processes import in_two_processes

SCRIPT = """
import numpy as np
from penstock.jax_frontend import dynamic_loss_scale, init_train_state, make_release_step, make_update, stable_adamw
from tests.support.jax_processes import over_all, spread
from tests.support.jax_walk import STACK, batch, parameters

assert jax.device_count() == 4 and jax.local_device_count() == 2


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


def test_two_processes_equal_one() -> None:
    in_two_processes(SCRIPT, "equal")
