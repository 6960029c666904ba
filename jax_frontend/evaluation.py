"""Numbers of a computation while another one is traced, without what the computation does on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core as jaxpr_types

_PRINTS = frozenset(("debug_callback", "debug_print"))


def evaluate(function: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """Return the leaves of function(*args) as numbers, inside of traced functions and under jax.disable_jit() too.

    The arguments are stand-ins, and the result is not the user's: what the function prints or logs (jax.debug.print,
    jax.debug.callback) is left out, and in place of what it gets from the host (io_callback) are zeros.

    Args:
        function: of arrays.
        args: trees of concrete arrays.
    """
    with jax.disable_jit(False):
        silent = jaxpr_types.jaxpr_as_fun(_silenced(jax.make_jaxpr(function)(*args)))
        # Compiled first: a call of the compiled function is not traced.
        leaves = jax.tree.leaves(args)
        return [np.asarray(leaf) for leaf in jax.jit(silent).lower(*leaves).compile()(*leaves)]


def _silenced(found: Any) -> Any:
    """Return a jaxpr, or what else is a parameter of an equation, without prints, and with zeros for io_callback."""
    if type(found) is tuple:  # the branches of lax.cond
        return tuple(map(_silenced, found))
    if isinstance(found, jaxpr_types.Jaxpr):  # from JAX 0.11 on a closed one, too, which is its own jaxpr
        return found.replace(eqns=[_quiet(each) for each in found.eqns if each.primitive.name not in _PRINTS])
    if isinstance(found, jaxpr_types.ClosedJaxpr):
        return found.replace(jaxpr=_silenced(found.jaxpr))
    return found


def _quiet(equation: jaxpr_types.JaxprEqn) -> jaxpr_types.JaxprEqn:
    parameters = {name: _silenced(value) for name, value in equation.params.items()}
    if equation.primitive.name == "io_callback":
        kinds: list[Any] = [variable.aval for variable in equation.outvars]
        parameters["callback"] = lambda *_: [np.zeros(kind.shape, kind.dtype) for kind in kinds]
    return equation.replace(params=parameters)
