r"""Peak memory of training steps in JAX, from XLA's memory analysis of the compiled programs, which are not run.

    peak = (arguments + temporaries + outputs - aliased) / (bytes of the parameters)

Parameters and the two moments of Adam are 3.00; the rest is gradients, copies and activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.jax_decoder import Decoder
from penstock.jax_frontend import (
    ReleasedLayers,
    adamw,
    init_train_state,
    make_release_step,
    make_train_step,
    release_layers,
    stable_adamw,
)

MICROBATCHES = 4
OPTIMIZERS = {"optax.adamw": optax.adamw(1e-3), "adamw": adamw(1e-3), "stable_adamw": stable_adamw(1e-3)}
CODINGS = {
    "optax.adamw": optax.adamw(1e-3),
    "adamw": adamw(1e-3),
    "8bit, split8": adamw(1e-3, mu_dtype="8bit", nu_dtype="8bit", compensation="split8"),
    "8bit, stochastic": adamw(1e-3, mu_dtype="8bit", nu_dtype="8bit", compensation="stochastic"),
}

Step = Any
"""A jitted function of (state, batch)."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train.

    make: takes the optimizer and the model, returns a jitted step. rows: of the batch. stacked: the layers are stacked.
    layered: the state is that of the reverse walk, with a layer axis. every: number of steps of optax.MultiSteps around the
    optimizer. own: for penstock's optimizers only.
    """

    name: str
    make: Callable[[Any, Decoder], Step]
    rows: int = 1
    stacked: bool = True
    layered: bool = False
    every: int = 1
    own: bool = False


def plain(loss: Callable[..., Any], tx: optax.GradientTransformation, *, donated: bool = True) -> Step:
    """Return the usual step: gradient, update, apply_updates."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return state._replace(params=optax.apply_updates(params, updates), opt_state=opt_state), value

    return jax.jit(step, donate_argnums=0 if donated else ())


def accumulated(loss: Callable[..., Any], tx: optax.GradientTransformation) -> Step:
    """Return a step that adds up gradients of micro-batches in a loop, and updates once."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state

        def add(total: Any, chunk: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, chunk)
            return jax.tree.map(jnp.add, total, grads), value

        chunks = batch.reshape(MICROBATCHES, -1, *batch.shape[1:])
        total, values = lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)
        grads = jax.tree.map(lambda leaf: leaf / MICROBATCHES, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return state._replace(params=optax.apply_updates(params, updates), opt_state=opt_state), values.mean()

    return jax.jit(step, donate_argnums=0)


def by_optax_microbatch(loss: Callable[..., Any], tx: optax.GradientTransformation) -> Step:
    """Return a step that has the gradient of micro-batches averaged by `optax.microbatch`, and updates once."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        value_and_grad = optax.microbatch(
            lambda params, batch: jax.value_and_grad(loss)(params, batch),
            argnums=1,
            microbatch_size=batch.shape[0] // MICROBATCHES,
            accumulator=optax.microbatching.AccumulationType.MEAN,
        )
        value, grads = value_and_grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return state._replace(params=optax.apply_updates(params, updates), opt_state=opt_state), value

    return jax.jit(step, donate_argnums=0)


def into_references(loss: Callable[..., Any], tx: optax.GradientTransformation) -> Step:
    """Return a step whose backward pass adds the gradient to references, by `with_refs` of jax.vjp."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        value, pullback = jax.vjp(lambda params: loss(params, batch), params)
        references = jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), params)
        pullback.with_refs(references)(jnp.ones_like(value))
        grads = jax.tree.map(jax.freeze, references)
        updates, opt_state = tx.update(grads, opt_state, params)
        return state._replace(params=optax.apply_updates(params, updates), opt_state=opt_state), value

    return jax.jit(step, donate_argnums=0)


def clipping(tx: optax.GradientTransformation, clip: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Return `tx` applied to clipped gradients, with the state of `tx`."""
    return optax.GradientTransformation(tx.init, lambda grads, state, params: tx.update(clip(grads), state, params))


def by_optax(grads: Any) -> Any:
    """Clip with optax.clip_by_global_norm."""
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def by_hand(grads: Any) -> Any:
    """Clip by the global norm in plain jax.numpy, as many training loops do."""
    norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grads)))
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, 1.0 / norm), grads)


def own_loop(tx: optax.GradientTransformation, model: Decoder) -> Step:
    """Return a step with `release_layers` in a scan."""

    def loss_fn(outer: Any, layers: ReleasedLayers, batch: Any) -> Any:
        x = model.embed(outer, batch)
        x, _ = lax.scan(lambda x, index: (layers(index, x), None), x, layers.indices)
        return model.loss(outer, x, batch)

    return release_layers(loss_fn, model.layer, tx)


