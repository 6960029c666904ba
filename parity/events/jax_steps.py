"""Event sequences on the JAX backends: a jitted step for each number of micro-batches, on models with given gradients.

A step of JAX takes all micro-batches at once and averages their gradients, where the sequences add them up. So each
micro-batch's gradients are multiplied by their number, a power of two, which changes no digit.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.dtypes import compute_dtype
from ...core.rules import Rule
from ..backends.jax_arguments import FACTORS, MIDDLE, held_of, precision, product, transform_of
from ..backends.protocol import Held
from ..cases import Storage
from ..rules import hyperparameters_of
from .recorded import SHAPES, WEIGHT_DECAY, Backward, Event, EventCase, EventSequence, Step

OUTER = ("scalar",)
"""Of the walk, the tensors that belong to no layer. The others are those of the `MIDDLE` one of three stacked layers; under
clipping the gradients of its neighbours are zero, as the norm is of all."""


def refusal(case: EventCase, *, walk: bool) -> str | None:
    """Return why a JAX backend does not run a case, or None if it does."""
    sequence = case.sequence
    passes = [event for event in sequence.events if isinstance(event, Backward)]
    sizes = {len(group) for _, group, _ in sequence.groups()}
    if any(event.paused for event in passes):
        return "a step of JAX keeps no gradient for the next one, so that nothing can be paused"
    if not all(stepped for _, _, stepped in sequence.groups()):
        return "in JAX there is no gradient outside of a step that could be discarded"
    if any(set(event.tensors) != set(SHAPES) for event in passes):
        return "in JAX a parameter that the loss does not use has a gradient of zero, and is updated with it"
    if sequence.clips_each:
        return "penstock's training steps clip the global norm, not that of each tensor"
    if sequence.skips:
        return "penstock's transforms do not skip gradients that are not finite; optax.apply_if_finite does"
    if any(size & (size - 1) for size in sizes):
        return "the mean of micro-batches is their sum exactly only where their number is a power of two"
    if not walk and sequence.accumulation == "state":
        return "make_train_step adds micro-batches up exactly; accumulation='state' is the walk's"
    if not walk and sequence.loss_scale is not None:
        return "make_train_step does not scale the loss; the walk does"
    return case.not_compiled


class JaxEvents:
    """The passes of a step wait until it comes, and go into it together."""

    def __init__(self, case: EventCase, *, walk: bool) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        self.case, self.walk = case, walk
        self.waiting: list[dict[str, list[np.ndarray]]] = []
        self.passes = 0
        sequence = case.sequence
        tx = self.tx = _transform(case.rule, rates_of(sequence), case.storage)
        with precision(self.case.dtype):
            start = {name: jnp.array(value) for name, value in case.initial_parameters().items()}
            if walk:
                layers = {name: jnp.stack([value] * len(FACTORS)) for name, value in start.items() if name not in OUTER}
                params: Any = {"outer": {name: start[name] for name in OUTER}, "layers": layers}
                scale = None if sequence.loss_scale is None else jax_frontend.dynamic_loss_scale(sequence.loss_scale)
                self.state = jax_frontend.init_train_state(tx, params, loss_scale=scale)
            else:
                self.state = jax_frontend.init_train_state(tx, start)

    def run(self, event: Event) -> None:
        """A change of the learning rate is in the schedule."""
        if isinstance(event, Backward):
            self.waiting.append(self.case.gradients(self.passes, event))
            self.passes += 1
        elif isinstance(event, Step):
            self._step()

    def held(self) -> dict[str, Held]:
        import jax

        params, state = self.state.params, self.state.opt_state
        if not self.walk:
            return held_of(params, state)
        middle = jax.tree.map(lambda leaf: np.array(leaf)[MIDDLE], (params["layers"], state.layers))
        return {**held_of(params["outer"], state.outer), **held_of(*middle)}

    def updates(self) -> dict[str, int]:
        state = self.state.opt_state
        if not self.walk:
            return dict.fromkeys(SHAPES, int(state.count))
        return {name: int(state.outer.count if name in OUTER else state.layers.count[MIDDLE]) for name in SHAPES}

    def live_bytes(self) -> None:
        """Nothing: a compiled program does not tell; the section "memory" has XLA's own account."""
        return None

    def save(self) -> bytes:
        """The bytes of every leaf of the train state."""
        import jax

        leaves = [np.array(leaf).tobytes() for leaf in jax.tree.leaves(self.state)]
        return pickle.dumps((self.passes, leaves))

    def load(self, saved: bytes) -> None:
        import jax
        import jax.numpy as jnp

        self.passes, given = pickle.loads(saved)
        leaves, treedef = jax.tree.flatten(self.state)
        with precision(self.case.dtype):
            loaded = [
                jnp.array(np.frombuffer(data, leaf.dtype).reshape(leaf.shape)) for data, leaf in zip(given, leaves, strict=True)
            ]
            self.state = jax.tree.unflatten(treedef, loaded)

    def _step(self) -> None:
        count, sequence = len(self.waiting), self.case.sequence
        batch = {}  # of every tensor (micro-batches, uses, *shape)
        for name, uses in self.waiting[0].items():
            gradients = np.stack([np.stack(given[name]) for given in self.waiting])
            batch[name] = np.asarray(gradients * count, uses[0].dtype)
        self.waiting = []
        make = _release_step if self.walk else _train_step
        in_state = sequence.accumulation == "state" and count > 1
        step = make(self.tx, compute_dtype(self.case.dtype), count, sequence.max_norm, in_state)
        with precision(self.case.dtype):
            self.state, _ = step(self.state, batch)


