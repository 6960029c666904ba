"""flow: which inputs of a traced computation its outputs depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from penstock.jax_frontend.dependencies import flow


def marks_of(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*[jnp.ones(shape) for shape in shapes]).jaxpr
    return flow(jaxpr, [1 << index for index in range(len(shapes))])


def test_dependencies_are_followed_through_control_flow() -> None:
    def rotated(a, b, c):
        return lax.fori_loop(0, 5, lambda _, carry: (carry[1], carry[0], carry[2] + 1), (a, b, c))

    assert marks_of(rotated, (), (), ()) == [0b011, 0b011, 0b100]

    def scanned(a, b, xs):
        return lax.scan(lambda carry, x: ((carry[0] + x, carry[1]), carry[1] * 2), (a, b), xs)

    assert marks_of(scanned, (), (), (4,)) == [0b101, 0b010, 0b010]

    def chosen(which, a, b):
        return lax.cond(which > 0, lambda: (a, b), lambda: (a * 2, b + 1))

    assert marks_of(chosen, (), (), ()) == [0b011, 0b101]

    def repeated(limit, a, b):
        return lax.while_loop(lambda carry: carry[0] < limit, lambda carry: (carry[0] + 1, carry[1] * 2), (a, b))

    assert marks_of(repeated, (), (), ()) == [0b011, 0b111]

    if hasattr(jax, "new_ref"):

        def referred(a, b, c):
            written, read = jax.new_ref(a), jax.new_ref(a)
            lax.fori_loop(0, 3, lambda i, x: (written.__setitem__(..., x * 2), x + read[...] * b)[1], c)
            return written[...], read[...]

        assert marks_of(referred, (), (), ()) == [0b111, 0b001]

    def called(a, b):
        return jax.jit(lambda x, y: (jax.nn.relu(x), jax.checkpoint(jnp.sin)(y)))(a, b)

    assert marks_of(called, (), ()) == [0b01, 0b10]