METHODS = (
    Method("scan", lambda tx, model: plain(model.stack, tx)),
    Method("scan, remat", lambda tx, model: plain(model.rematerialised, tx)),
    Method("scan, not donated", lambda tx, model: plain(model.stack, tx, donated=False)),
    Method("scan, optax.MultiSteps", lambda tx, model: plain(model.stack, tx), every=MICROBATCHES),
    Method("scan, gradients accumulated in a loop", lambda tx, model: accumulated(model.stack, tx), rows=MICROBATCHES),
    Method("scan, optax.microbatch", lambda tx, model: by_optax_microbatch(model.stack, tx), rows=MICROBATCHES),
    Method("scan, with_refs", lambda tx, model: into_references(model.rematerialised, tx)),
    Method("unrolled", lambda tx, model: plain(model.unrolled, tx), stacked=False),
    Method("unrolled, not donated", lambda tx, model: plain(model.unrolled, tx, donated=False), stacked=False),
    Method(
        "unrolled, optax.clip_by_global_norm", lambda tx, model: plain(model.unrolled, clipping(tx, by_optax)), stacked=False
    ),
    Method("unrolled, clipped by hand", lambda tx, model: plain(model.unrolled, clipping(tx, by_hand)), stacked=False),
    Method("make_train_step, unrolled", lambda tx, model: make_train_step(model.unrolled, tx), stacked=False),
    Method(
        "make_train_step, unrolled, max_norm",
        lambda tx, model: make_train_step(model.unrolled, tx, max_norm=1.0),
        stacked=False,
    ),
    Method("make_release_step", lambda tx, model: make_release_step(model.stack, tx), layered=True),
    Method(
        "make_release_step, 4 micro-batches",
        lambda tx, model: make_release_step(model.stack, tx, microbatches=MICROBATCHES),
        rows=MICROBATCHES,
        layered=True,
    ),
    Method("make_release_step, max_norm", lambda tx, model: make_release_step(model.stack, tx, max_norm=1.0), layered=True),
    Method(
        "make_release_step, 4 micro-batches into the moments",
        lambda tx, model: make_release_step(model.stack, tx, microbatches=MICROBATCHES, accumulation="state"),
        rows=MICROBATCHES,
        layered=True,
        own=True,
    ),
    Method(
        "make_release_step, saved residuals",
        lambda tx, model: make_release_step(model.stack, tx, save_residuals=True),
        layered=True,
    ),
    Method("release_layers", own_loop, layered=True),
)


OF_SIZES = ("scan, remat", "scan, with_refs", "unrolled", "make_train_step, unrolled", "make_release_step")
"""The methods of the models of SIZES, all with a donated state."""

SIZES = {
    f"{layers} layers, {dtype}": Decoder(layers=layers, vocabulary=32768, dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for layers in (1, 2, 12, 24)
}
"""Models with a vocabulary as language models have it: for few layers most parameters are outside of them."""


OF_CODINGS = ("scan, remat", "make_train_step, unrolled", "make_release_step", "release_layers")
"""The methods for which CODINGS are compared."""

CODED = SIZES["12 layers, bfloat16"]
"""The model for which CODINGS are compared."""


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def peak(lowered: jax.stages.Lowered) -> dict[str, int]:
    """Return the bytes of a computation's arguments, temporaries, outputs and aliased buffers, and its peak."""
    return peak_of(lowered.compile())


def peak_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return `peak` of a compiled computation."""
    analysis: Any = compiled.memory_analysis()
    parts = {
        "arguments": analysis.argument_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
    }
    return parts | {"peak": parts["arguments"] + parts["temporaries"] + parts["outputs"] - parts["aliased"]}


@dataclasses.dataclass(frozen=True)
class ShardedDecoder(Decoder):
    """A decoder whose activations stay sharded by rows, so that weights are gathered layer by layer (FSDP)."""

    def embed(self, outer: Any, batch: Any) -> Any:
        return lax.with_sharding_constraint(super().embed(outer, batch), over_devices(0))

    def layer(self, params: Any, x: Any) -> Any:
        return lax.with_sharding_constraint(super().layer(params, x), over_devices(0))


def over_devices(axis: int) -> NamedSharding:
    """Return the sharding of one axis of an array over all devices."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(*[None] * axis, "data"))


def spread(tree: Any, stacked: bool) -> Any:
    """Return a tree of abstract arrays, with the largest axis of each except the layer axis sharded over all devices."""

    def one(path: Any, leaf: Any) -> Any:
        first = int(stacked and "layers" in jax.tree_util.keystr(path))
        axis = max(range(first, leaf.ndim), key=lambda axis: leaf.shape[axis], default=None)
        if axis is None or leaf.shape[axis] % jax.device_count():
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=over_devices(axis))

    return jax.tree_util.tree_map_with_path(one, tree)


def transform_of(method: Method, optimizer: str) -> Any:
    """Return the transform of this name, in optax.MultiSteps if the method has it."""
    tx: Any = (OPTIMIZERS | CODINGS)[optimizer]
    return tx if method.every == 1 else optax.MultiSteps(tx, method.every).gradient_transformation()


def arguments(
    method: Method, tx: Any, model: Decoder, *, dtype: Any = None, devices: int = 1
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that make the state and the batch of a step."""
    key = jax.random.key(0)

    def state() -> Any:
        return init_train_state(tx, model.params(key, stacked=method.stacked, dtype=dtype), layered=method.layered)

    return state, lambda: model.batch(key, method.rows * devices)


def measure(method: Method, optimizer: str, model: Decoder) -> dict[str, float]:
    """Return the peak bytes of one step on one device, relative to the bytes of its share of the parameters, and its parts."""
    tx = transform_of(method, optimizer)
    devices = jax.device_count()
    state, batch = map(jax.eval_shape, arguments(method, tx, model, devices=devices))
    params = state.params
    if devices > 1:
        state = spread(state, method.stacked)
        batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=over_devices(0))
    parts = peak(method.make(tx, model).lower(state, batch))
    return {"peak_over_parameters": parts["peak"] / (bytes_of(params) / devices), **parts}
