"""`optax_transform`: registers a gradient transformation as a backend, from a function that makes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...core.errors import InvalidArgumentError
from ...core.hyperparameters import Hyperparameters
from ..cases import Case
from .declaration import Declaration, check
from .jax_arguments import precision
from .protocol import Held

Make = Callable[[Hyperparameters], Any]
Groups = tuple[tuple[tuple[str, ...], Hyperparameters], ...]


@functools.lru_cache(maxsize=64)  # cases that differ in their gradients only share what is compiled
def _transform_and_update(make: Make, groups: Groups, scheduled: bool) -> tuple[Any, Any]:
    """The transform of all tensors, and its jitted (gradients, state, parameters, scalars) -> (parameters, state)."""
    import jax
    import optax

    labels = {name: str(number) for number, (names, _) in enumerate(groups) for name in names}

    def transform(hyperparameters: list[Hyperparameters]) -> Any:
        if len(groups) == 1:
            return make(hyperparameters[0])
        return optax.multi_transform({str(number): make(given) for number, given in enumerate(hyperparameters)}, labels)

    given = [hyperparameters for _, hyperparameters in groups]

    def update(gradients: Any, state: Any, parameters: Any, scalars: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        now = given
        if scheduled:
            now = [
                dataclasses.replace(hyperparameters, learning_rate=learning_rate, weight_decay=weight_decay)
                for hyperparameters, (learning_rate, weight_decay) in zip(given, scalars, strict=True)
            ]
        updates, state = transform(now).update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return transform(given), jax.jit(update)


class TransformRun:
    """A transform and its jitted update."""

    def __init__(self, case: Case, make: Make) -> None:
        import jax.numpy as jnp

        problem = case.problem
        self.problem, self.count = problem, 0
        start = problem.initial_parameters()
        members: dict[Hyperparameters, list[str]] = {}
        for name, given in problem.hyperparameters_at(1).items():
            members.setdefault(given, []).append(name)
        groups = tuple((tuple(names), given) for given, names in members.items())
        self.leaders = [names[0] for names, _ in groups]
        tx, self.update = _transform_and_update(make, groups, "schedules" in problem.needs)
        with precision(self.problem.dtype):
            self.parameters = {name: jnp.array(value) for name, value in start.items()}
            self.state = tx.init(self.parameters)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        import jax.numpy as jnp

        self.count += 1
        now = self.problem.hyperparameters_at(self.count)
        # Python numbers, which do not promote bfloat16 as float32 scalars would
        scalars = [(float(now[name].learning_rate), float(now[name].weight_decay)) for name in self.leaders]
        with precision(self.problem.dtype):
            given = {name: jnp.array(gradient) for name, gradient in gradients.items()}
            self.parameters, self.state = self.update(given, self.state, self.parameters, scalars)

    def held(self) -> dict[str, Held]:
        return {name: Held(np.array(parameter)) for name, parameter in self.parameters.items()}


class TransformBackend(Declaration):
    """The backend that `optax_transform` registers."""

    flushes_subnormals = True  # XLA does, on a CPU

    def __init__(self, make: Mapping[str, Make], **declared: Any) -> None:
        super().__init__(rules=make, **declared)
        self._make = make

    def start(self, case: Case) -> TransformRun:
        return TransformRun(case, self._make[case.problem.rule.name])


def optax_transform(
    name: str,
    make: Mapping[str, Make],
    dtypes: Iterable[str] = ("float32",),
    *,
    requires: Collection[str] = ("jax", "optax"),
    abilities: Collection[str] = ("schedules", "groups"),
    peer: bool = False,
) -> TransformBackend:
    """Return a gradient transformation as a backend, for `register`. `optax.apply_updates` applies its jitted updates.

        register(
            optax_transform(
                "mine",
                {"adamw": lambda h: my_adamw(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps, weight_decay=h.weight_decay)},
            )
        )

    Args:
        name: as ``--backend`` takes it.
        make: by the name of the rule that it obeys ("adamw", "lion", "sgd_momentum"), a function hyperparameters ->
            transformation. In cases with a schedule it is called inside jit, with tracers for `learning_rate` and
            `weight_decay`; where tensors have different hyperparameters its transforms go into `optax.multi_transform`.
        dtypes: of the parameters that it can update.
        requires, abilities, peer: as for `torch_optimizer`.

    Raises:
        InvalidArgumentError: an unknown rule or dtype, or a compensation.
    """
    compensations = check(name, make, dtypes)
    if set(compensations.values()) != {"none"}:
        raise InvalidArgumentError(
            f"dtypes of {name!r}: a transform keeps no compensation that the suite could read; give a list."
        )
    return TransformBackend(
        dict(make), name=name, compensations=compensations, requires=requires, abilities=abilities, peer=peer
    )
