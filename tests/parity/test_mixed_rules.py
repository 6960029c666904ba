"""Muon of matrices and AdamW of the rest are one file, which goes from PyTorch to JAX, to its stacked layers, and back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.support.jax_training import float64
from torch import Tensor, nn

from penstock import jax_frontend, torch_frontend
from penstock.core.errors import InvalidArgumentError
from penstock.core.portable.conversions import with_rule
from penstock.core.portable.file import describe, load, save
from penstock.core.portable.names import Transposed
from penstock.jax_frontend import (
    LayerStack,
    TrainState,
    adamw,
    init_train_state,
    make_release_step,
    muon,
    param_labels_for_muon,
    stable_adamw,
)
from penstock.torch_frontend import AdamW, Muon, param_groups_for_muon, release_gradients

LAYERS, INPUTS, WIDTH, HIDDEN = 3, 160, 64, 128
"""Sizes of which embed and down have codes, up has not (64 columns), and biases have not."""


class Case(NamedTuple):
    """dtype: of the parameters. states: "8bit" or None. transposed: JAX has its kernels [in, out]."""

    dtype: str
    states: str | None
    transposed: bool


CASES = [Case("float64", None, True), Case("float32", "8bit", False), Case("bfloat16", None, False)]


class Model(nn.Module):
    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(INPUTS, WIDTH, bias=False)
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(LAYERS))
        self.to(getattr(torch, case.dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return (x.float() if x.dtype is torch.bfloat16 else x).sub(1).square().mean()


def batches(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 6, INPUTS))


def torch_run(case: Case, seed: int = 0) -> tuple[Model, Muon]:
    model = Model(case, seed)
    optimizer = Muon(
        param_groups_for_muon(model, adamw={"weight_decay": 1e-2}), lr=1e-2, ns_dtype="float32", state_dtype=case.states
    )
    release_gradients(model, optimizer)
    return model, optimizer


def torch_steps(case: Case, model: Model, optimizer: Muon, given: np.ndarray) -> None:
    for batch in given:
        model(torch.tensor(batch, dtype=getattr(torch, case.dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()


def transform(case: Case) -> optax.GradientTransformationExtraArgs:
    axis = int(case.transposed)
    rules: dict[Any, Any] = {
        "muon": muon(1e-2, weight_decay=0.1, ns_dtype="float32", output_axis=axis, mu_dtype=case.states),
        "adamw": adamw(1e-2, weight_decay=1e-2, mu_dtype=case.states, nu_dtype=case.states),
    }
    return optax.partition(rules, param_labels_for_muon)


def jax_start(case: Case, tx: Any) -> TrainState:
    def zeros(*shape: int) -> jax.Array:
        matrix = shape[-2:] if len(shape) > 1 else shape
        return jnp.zeros((*shape[:-2], *(matrix[::-1] if case.transposed else matrix)), case.dtype)

    layers = {"up": zeros(LAYERS, HIDDEN, WIDTH), "bias": jnp.zeros((LAYERS, HIDDEN), case.dtype)}
    layers["down"] = zeros(LAYERS, WIDTH, HIDDEN)
    return init_train_state(tx, {"outer": {"embed": zeros(WIDTH, INPUTS)}, "layers": layers})


def stack(case: Case) -> LayerStack:
    def times(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return x @ (matrix if case.transposed else matrix.T)

    def loss(outer: Any, x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean((x.astype(jnp.promote_types(x.dtype, jnp.float32)) - 1) ** 2)

    return LayerStack(
        lambda outer, batch: times(batch, outer["embed"]),
        lambda params, x: x + times(jnp.tanh(times(x, params["up"]) + params["bias"]), params["down"]),
        loss,
    )


def names(case: Case) -> dict[Any, Any]:
    table = {f"layers.{each}": [f"{each}.{n}.weight" for n in range(LAYERS)] for each in ("up", "down")}
    table |= {"outer.embed": "embed.weight"}
    turned = {name: Transposed(target) for name, target in table.items()} if case.transposed else table
    return {**turned, "layers.bias": [f"up.{n}.bias" for n in range(LAYERS)]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_file_goes_to_jax_and_back_bit_for_bit_and_training_goes_on(case: Case, tmp_path: Path) -> None:
    there, back, given = tmp_path / "there", tmp_path / "back", batches(5)
    whole = torch_run(case)
    torch_steps(case, *whole, given[:2])
    torch_frontend.export_state(there, whole[1], whole[0], parameters=True)
    assert sorted(group.rule for group in describe(there).groups) == ["adamw", "muon"]
    with float64() if case.dtype == "float64" else contextlib.nullcontext():
        tx = transform(case)
        state = jax_frontend.import_state(there, tx, jax_start(case, tx), parameters=True, names=names(case))
        jax_frontend.export_state(back, tx, state, parameters=True, names=names(case))
        assert back.read_bytes() == there.read_bytes()
        step = make_release_step(stack(case), tx)
        for batch in given[2:]:
            state, _ = step(state, jnp.asarray(batch, case.dtype))
        jax_frontend.export_state(back, tx, state, parameters=True, names=names(case))
    model, optimizer = torch_run(case, seed=7)
    torch_frontend.import_state(there, optimizer, model, parameters=True, hyperparameters=True)
    for number, run in enumerate((whole, (model, optimizer))):
        torch_steps(case, *run, given[2:])
        torch_frontend.export_state(tmp_path / str(number), run[1], run[0], parameters=True)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    torch_frontend.import_state(back, optimizer, model, parameters=True, hyperparameters=True)
    # Steps of 1e-2. In 8 bits a rounding more or less is the next code, 6% of v; in bfloat16 gradients are off by 2^-8, and
    # AdamW's steps of those near zero are as long as others.
    bound = {"float64": 1e-12, "float32": 1e-3, "bfloat16": 3e-2}[case.dtype]
    for own, other in zip(whole[0].parameters(), model.parameters(), strict=True):
        assert (own - other).abs().max() <= bound
    assert [group["output_axis"] for group in optimizer.param_groups if group["rule"] == "muon"] == [0]
    torch_steps(case, model, optimizer, given[:1])


def test_a_state_of_another_rule_is_refused_by_name(tmp_path: Path) -> None:
    """By each frontend, before anything changes; what keeps the same fields can be declared with penstock convert --rule."""
    case, path = CASES[0], tmp_path / "file"
    model, optimizer = torch_run(case)
    torch_steps(case, model, optimizer, batches(1))
    torch_frontend.export_state(path, optimizer, model, parameters=True)
    all_adamw = AdamW(model.parameters())
    said = r"the state of 'down.0.weight', 'down.1.weight' and 4 more is of the rule 'muon', and the optimizer's is 'adamw'; "
    with pytest.raises(InvalidArgumentError, match=said + ".*start afresh, as the two keep different fields"):
        torch_frontend.import_state(path, all_adamw, model)
    assert not all_adamw.state
    with float64():
        tx = adamw(1e-2)
        start = jax_start(case, tx)
        with pytest.raises(InvalidArgumentError, match=r"'layers.down', 'layers.up' is of the rule 'muon', and .* 'adamw'; "):
            jax_frontend.import_state(path, tx, start, names=names(case))
        stable = optax.partition({"muon": muon(1e-2), "adamw": stable_adamw(1e-2)}, param_labels_for_muon)
        start = jax_start(case, stable)
        declare = "'layers.bias', 'outer.embed' is .* 'adamw', .* 'stable_adamw'; .* penstock convert --rule stable_adamw"
        with pytest.raises(InvalidArgumentError, match=declare):
            jax_frontend.import_state(path, stable, start, names=names(case))
        save(path, with_rule(load(path), "stable_adamw"))
        assert sorted(group.rule for group in describe(path).groups) == ["muon", "stable_adamw"]
        jax_frontend.import_state(path, stable, start, names=names(case))
    with pytest.raises(InvalidArgumentError, match="the fields of rules muon, stable_adamw cannot be those of 'lion'"):
        with_rule(load(path), "lion")
