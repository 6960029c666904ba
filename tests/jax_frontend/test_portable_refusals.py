"""Mistakes at an import into JAX that would give wrong numbers are refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.core.portable.conversions import with_codes
from penstock.core.portable.file import load, save
from penstock.core.portable.names import Transposed
from penstock.jax_frontend import TrainState, adamw, export_state, import_state, init_train_state, make_update


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def trained(tx: Any, dtype: Any = "float32", seed: int = 0) -> TrainState:
    values = np.random.default_rng(seed).normal(size=(2, 3, 4))
    params = {"layers": {"w": jnp.asarray(values, dtype)}, "outer": {"v": jnp.ones(3, dtype)}}
    state = init_train_state(tx, params, layered=False)
    gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), state.params)
    return TrainState(*make_update(tx)(gradients, state.opt_state, state.params))


@pytest.mark.parametrize("compensation", ["split", "kahan"])
def test_a_compensation_of_other_parameters_is_refused(path: Path, compensation: str) -> None:
    tx = adamw(1e-2, compensation=compensation)
    state, other = trained(tx, "bfloat16"), trained(tx, "bfloat16", seed=1)
    export_state(path, tx, state, parameters=True)
    with pytest.raises(InvalidArgumentError, match=r"'layers.w' is not that of the state, .*parameters=True.*checkpoint"):
        import_state(path, tx, other)
    found = import_state(path, tx, other._replace(params=state.params))
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(state)))


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({"compensation": "kahan"}, {}, r"RuleState.compensation of 'layers.w' is bfloat16 .* int16; give the transform"),
        ({"nu_dtype": "bfloat16", "b2": 0.9}, {"nu_dtype": "float32", "b2": 0.9}, r"exp_avg_sq'\] of .* bfloat16 .* float32"),
    ],
    ids=["compensation", "moments"],
)
def test_the_state_of_a_transform_with_other_dtypes_is_refused(path: Path, there: dict, here: dict, said: str) -> None:
    """Its structure is the same, so that only the dtypes tell."""
    state = trained(adamw(1e-2, **there), "bfloat16")
    with pytest.raises(InvalidArgumentError, match=said):
        export_state(path, adamw(1e-2, **here), state)
    assert not path.exists()
    export_state(path, adamw(1e-2, **there), state)
    with pytest.raises(InvalidArgumentError, match=said):
        import_state(path, adamw(1e-2, **here), state)


def test_float64_arrays_are_refused_without_x64(path: Path) -> None:
    tx = adamw(1e-2)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, "float64" if leaf.dtype.kind == "f" else None), trained(tx))
    with pytest.raises(InvalidArgumentError, match=r"state.params.* is float64; set jax_enable_x64"):
        import_state(path, tx, wide)
    narrow = jax.tree.map(np.asarray, trained(tx))
    export_state(path, tx, narrow, parameters=True)
    assert all(map(np.array_equal, jax.tree.leaves(import_state(path, tx, narrow)), jax.tree.leaves(narrow)))


def test_layers_stay_stacked_in_the_file_where_names_says_so(path: Path) -> None:
    tx = adamw(1e-2)
    layers = {"w": jnp.arange(24.0).reshape(2, 3, 4), "b": jnp.ones((2, 4))}
    state = init_train_state(tx, {"outer": {}, "layers": layers})
    names = {"layers.w": "layers.w"}
    export_state(path, tx, state, parameters=True, names=names)
    assert set(load(path).parameters) == {"layers.w", "layers.0.b", "layers.1.b"}
    fresh = init_train_state(tx, jax.tree.map(jnp.zeros_like, state.params))
    found = import_state(path, tx, fresh, parameters=True, names=names)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(state)))
    with pytest.raises(
        InvalidArgumentError, match=r"lacks 'layers.0.w', 'layers.1.w' \(here 'layers.w'\); it has .*'layers.w'.*names="
    ):
        import_state(path, tx, fresh, parameters=True)


def test_a_stack_in_codes_of_one_tensor_is_refused(path: Path) -> None:
    """Whose scales have another shape: a row of it is a whole layer."""
    params, names = {"outer": {}, "layers": {"w": jnp.ones((2, 64, 128))}}, {"layers.w": "layers.w"}
    plain, coded = adamw(1e-2), adamw(1e-2, mu_dtype="8bit", nu_dtype="8bit")
    export_state(path, plain, init_train_state(plain, params), names=names)
    save(path, with_codes(load(path)))
    with pytest.raises(InvalidArgumentError, match=r"exp_avg_scale of 'layers.w' has shape \(2, 64\) .* and \(2, 64, 1\) in"):
        import_state(path, coded, init_train_state(coded, params), names=names)
    export_state(path, plain, init_train_state(plain, params))
    save(path, with_codes(load(path)))
    import_state(path, coded, init_train_state(coded, params))


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
def test_a_square_matrix_that_is_transposed_is_refused(path: Path, layered: bool, parameters: bool) -> None:
    """Neither the shapes nor the names tell; the parameters in the file do."""
    tx = adamw(1e-2)
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 3)), "float32")

    def started(values: jax.Array) -> TrainState:
        return init_train_state(tx, {"outer": {}, "layers": {"w": values}} if layered else {"w": values[0]})

    there, here = started(values), started(values.swapaxes(1, 2))
    export_state(path, tx, there, parameters=True)
    with pytest.raises(InvalidArgumentError, match=r"'(layers\.)?w' is transposed in the state: .*names=: Transposed"):
        import_state(path, tx, here, parameters=parameters)
    names = {"layers.w": Transposed(["layers.0.w", "layers.1.w"])} if layered else {"w": Transposed("w")}
    found = import_state(path, tx, here, parameters=parameters, names=names)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(here)))
    export_state(path, tx, there)  # and where nothing tells, it is the caller's word
    import_state(path, tx, here)


def test_a_path_or_names_of_another_type_are_refused(path: Path) -> None:
    tx = adamw(1e-2)
    state = trained(tx)
    for given in (None, 3, b"state", ["state"]):
        unfit: Any = given
        for function in (export_state, import_state):
            with pytest.raises(InvalidArgumentError, match="is not a path; give a str"):
                function(unfit, tx, state)
    unfit = state
    for function in (export_state, import_state):
        with pytest.raises(InvalidArgumentError, match=r"than \(path, tx, state\): path is .*, tx is TrainState, state"):
            function(path, unfit, tx)
    export_state(path, tx, state)
    before = path.read_bytes()
    for given, said in (
        (3, "names=3 must be a mapping"),
        ("w", "names='w' must be a mapping"),
        ({3: "w"}, "names gives 'w' for 3; it must be a name"),
        ({"layers.w": ("w", True)}, "names gives .* it must be a name, a list"),
    ):
        unfit = given
        for function in (export_state, import_state):
            with pytest.raises(InvalidArgumentError, match=said):
                function(path, tx, state, names=unfit)
    assert path.read_bytes() == before


def test_a_count_of_another_shape_is_refused(path: Path) -> None:
    tx = adamw(1e-2)
    state = trained(tx)
    for count in (jnp.zeros(2, int), jnp.zeros(0, int)):
        with pytest.raises(
            InvalidArgumentError, match=r"RuleState.count of '.*' has shape \(.,\).* these parameters need \(\)"
        ):
            export_state(path, tx, state._replace(opt_state=state.opt_state._replace(count=count)))