def rates_of(sequence: EventSequence) -> tuple[float, ...]:
    """The learning rate of each step; only one where it stays."""
    rates = tuple(rate for rate, _, stepped in sequence.groups() if stepped)
    return rates if len(set(rates)) > 1 else rates[:1]


@functools.lru_cache(maxsize=64)  # cases that differ in their gradients only share what is compiled
def _transform(rule: Rule, rates: tuple[float, ...], storage: Storage) -> Any:
    import jax.numpy as jnp

    learning_rate: Any = rates[0]
    given = hyperparameters_of(rule, rates[0], WEIGHT_DECAY)
    if len(rates) > 1:
        learning_rate = lambda count: jnp.asarray(rates)[count]  # noqa: E731
    return transform_of(rule, given, storage, learning_rate=learning_rate)


def _product(parameters: Mapping[str, Any], gradients: Mapping[str, Any], dtype: str) -> Any:
    """sum(p*g), whose gradient is g; a parameter with gradients (uses, ...) is used as often."""
    return sum(
        product({name: parameter}, {name: gradients[name][use]}, dtype)
        for name, parameter in parameters.items()
        for use in range(gradients[name].shape[0])
    )


@functools.lru_cache(maxsize=64)
def _train_step(tx: Any, dtype: str, microbatches: int, max_norm: float | None, in_state: bool) -> Callable[..., Any]:
    from ... import jax_frontend

    def loss(params: Any, batch: Any) -> Any:
        return _product(params, {name: of_chunk[0] for name, of_chunk in batch.items()}, dtype)

    return jax_frontend.make_train_step(loss, tx, microbatches=microbatches, max_norm=max_norm)


@functools.lru_cache(maxsize=64)
def _release_step(tx: Any, dtype: str, microbatches: int, max_norm: float | None, in_state: bool) -> Callable[..., Any]:
    import jax.numpy as jnp

    from ... import jax_frontend

    def inputs(batch: Any) -> Any:
        factors = FACTORS if max_norm is None else (0.0, 1.0, 0.0)
        return {name: jnp.stack([of_chunk[0] * factor for factor in factors]) for name, of_chunk in batch.items()}

    def loss(outer: Any, x: Any, batch: Any) -> Any:
        return x + _product(outer, {name: batch[name][0] for name in OUTER}, dtype)

    stack = jax_frontend.LayerStack(
        lambda outer, batch: jnp.zeros((), dtype),
        jax_frontend.Layers(lambda params, x, given: x + _product(params, given, dtype), inputs=inputs),
        loss,
    )
    accumulation = "state" if in_state else None
    return jax_frontend.make_release_step(stack, tx, microbatches=microbatches, max_norm=max_norm, accumulation=accumulation)
