"""The ends of a route: a run in one framework that can be saved to a portable file and continued from one.

Every tensor of a case is there twice, as two layers that start from the same numbers. The first has the case's own gradients,
the other those times a factor. One side keeps its layers separate, another stacks them; in a file they are "layers.0.matrix",
"layers.1.matrix" and so on, whatever side has written it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...core.dtypes import compute_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.rules import Rule
from ..backends.jax_arguments import precision, stack_of_given_gradients, transform_of
from ..backends.protocol import Held
from ..backends.torch_arguments import held_of, optimizer_of, to_torch
from ..cases import Case, Storage

FACTORS = (1.0, -0.5)
"""By which the gradients of each layer are multiplied; powers of two, which round nothing."""

Gradients = Mapping[str, np.ndarray]


def layers_of(gradients: Gradients) -> list[dict[str, np.ndarray]]:
    """The gradients of each layer."""
    return [{name: np.asarray(g * g.dtype.type(factor)) for name, g in gradients.items()} for factor in FACTORS]


class Side(Protocol):
    """A run of one case."""

    def step(self, gradients: Gradients) -> None:
        """One update of both layers; the gradients are the first one's."""
        ...

    def save(self, path: Path) -> None:
        """Write everything to a file."""
        ...

    def load(self, path: Path) -> None:
        """Continue from a file."""
        ...

    def held(self) -> dict[str, Held]:
        """Return what it holds for "LAYER.TENSOR"."""
        ...


class TorchSide:
    """`penstock.torch_frontend` on the CPU: plain steps, or gradients released in the backward pass."""

    def __init__(self, case: Case, *, released: bool = False) -> None:
        import torch

        from ... import torch_frontend

        problem = case.problem
        start = problem.initial_parameters()
        self.model = torch.nn.Module()
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: torch.nn.Parameter(to_torch(value)) for name, value in start.items()})
            for _ in FACTORS
        )
        self.model.add_module("layers", self.layers)
        given = problem.hyperparameters
        self.optimizer = optimizer_of(problem.rule, self.model.parameters(), given, case.storage, backend="eager")
        if released:
            torch_frontend.release_gradients(self.model, self.optimizer)

    def step(self, gradients: Gradients) -> None:
        """The gradient of sum(p*g) is g."""
        import torch

        products = [
            (parameter * to_torch(gradient)).sum()
            for layer, of_layer in zip(self.layers, layers_of(gradients), strict=True)
            for parameter, gradient in ((layer.get_parameter(name), gradient) for name, gradient in of_layer.items())
        ]
        torch.stack(products).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        from ... import torch_frontend

        torch_frontend.export_state(path, self.optimizer, self.model, parameters=True)

    def load(self, path: Path) -> None:
        from ... import torch_frontend

        torch_frontend.import_state(path, self.optimizer, self.model, parameters=True)

    def held(self) -> dict[str, Held]:
        named = self.model.named_parameters()
        return held_of(self.optimizer, ((name.removeprefix("layers."), parameter) for name, parameter in named))


class JaxSide:
    """`penstock.jax_frontend` with separate layers, under `make_update`, or stacked, under `make_release_step`."""

    def __init__(self, case: Case, *, stacked: bool = False) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        problem = case.problem
        self.stacked, self.dtype = stacked, problem.dtype
        compute = compute_dtype(problem.dtype)
        self.tx, self.advance = _compiled(problem.rule, problem.hyperparameters, case.storage, stacked, compute)
        start = problem.initial_parameters()
        with precision(self.dtype):
            if stacked:
                layers: Any = {name: jnp.stack([value for _ in FACTORS]) for name, value in start.items()}
                params = {"outer": {}, "layers": layers}
            else:
                params = {"layers": [{name: jnp.array(value) for name, value in start.items()} for _ in FACTORS]}
            self.state = jax_frontend.init_train_state(self.tx, params)

    def step(self, gradients: Gradients) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        layers = layers_of(gradients)
        with precision(self.dtype):
            if self.stacked:
                self.state, _ = self.advance(
                    self.state, {name: np.stack([each[name] for each in layers]) for name in gradients}
                )
            else:
                given = {"layers": [{name: jnp.array(g) for name, g in each.items()} for each in layers]}
                params, opt_state = self.advance(given, self.state.opt_state, self.state.params)
                self.state = jax_frontend.TrainState(params, opt_state)

    def save(self, path: Path) -> None:
        from ... import jax_frontend

        with precision(self.dtype):
            jax_frontend.export_state(path, self.tx, self.state, parameters=True)

    def load(self, path: Path) -> None:
        from ... import jax_frontend

        with precision(self.dtype):
            self.state = jax_frontend.import_state(path, self.tx, self.state, parameters=True)

    def held(self) -> dict[str, Held]:
        params = self.state.params["layers"]
        state = self.state.opt_state.layers if self.stacked else self.state.opt_state
        trees = {"parameter": params, **state.fields, "compensation": state.compensation}

        def array(tree: Any, layer: int, name: str) -> Any:
            if self.stacked:
                return None if tree[name] is None else np.array(tree[name])[layer]
            found = (tree if isinstance(tree, list) else tree["layers"])[layer][name]
            return None if found is None else np.array(found)

        names = params if self.stacked else params[0]
        return {
            f"{layer}.{name}": Held(**{field: array(tree, layer, name) for field, tree in trees.items()})
            for layer in range(len(FACTORS))
            for name in names
        }


@functools.lru_cache(maxsize=64)
def _compiled(rule: Rule, given: Hyperparameters, storage: Storage, stacked: bool, dtype: str) -> tuple[Any, Any]:
    """The transform, and what makes a step with it; `dtype` is the compute dtype."""
    from ... import jax_frontend

    tx = transform_of(rule, given, storage)
    if not stacked:
        return tx, jax_frontend.make_update(tx)
    return tx, jax_frontend.make_release_step(stack_of_given_gradients(dtype), tx)
