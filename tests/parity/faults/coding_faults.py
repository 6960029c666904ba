"""Faults in the codings: what rounds otherwise, and random bits that are those of something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from penstock.core import codings, compensation, random_bits
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.codings import eight_bit
from penstock.torch_frontend.backends.random_words import Randomness

from .injection import Fault, Wrong, tampered

COMPACT, SMALL, IN_STATE = (
    f"codings/adamw/bfloat16/{storage}"
    for storage in ("split8/state-8bit", "stochastic/state-bfloat16", "stochastic/state-8bit/in-state")
)
LARGE = "codings/lion/bfloat16/stochastic/state-8bit"
"""Of more than 2^16 elements."""


def replaced(where: Any, name: str, wrong: Callable[..., Any]) -> Wrong:
    """Runs during whose updates a function of the library is another one; `wrong` is given the right one first."""
    right = getattr(where, name)

    def update(run: Any, correct: Callable[[Any], None], gradients: Any) -> None:
        with mock.patch.object(where, name, lambda *args, **more: wrong(right, *args, **more)):
            correct(gradients)

    return tampered(update=update)


def to_nearest(right: Any, ops: Any, z: Any, bits: Any) -> Any:
    return ops.xp.round(ops.xp.sqrt(ops.xp.sqrt(z)))


def by_roots(right: Any, ops: Any, z: Any, bits: Any) -> Any:
    """By chance, so that the mean of the root is right."""
    y = ops.xp.sqrt(ops.xp.sqrt(z))
    return ops.xp.floor(y) + ops.cast(ops.cast(bits >> 8, "float32") * 2.0**-24 < y - ops.xp.floor(y), "float32")


def below_the_first_code(right: Any, ops: Any, x: Any, like: Any, bits: Any) -> Any:
    """Means of squares that are too small for a code are 0."""
    found = right(ops, x, like, bits)
    if bits is None:
        return found
    return found._replace(codes=ops.cast(ops.xp.where(found.codes == 1, 0, found.codes), "uint8"))


def scale_in_bfloat16(right: Any, self: Any, x: Any) -> Any:
    return right(self, x).astype(numpy_dtype("bfloat16")).astype(np.float32)


def cast(right: Any, ops: Any, x: Any, dtype: str, bits: Any) -> Any:
    return ops.cast(ops.cast(x, dtype), "float32")


def halves(right: Any, self: Any, out: Any, first: int) -> Any:
    """As if every number came to lie in the middle of two."""
    return out.zero_()


def from_the_first(right: Any, self: Any, out: Any, first: int) -> Any:
    """In pieces of 2^15 elements, each with the bits of the first."""
    for start in range(0, out.numel(), 2**15):
        right(self, out[start : start + 2**15], 0)
    return out


def low_bits_cut(right: Any, ops: Any, x: Any, count: int, bits: Any) -> Any:
    return right(ops, x, count, bits * 0)


def when(**fixed: int) -> Callable[..., Any]:
    """Random bits that do not depend on something."""

    def wrong(right: Any, update: Any, field: Any = 0, microbatch: Any = 0) -> Any:
        return right(**{"update": update, "field": field, "microbatch": microbatch, **fixed})

    return wrong


def summed(run: Any, correct: Callable[[Any], None], gradients: Any) -> None:
    """As if codes of 8 bits took micro-batches one by one exactly: their sum."""
    correct([{name: sum(given[name] for given in gradients) for name in gradients[0]}])


FAULTS = [
    Fault("second moments rounded to nearest", COMPACT, "numpy", replaced(eight_bit, "_rounded_squares", to_nearest)),
    Fault("roots rounded by chance", COMPACT, "numpy", replaced(eight_bit, "_rounded_squares", by_roots)),
    Fault("roots rounded by chance", COMPACT, "jax", replaced(eight_bit, "_rounded_squares", by_roots)),
    Fault("code 0 for a small second moment", COMPACT, "numpy", replaced(codings, "encoded", below_the_first_code)),
    Fault("a scale in bfloat16", COMPACT, "numpy", replaced(type(numpy_ops), "largest", scale_in_bfloat16)),
    Fault("a remainder that is cut off", COMPACT, "numpy", replaced(compensation, "without_low_bits", low_bits_cut)),
    Fault("everything rounded to nearest", COMPACT, "eager", replaced(Randomness, "fill", halves)),
    Fault("parameters rounded to nearest", SMALL, "numpy", replaced(compensation, "stochastically_rounded", cast)),
    Fault("parameters rounded to nearest", SMALL, "jax", replaced(compensation, "stochastically_rounded", cast)),
    Fault("everything rounded to nearest", SMALL, "eager", replaced(Randomness, "fill", halves)),
    Fault("bits without the update", SMALL, "numpy", replaced(random_bits, "when", when(update=1))),
    Fault("bits without the field", SMALL, "numpy", replaced(random_bits, "when", when(field=0))),
    Fault("bits without the field", SMALL, "eager", replaced(random_bits, "when", when(field=0))),
    Fault("bits without the micro-batch", IN_STATE, "numpy", replaced(random_bits, "when", when(microbatch=0))),
    Fault("bits without the micro-batch", IN_STATE, "eager", replaced(random_bits, "when", when(microbatch=0))),
    Fault(
        "one key for all tensors",
        SMALL,
        "eager",
        replaced(random_bits, "tensor_key", lambda right, seed, name: right(seed, "")),
    ),
    Fault(
        "bits by the place in a piece",
        LARGE,
        "numpy",
        replaced(random_bits, "stream", lambda right, place, high: right(place, 0 * high)),
    ),
    Fault("bits by the place in a piece", LARGE, "eager", replaced(Randomness, "fill", from_the_first)),
    Fault("micro-batches added up beforehand", IN_STATE, "numpy", tampered(update=summed)),
    Fault("micro-batches added up beforehand", IN_STATE, "eager", tampered(update=summed)),
]
