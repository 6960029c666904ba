"""The cases on the JAX backends: `make_update`, and for micro-batches in the state the walk, on a stack of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..backends.jax_arguments import FACTORS, MIDDLE, stack_of_given_gradients, transform_of
from .cases import CodingCase
from .definitions import key_of
from .protocol import HeldField, HeldTensor


class UpdateCodings:
    """A transform and its jitted update."""

    def __init__(self, case: CodingCase) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        self.case = case
        tx = transform_of(case.rule, case.hyperparameters, case.storage)
        self.jitted = jax_frontend.make_update(tx)
        self.parameters: Any = {name: jnp.array(value) for name, value in case.initial_parameters().items()}
        self.state = tx.init(self.parameters)

    def update(self, gradients: Sequence[Mapping[str, np.ndarray]]) -> None:
        import jax.numpy as jnp

        given = {name: jnp.array(gradient) for name, gradient in gradients[0].items()}
        self.parameters, self.state = self.jitted(given, self.state, self.parameters)

    def held(self) -> dict[str, HeldTensor]:
        return _held(self.case, self.parameters, self.state)

    def keys(self) -> dict[str, int]:
        return {name: key_of(name) for name in self.parameters}

    def steps_from_stored(self) -> bool:
        return False


class WalkCodings:
    """`make_release_step` of three layers, of which the middle one has the gradients of the case."""

    def __init__(self, case: CodingCase) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        self.case = case
        tx = transform_of(case.rule, case.hyperparameters, case.storage)
        stack = stack_of_given_gradients("float32", chunked=True)
        accumulation = "state" if case.micro_batches > 1 else None
        make = jax_frontend.make_release_step
        self.step = make(stack, tx, microbatches=case.micro_batches, accumulation=accumulation)
        layers = {name: jnp.stack([value] * len(FACTORS)) for name, value in case.initial_parameters().items()}
        self.state = jax_frontend.init_train_state(tx, {"outer": {}, "layers": layers})

    def update(self, gradients: Sequence[Mapping[str, np.ndarray]]) -> None:
        """A step takes the mean of micro-batches; their number is a power of two, which changes no digit of a gradient."""
        count = len(gradients)
        batch = {
            name: np.stack(
                [np.stack([np.asarray(count * factor * of[name], like.dtype) for factor in FACTORS]) for of in gradients]
            )
            for name, like in gradients[0].items()
        }
        self.state, _ = self.step(self.state, batch)

    def held(self) -> dict[str, HeldTensor]:
        import jax

        of_layer = jax.tree.map(lambda leaf: np.array(leaf)[MIDDLE], (self.state.params["layers"], self.state.opt_state.layers))
        return _held(self.case, *of_layer)

    def keys(self) -> dict[str, int]:
        return {name: key_of(name, MIDDLE) for name in self.state.params["layers"]}

    def steps_from_stored(self) -> bool:
        return False


def _held(case: CodingCase, parameters: Mapping[str, Any], state: Any) -> dict[str, HeldTensor]:
    found = {}
    for name, parameter in parameters.items():
        fields = {}
        for field in case.rule.fields:
            kept = state.fields[field.name][name]
            fields[field.name] = HeldField(*map(np.array, kept)) if isinstance(kept, tuple) else HeldField(np.array(kept))
        compensation = state.compensation[name] if case.storage.compensation not in ("none", "stochastic") else None
        found[name] = HeldTensor(np.array(parameter), None if compensation is None else np.array(compensation), fields)
    return found
