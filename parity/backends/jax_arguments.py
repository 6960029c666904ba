"""Conversion of a case's settings and arrays to JAX and Optax, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...core.codings import StateDtypes
from ...core.hyperparameters import Hyperparameters
from ...core.rules import RULES, Rule
from ..cases import Case, Storage
from ..rules import decays_of
from ..settings import Schedule
from .protocol import Held, converted

FACTORS = (-0.5, 1.0, 0.25)
"""Of stacked layers: by which a case's gradients are multiplied, for each; those of `MIDDLE` are the case's own."""

MIDDLE = 1


def transform_name(rule: Rule) -> str:
    """Return the name by which users know a rule, of which settings may choose one of several rows."""
    return rule.name if rule.variant is None else next(each.name for each in RULES.values() if each.is_of_one_kind_with(rule))


def argument_name(hyperparameter: str) -> str:
    """Return the name of a hyperparameter in the JAX frontend."""
    from ...jax_frontend.arguments import NAMES

    return NAMES.get(hyperparameter, hyperparameter)


def transform_of(rule: Rule, given: Hyperparameters, storage: Storage, **scheduled: Any) -> Any:
    """Return the transform of a group; `scheduled` are arguments that a schedule replaces."""
    from ... import jax_frontend
    from ...jax_frontend.arguments import dtype_argument

    transform: Any = getattr(jax_frontend, transform_name(rule))
    arguments = {
        "learning_rate": given.learning_rate,
        **{argument_name(name): getattr(given, name) for name in rule.own_hyperparameters},
        "weight_decay": given.weight_decay,
        "compensation": storage.compensation,
    }
    if storage.state_dtype is not None:
        arguments |= {dtype_argument(field): storage.state_dtype for field in rule.fields}
    if given.decouple_lr:
        arguments |= {"decouple_lr": True, "max_lr": given.max_lr}
    return transform(**arguments | scheduled)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What determines the transform of a case: cases with equal recipes share compiled programs.

    groups, given: the names of the tensors of each group, and their hyperparameters before the schedule.
    """

    rule: Rule
    groups: tuple[tuple[str, ...], ...]
    given: tuple[Hyperparameters, ...]
    schedule: Schedule | None
    longest: int | None
    storage: Storage
    moments: StateDtypes | None = None  # where betas change: with b2 unknown, the default of the second moment would be float32

    @classmethod
    def of(cls, case: Case) -> Recipe:
        """The recipe of a case."""
        problem, setting = case.problem, case.problem.setting
        longest = None if setting.schedule is None else setting.longest
        moments = case.storage.moments(problem) if problem.changes_betas else None
        given = problem.group_hyperparameters()
        return cls(problem.rule, setting.groups, given, setting.schedule, longest, case.storage, moments)

    def transform(self) -> Any:
        """One transform, or `optax.multi_transform` of one for each group."""
        import optax

        made = [self._of_group(number) for number in range(len(self.groups))]
        if len(made) == 1:
            return made[0]
        label = {name: str(number) for number, names in enumerate(self.groups) for name in names}
        of_groups: dict[Any, Any] = {str(number): each for number, each in enumerate(made)}
        return optax.multi_transform(of_groups, lambda params: {name: label[name] for name in params})

    def _of_group(self, number: int) -> Any:
        given, schedule, scheduled = self.given[number], self.schedule, {}
        if schedule is not None:
            scheduled["learning_rate"] = self._table(given.learning_rate, schedule.learning_rate)
            if schedule.decay_rises:
                scheduled["weight_decay"] = self._table(given.weight_decay, schedule.weight_decay)
        if self.moments is None:
            return transform_of(self.rule, given, self.storage, **scheduled)
        return self._with_betas(given, **scheduled)

    def _with_betas(self, given: Hyperparameters, **scheduled: Any) -> Any:
        import jax.numpy as jnp
        import optax

        from ...jax_frontend.arguments import dtype_argument

        assert self.schedule is not None
        assert self.moments is not None
        schedule, names = self.schedule, {argument_name(name): name for name in decays_of(given)}
        dtypes = {dtype_argument(field): dtype for field, dtype in zip(self.rule.fields, self.moments, strict=True)}

        def make(**betas: Any) -> Any:
            return transform_of(self.rule, given, self.storage, **betas, **dtypes, **scheduled)

        by_name = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        make.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
        injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)
        tables = {
            argument: self._table(1.0, lambda step, name=name: schedule.betas(step, given)[name])  # type: ignore[misc]
            for argument, name in names.items()
        }
        return injected(**tables)

    def _table(self, highest: float, factor: Callable[[int], float]) -> Callable[[Any], Any]:
        """A schedule of Optax, a function of the 0-based count; looked up, so that its numbers are rounded just once."""
        import jax.numpy as jnp

        assert self.longest is not None
        values = np.array([highest * factor(step) for step in range(1, self.longest + 1)])
        return lambda count: jnp.asarray(values)[count]


def arrays_of(parameters: Mapping[str, Any], state: Any) -> dict[str, dict[str, Any]]:
    """Return JAX arrays of parameters and transform state, by tensor, then by field of `Held`."""
    found: dict[str, dict[str, Any]] = {}
    for node in _rule_states(state):
        for name in parameters:
            trees = {**node.fields, **({} if node.compensation is None else {"compensation": node.compensation})}
            arrays = {field: tree[name] for field, tree in trees.items() if name in tree}
            if any(hasattr(array, "dtype") for array in arrays.values()):  # the others are masked: another group's
                found[name] = arrays
    return {name: {"parameter": parameter, **found.get(name, {})} for name, parameter in parameters.items()}


def held_of(parameters: Mapping[str, Any], state: Any) -> dict[str, Held]:
    """Return `arrays_of` as numpy arrays."""
    return {name: converted(arrays, np.array) for name, arrays in arrays_of(parameters, state).items()}


def _rule_states(state: Any) -> Iterator[Any]:
    """The states of penstock's transforms: one alone or inside a chain, or one for each group, where others are masked."""
    if hasattr(state, "fields"):
        yield state
    elif isinstance(state, tuple | dict):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _rule_states(part)


def precision(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Enable 64-bit arrays in this context if parameters are float64."""
    return float64() if dtype == "float64" else contextlib.nullcontext()


def product(parameters: Mapping[str, Any], gradients: Mapping[str, Any], dtype: str) -> Any:
    """sum(p*g) in `dtype`: its gradient with respect to p is g, to the bit."""
    import jax.numpy as jnp

    return sum(jnp.sum(p.astype(dtype) * gradients[name].astype(dtype)) for name, p in parameters.items())


def stack_of_given_gradients(dtype: str, *, chunked: bool = False) -> Any:
    """A `LayerStack` of layers whose gradients are the batch, (layers, ...) by name; `dtype` is the compute dtype.

    chunked: in micro-batches, (micro-batches, layers, ...).
    """
    import jax.numpy as jnp

    from ... import jax_frontend

    def inputs(batch: Any) -> Any:
        return {name: given[0] for name, given in batch.items()} if chunked else batch

    return jax_frontend.LayerStack(
        lambda outer, batch: jnp.zeros((), dtype),
        jax_frontend.Layers(lambda params, x, given: x + product(params, given, dtype), inputs=inputs),
        loss=lambda outer, x, batch: x,
    )


def float64() -> contextlib.AbstractContextManager[Any]:
    """Enable 64-bit arrays in this context. In older versions of JAX the function is experimental."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax import experimental

    older: Any = experimental
    return older.enable_x64(True)
