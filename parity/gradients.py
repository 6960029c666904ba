"""The gradients of the settings, and the parameters they begin with: seeded, and rounded to the dtype of the case."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType

import numpy as np

from ..core.array_ops import numpy_dtype

SEED = 20240229
SPIKE_EVERY = 61  # steps; noisy gradients are then ...
SPIKE = 30.0  # ... times their usual size, so that StableAdamW clips

NONFINITE_AT = 3  # the step
NONFINITE = ((7, np.nan), (-9, np.inf), (510, -np.inf))
"""Places among the elements of a case, and the values there at step `NONFINITE_AT`. Of the odd shapes, the first lies in
the vector, the second in the cube, the third is the tensor of one element; the scalar stays clean."""

SMALLEST_NORMAL = MappingProxyType({"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14})
LARGEST = MappingProxyType({"float64": 2.0**132, "float32": 2.0**50, "bfloat16": 2.0**50, "float16": 0.9 * 2.0**15.9})
"""Up to these, gradients enter the moments as they are (`core.rules.adam_family.LARGEST`); in float64 the bounds need room."""


def noise(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Normal with a drift, of scales 1e-4 to 1, with spikes."""
    values = generator.standard_normal(shape)
    values += 0.3  # a drift, so that parameters move
    values *= np.exp(generator.uniform(np.log(1e-4), 0.0, shape[1]))  # the square of 1e-4 is zero in float16
    values[SPIKE_EVERY - 1 :: SPIKE_EVERY] *= SPIKE
    return values


def spiked(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Noise for a few steps, of which the last is a spike."""
    values = noise(generator, shape, dtype)
    values[-1] *= SPIKE
    return values


def vanishing(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Of about 1e-12, so that only the decay is left."""
    return 1e-12 * generator.standard_normal(shape)


def constant(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """The same at every step; of magnitudes 1e-4 to 1. m/(sqrt(v)+eps) is then the sign, at every step."""
    first = np.exp(generator.uniform(np.log(1e-4), 0.0, shape[1])) * generator.choice([-1.0, 1.0], shape[1])
    return np.broadcast_to(first, shape)


def denormal(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Around and below the smallest normal number of the dtype, where squares underflow in float32; or below its root."""
    values = SMALLEST_NORMAL[dtype] * np.exp2(generator.uniform(-9.0, 3.0, shape)) * generator.choice([-1.0, 1.0], shape)
    values[:, ::2] *= SMALLEST_NORMAL[dtype] ** -0.5 / 4.0  # so that the mean of every second square is in this range
    return values


def huge(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Up to where the update bounds them."""
    return LARGEST[dtype] * np.exp2(generator.uniform(-20.0, 0.0, shape)) * generator.choice([-1.0, 1.0], shape)


def nonfinite(generator: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Noise, and `NONFINITE` at one step."""
    values = noise(generator, shape, dtype)
    for place, value in NONFINITE:
        values[NONFINITE_AT - 1, place] = value
    return values


KINDS: MappingProxyType[str, Callable[[np.random.Generator, tuple[int, int], str], np.ndarray]] = MappingProxyType(
    {kind.__name__: kind for kind in (noise, spiked, vanishing, constant, denormal, huge, nonfinite)}
)
"""By name: from a generator, (steps, elements) and the dtype of the case to its gradients, not rounded yet."""


@functools.lru_cache(maxsize=2)
def gradients(kind: str, steps: int, count: int, dtype: str) -> np.ndarray:
    """All gradients of a case, (steps, elements), rounded to `dtype`; read-only, as all backends are given the same."""
    values = KINDS[kind](np.random.default_rng(SEED + 1), (steps, count), dtype).astype(numpy_dtype(dtype))
    values.flags.writeable = False
    return values


def parameters(kind: str, count: int, dtype: str) -> np.ndarray:
    """The parameters that go with gradients of a kind, before the first step: 1.0, or of magnitudes 0.5 to 2; (elements,)."""
    if kind == "vanishing":
        return np.ones(count, numpy_dtype(dtype))
    generator = np.random.default_rng(SEED)
    values = np.exp2(generator.uniform(-1.0, 1.0, count)) * generator.choice([-1.0, 1.0], count)
    return values.astype(numpy_dtype(dtype))
