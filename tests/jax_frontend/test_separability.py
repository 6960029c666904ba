"""check_separable accepts transforms that can be applied layer by layer, and refuses all others with a remedy."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from tests.support.jax_training import tree
from tests.support.rows import rows

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.jax_frontend import adam, adamw, check_separable, compensated, init_train_state, release_layers, stable_adamw

SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)
NOISE_KEY = {"key": 0} if "key" in inspect.signature(optax.noisy_sgd).parameters else {}


def layer(dtype: str = "float32") -> dict[str, dict[str, jax.Array]]:
    return {"dense": {"kernel": jnp.zeros((3, 2), dtype), "bias": jnp.zeros(2, dtype)}, "norm": {"scale": jnp.ones(3, dtype)}}


MASK = {"dense": {"kernel": True, "bias": False}, "norm": False}


def by_dimensions(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def last_names(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)


def first_names(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)


SEPARABLE = {
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(SCHEDULE, mask=by_dimensions),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "rmsprop": optax.rmsprop(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "novograd": optax.novograd(1e-3),
    "yogi": optax.yogi(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "sm3": optax.sm3(1e-3),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-2)),
    "block clip": optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-2)),
    "centralize": optax.chain(optax.centralize(), optax.sgd(1e-2)),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(1e-2)),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(1e-2)),
    "masked": optax.masked(optax.adam(1e-2), MASK),
    "names": optax.partition({"kernel": optax.adam(1e-2), "bias": optax.sgd(1e-2), "scale": optax.lion(1e-3)}, last_names),
    "groups": optax.partition({"dense": optax.adam(1e-2), "norm": optax.sgd(1e-2)}, first_names),
    "schedule_free": contrib.schedule_free_sgd(),
    "muon": contrib.muon(1e-2),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 4),
    "ours": stable_adamw(SCHEDULE, mask=MASK, max_lr=1e-2),
    "ours compensated": compensated(adam(1e-3, compensation="none")),
    "ours in a chain": optax.chain(optax.zero_nans(), stable_adamw(1e-3)),
    "ours in MultiSteps": optax.MultiSteps(adamw(1e-3), 2),
    "ours injected": optax.inject_hyperparams(stable_adamw, hyperparam_dtype=jnp.float32)(learning_rate=1e-3, b2=0.9),
}


class Largest(NamedTuple):
    largest: jax.Array


def by_the_largest_so_far() -> optax.GradientTransformation:
    """The first update of each layer knows nothing of the others, the second does."""

    def update(updates, state, params=None):
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(updates)]))
        return jax.tree.map(lambda leaf: leaf / state.largest, updates), Largest(largest)

    return optax.GradientTransformation(lambda params: Largest(jnp.ones(())), update)


def by_the_first_array_so_far() -> optax.GradientTransformation:
    """The state knows of one layer only, and hands it to all layers one update later."""

    def update(updates, state, params=None):
        size = jnp.max(jnp.abs(jax.tree.leaves(updates)[0]))
        return jax.tree.map(lambda leaf: leaf / state.largest, updates), Largest(size)

    return optax.GradientTransformation(lambda params: Largest(jnp.ones(())), update)


def from_the_first_parameters() -> optax.GradientTransformation:
    """What all layers share was made once, from all of them."""

    def init(params):
        return Largest(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(params)))

    def update(updates, state, params=None):
        return jax.tree.map(lambda leaf: leaf * state.largest, updates), state

    return optax.GradientTransformation(init, update)


def by_the_number_of_arrays() -> optax.GradientTransformation:
    def update(updates, state, params=None):
        return jax.tree.map(lambda leaf: leaf / len(jax.tree.leaves(updates)), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


HIDDEN = (by_the_largest_so_far, by_the_first_array_so_far, from_the_first_parameters, by_the_number_of_arrays)

ENTANGLED = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "normalize_by_update_norm": optax.chain(optax.normalize_by_update_norm(), stable_adamw(1e-3)),
    "apply_if_finite": optax.apply_if_finite(stable_adamw(1e-3), 3),
    "skip_not_finite": optax.MultiSteps(optax.sgd(1e-2), 2, should_skip_update_fn=optax.skip_not_finite),
    "prodigy": contrib.prodigy(),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "mechanize": contrib.mechanize(optax.sgd(1e-2)),
    "scale_by_lbfgs": optax.lbfgs(1e-2, linesearch=None),
    "scale_by_zoom_linesearch": optax.lbfgs(),
    "scale_by_polyak": optax.polyak_sgd(),
    "noise": optax.noisy_sgd(1e-2, eta=0.1, **NOISE_KEY),
    "noise in bfloat16": optax.noisy_sgd(1e-2, eta=0.1, **NOISE_KEY),
    "injected": optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1e9),
    **{transform.__name__: optax.chain(transform(), optax.sgd(1e-2)) for transform in HIDDEN},
}


LIKE_ADAM_OR_SGD = ("momentum", "adamw", "rmsprop", "adabelief", "yogi", "amsgrad", "lars", "zero_nans", "ema")


@pytest.mark.parametrize("name", rows(SEPARABLE, lambda name: name not in LIKE_ADAM_OR_SGD))
def test_a_transform_of_single_arrays_is_separable(name) -> None:
    check_separable(SEPARABLE[name], layer("bfloat16" if name.startswith("ours") else "float32"))


@pytest.mark.parametrize("name", ENTANGLED)
def test_a_transform_of_all_parameters_is_refused_with_a_remedy(name) -> None:
    with pytest.raises(RefusedError, match=r"^tx cannot be applied layer by layer: .* Remedy: .*max_norm="):
        check_separable(ENTANGLED[name], layer("bfloat16" if name == "noise in bfloat16" else "float32"))


def test_every_kind_of_tree_is_checked() -> None:
    check_separable(stable_adamw(1e-2), tree(0))  # an empty, a 0-d and a None leaf
    check_separable(stable_adamw(1e-2), {})
    check_separable(optax.adam(1e-2), jnp.ones(3))
    with pytest.raises(RefusedError):
        check_separable(optax.clip_by_global_norm(1.0), jnp.ones(()))
    with pytest.raises(UnsupportedTensorError, match=r"params\['ids'\] has dtype int32"):
        check_separable(optax.sgd(1e-2), {"ids": jnp.arange(3)})


def test_extra_arguments_are_passed_to_the_update_or_missed_by_name() -> None:
    tx = optax.chain(optax.sgd(1e-2), contrib.reduce_on_plateau())
    check_separable(tx, layer(), value=jnp.ones(()))
    with pytest.raises(RefusedError, match="its update fails when it is given the gradient, the state and the parameters"):
        check_separable(tx, layer())


def test_a_state_that_changes_its_shape_is_named() -> None:
    growing = optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, (*state, 1.0)))
    with pytest.raises(InvalidArgumentError, match="state of another structure"):
        check_separable(growing, layer())


def test_a_mask_that_fits_one_layer_only_is_refused() -> None:
    def mask(params):
        return {"dense": {"kernel": params["dense"]["kernel"].ndim > 1, "bias": False}, "norm": {"scale": False}}

    with pytest.raises(RefusedError, match="give masks and labels as functions of the parameters"):
        check_separable(optax.masked(optax.sgd(1e-2), mask), layer())


def test_masks_and_labels_of_all_parameters_are_refused() -> None:
    params = {"outer": layer(), "layers": jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), layer())}
    mask = {"outer": MASK, "layers": MASK}
    labels = jax.tree.map(str, mask)
    for tx in (
        optax.masked(optax.sgd(1e-2), mask),
        optax.adamw(1e-2, mask=mask),
        optax.multi_transform({"True": optax.sgd(1e-2), "False": optax.set_to_zero()}, labels),
    ):
        for made in (lambda tx=tx: init_train_state(tx, params), lambda tx=tx: check_separable(tx, layer())):
            with pytest.raises(RefusedError, match=r"tx.init fails on a part .* Remedy: give masks and labels as functions"):
                made()


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no jax.new_ref")
def test_a_mask_of_all_parameters_is_refused_where_it_is_first_used() -> None:
    params = {"outer": layer(), "layers": jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), layer())}
    tx = stable_adamw(1e-2, mask={"outer": MASK, "layers": MASK})  # whose init does not look at it
    step = release_layers(lambda outer, layers, batch: batch, lambda params, x: x, tx)
    with pytest.raises(InvalidArgumentError, match=r"mask has the structure .* not that of params.*a function of them"):
        step(init_train_state(tx, params), jnp.ones(()))


def test_checking_large_parameters_takes_no_memory() -> None:
    four_terabytes = {"kernel": jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)}
    check_separable(stable_adamw(1e-2), four_terabytes)


def test_checking_works_while_a_step_is_traced() -> None:
    @jax.jit
    def step(params):
        check_separable(optax.adamw(1e-2), params)
        with pytest.raises(RefusedError):
            check_separable(ENTANGLED["noise"], params)
        return params

    step(layer())
