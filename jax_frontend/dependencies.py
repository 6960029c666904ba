"""Data flow in a traced computation: the inputs that its outputs depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core as jaxpr_types

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"),
    )
)
"""Primitives whose operands and results are those of the one jaxpr in their parameters."""

Marks = int
"""A set of inputs as bits; the caller gives each input its bits."""


def flow(jaxpr: jaxpr_types.Jaxpr, given: Sequence[Marks]) -> list[Marks]:
    """Return for every output of a jaxpr the marks of all inputs that it depends on, through references, too.

    Args:
        jaxpr: with constants unmarked.
        given: the marks of the inputs.
    """
    return _flow(jaxpr, given)[0]


def _flow(jaxpr: jaxpr_types.Jaxpr, given: Sequence[Marks]) -> tuple[list[Marks], list[Marks]]:
    """Return the marks of the outputs, and those of the inputs at the end: only those of references change."""
    marks: dict[Any, Marks] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> Marks:
        return 0 if isinstance(atom, jaxpr_types.Literal) else marks.get(atom, 0)

    for equation in jaxpr.eqns:
        outputs, inputs = _through(equation, [of(atom) for atom in equation.invars])
        marks.update(zip(equation.outvars, outputs, strict=True))
        for atom, after in zip(equation.invars, inputs, strict=True):
            if not isinstance(atom, jaxpr_types.Literal):
                marks[atom] = of(atom) | after
    return [of(atom) for atom in jaxpr.outvars], [of(atom) for atom in jaxpr.invars]


def _union(marks: Iterable[Marks]) -> Marks:
    union = 0
    for each in marks:
        union |= each
    return union


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, jaxpr_types.ClosedJaxpr) else jaxpr


def _sizes_of_scan(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values."""
    if "ft_in" in parameters:  # from JAX 0.11 on: a tree of each
        constants, carried, _ = (len(list(part)) for part in parameters["ft_in"].unpack())
        return constants, carried
    return parameters["num_consts"], parameters["num_carry"]


def _through(equation: jaxpr_types.JaxprEqn, given: list[Marks]) -> tuple[list[Marks], list[Marks]]:
    """Return the marks of an equation's outputs, and those of its operands afterwards.

    The outputs of an unknown primitive, and the references that it is given, depend on all its operands.
    """
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        kinds = (jaxpr_types.Jaxpr, jaxpr_types.ClosedJaxpr)
        inner = [_open(value) for value in parameters.values() if isinstance(value, kinds)]
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            return _flow(inner[0], given)
    if name == "cond":
        predicate, *operands = given
        branches = [_flow(_open(branch), operands) for branch in parameters["branches"]]
        outputs = [_union((predicate, *marks)) for marks in zip(*(out for out, _ in branches), strict=True)]
        after = [_union(marks) for marks in zip(*(written for _, written in branches), strict=True)]
        return outputs, [predicate, *(new if new == old else new | predicate for old, new in zip(operands, after, strict=True))]
    if name == "scan":
        constants, carried = _sizes_of_scan(parameters)
        split = constants + carried

        def iteration(state: list[Marks]) -> tuple[list[Marks], list[Marks]]:
            outputs, inputs = _flow(_open(parameters["jaxpr"]), [*state, *given[split:]])
            return [*inputs[:constants], *outputs[:carried]], outputs[carried:]

        state, ys = _looped(iteration, given[:split])
        return [*state[constants:], *ys], [*state[:constants], *given[constants:]]
    if name == "while":
        constants, body_constants = parameters["cond_nconsts"], parameters["body_nconsts"]
        split = constants + body_constants

        def body(state: list[Marks]) -> tuple[list[Marks], list[Marks]]:
            (condition,), _ = _flow(_open(parameters["cond_jaxpr"]), [*given[:constants], *state[body_constants:]])
            outputs, inputs = _flow(_open(parameters["body_jaxpr"]), state)
            written = [new if new == old else new | condition for old, new in zip(state, inputs, strict=True)]
            return [*written[:body_constants], *(condition | each for each in outputs)], []

        state, _ = _looped(body, given[constants:])
        return state[body_constants:], [*given[:constants], *state[:body_constants], *given[split:]]
    if name == "optimization_barrier":
        return given, given
    union = _union(given)
    is_reference = [hasattr(atom.aval, "inner_aval") and name != "get" for atom in equation.invars]
    return [union] * len(equation.outvars), [union if each else old for each, old in zip(is_reference, given, strict=True)]


def _looped(
    body: Callable[[list[Marks]], tuple[list[Marks], list[Marks]]], state: list[Marks]
) -> tuple[list[Marks], list[Marks]]:
    """Return what `body` returns, (state, other outputs), from the first state on to which a round adds nothing."""
    while True:
        new, others = body(state)
        grown = [before | after for before, after in zip(state, new, strict=True)]
        if grown == state:
            return grown, others
        state = grown
