"""Presets: the same bytes for each parameter in both frontends, and no preset beside what it would choose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch import nn

from penstock import jax_frontend, torch_frontend
from penstock.core.errors import InvalidArgumentError

BYTES = {  # of parameter, fields and compensation of AdamW, without the scales: 4 bytes for each of 2 fields' 128 elements
    "exact": {"float32": 12, "bfloat16": 10, "float16": 10},
    "compact": {"float32": 6, "bfloat16": 5, "float16": 6},
    "smallest": {"float32": 6, "bfloat16": 4, "float16": 4},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("precision", BYTES)
def test_both_frontends_keep_the_same_bytes(precision: str, dtype: str) -> None:
    parameter = nn.Parameter(torch.ones(32, 256, dtype=getattr(torch, dtype)))
    optimizer = torch_frontend.AdamW([parameter], precision=precision)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [parameter.detach(), *optimizer.state[parameter].values()]
    in_torch = sum(x.nbytes for x in kept if isinstance(x, torch.Tensor) and x.dim())
    params = {"w": jnp.ones((32, 256), dtype)}
    leaves = jax.tree.leaves((params, jax_frontend.adamw(1e-3, precision=precision).init(params)))
    scales = 0 if precision == "exact" else 2 * 4 / 128
    assert in_torch == sum(x.nbytes for x in leaves if x.ndim) == (BYTES[precision][dtype] + scales) * parameter.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "small"}, r"precision='small' is not known; it must be one of exact, compact, smallest"),
        ({"precision": "compact", "compensation": "kahan"}, r"precision='compact' chooses compensation itself"),
    ],
)
def test_an_unknown_preset_and_one_beside_its_own_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        torch_frontend.AdamW([nn.Parameter(torch.ones(3))], **arguments)
    with pytest.raises(InvalidArgumentError, match=message):
        jax_frontend.adamw(1e-3, **arguments)


def test_the_dtypes_of_fields_are_among_what_a_preset_chooses() -> None:
    with pytest.raises(InvalidArgumentError, match=r"precision='smallest' chooses state_dtype itself"):
        torch_frontend.AdamW([nn.Parameter(torch.ones(3))], precision="smallest", state_dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match=r"precision='smallest' chooses nu_dtype itself"):
        jax_frontend.adamw(1e-3, precision="smallest", nu_dtype=jnp.float32)
    with pytest.raises(InvalidArgumentError, match=r"state_dtype='8bit' is not possible for a float64 parameter"):
        torch_frontend.AdamW([nn.Parameter(torch.ones(3, dtype=torch.float64))], precision="compact")


def test_a_rule_without_fields_and_injected_hyperparameters_take_a_preset() -> None:
    for momentum, keys in ((0.0, {"step"}), (0.9, {"step", "momentum_buffer", "momentum_buffer_scale"})):
        parameter = nn.Parameter(torch.ones(32, 256))
        optimizer = torch_frontend.SGD([parameter], lr=1e-3, momentum=momentum, precision="smallest")
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert set(optimizer.state[parameter]) == keys
    params = {"w": jnp.ones((32, 256), jnp.bfloat16)}
    state: Any = optax.inject_hyperparams(jax_frontend.adamw, hyperparam_dtype=jnp.float32)(
        learning_rate=1e-3, precision="compact"
    ).init(params)
    assert state.inner_state.compensation["w"].dtype == jnp.int8
