"""Data flow in a traced computation: the inputs that its outputs depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """Return for every output of a jaxpr the marks of all inputs that it depends on.

    Args:
        jaxpr: with constants unmarked.
        given: the marks of the inputs.
    """
    marks: dict[Any, Marks] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> Marks:
        return 0 if isinstance(atom, jaxpr_types.Literal) else marks.get(atom, 0)

    for equation in jaxpr.eqns:
        marks.update(zip(equation.outvars, _through(equation, [of(atom) for atom in equation.invars]), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _union(marks: Iterable[Marks]) -> Marks:
    union = 0
    for each in marks:
        union |= each
    return union


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, jaxpr_types.ClosedJaxpr) else jaxpr


def _through(equation: jaxpr_types.JaxprEqn, given: list[Marks]) -> list[Marks]:
    """Return the marks of an equation's outputs; those of an unknown primitive depend on all its operands."""
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        kinds = (jaxpr_types.Jaxpr, jaxpr_types.ClosedJaxpr)
        inner = [_open(value) for value in parameters.values() if isinstance(value, kinds)]
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            return flow(inner[0], given)
    if name == "cond":
        predicate, *operands = given
        branches = [flow(_open(branch), operands) for branch in parameters["branches"]]
        return [_union((predicate, *marks)) for marks in zip(*branches, strict=True)]
    if name == "scan":
        constants, carried = parameters["num_consts"], parameters["num_carry"]
        return _looped(
            lambda carry: flow(_open(parameters["jaxpr"]), [*given[:constants], *carry, *given[constants + carried :]]),
            given[constants : constants + carried],
        )
    if name == "while":
        constants, body_constants = parameters["cond_nconsts"], parameters["body_nconsts"]
        split = constants + body_constants

        def body(carry: list[Marks]) -> list[Marks]:
            (condition,) = flow(_open(parameters["cond_jaxpr"]), [*given[:constants], *carry])
            return [condition | each for each in flow(_open(parameters["body_jaxpr"]), [*given[constants:split], *carry])]

        return _looped(body, given[split:])
    if name == "optimization_barrier":
        return given
    return [_union(given)] * len(equation.outvars)


def _looped(body: Callable[[list[Marks]], list[Marks]], carry: list[Marks]) -> list[Marks]:
    """Return the marks of a loop's outputs after any number of rounds: those of the first carry to which a round adds none."""
    while True:
        out = body(carry)
        grown = [before | after for before, after in zip(carry, out, strict=False)]
        if grown == carry:
            return [*grown, *out[len(carry) :]]
        carry = grown
