"""Stochastically rounded parameters: steps far below a spacing are right in the mean, and a step of zero changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core import random_bits
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.codings import state_dtypes
from penstock.core.rules import ADAMW, LION
from penstock.core.rules.adam_family import AdamHyperparameters
from penstock.core.rules.lion import LionHyperparameters
from penstock.core.update import init_state, update

SPACINGS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Of the numbers in [1, 2)."""


def mean_step(dtype: str, part_of_a_spacing: float, seed: int, *, elements: int = 256, updates: int = 100) -> float:
    """The mean distance that an update moves an element, in steps; Lion's are of the size lr."""
    lr, rule = part_of_a_spacing * SPACINGS[dtype], LION
    current = LionHyperparameters(learning_rate=lr, beta1=0.9, beta2=0.99, weight_decay=0.0)
    parameter = np.linspace(1.5, 1.9, elements).astype(numpy_dtype(dtype))  # it stays within [1, 2)
    start, gradient = parameter.astype(np.float64), np.ones(elements, np.float32)
    state = init_state(numpy_ops, LION, parameter, ("float32",), "stochastic")
    key = random_bits.tensor_key(seed, "w")
    for step in range(1, updates + 1):
        words = random_bits.bits_at(random_bits.place(key, random_bits.when(step)), np.arange(elements))
        corrections = rule.corrections(current, step, np)
        given = (current, corrections, "stochastic", parameter, gradient, state)
        parameter, state = update(numpy_ops, rule, *given, bits=[words, None].__getitem__)
    return float(np.mean(start - parameter.astype(np.float64))) / (updates * lr)


@pytest.mark.parametrize("part", [1 / 4, 1 / 16, 1 / 64, 1 / 256])
@pytest.mark.parametrize("dtype", SPACINGS)
def test_the_mean_step_is_unbiased(dtype: str, part: float) -> None:
    """An update moves an element by a spacing with probability step/spacing, so that the mean of N has the relative standard
    deviation sqrt(spacing/(N step)), a little less; four of them are allowed for each of ten seeds, and for their mean.
    """
    elements, updates = 256, 100
    deviation = (1 / (elements * updates * part)) ** 0.5
    found = np.array([mean_step(dtype, part, seed, elements=elements, updates=updates) for seed in range(10)])
    assert np.abs(found - 1).max() < 4 * deviation
    assert abs(found.mean() - 1) < 4 * deviation / 10**0.5


@pytest.mark.parametrize("dtype", SPACINGS)
def test_a_learning_rate_of_zero_freezes_every_bit(dtype: str) -> None:
    current = AdamHyperparameters(learning_rate=0.0, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8)
    patterns = np.delete(np.arange(2**16, dtype=np.uint16), 0x8000)  # -0.0 + 0.0 is 0.0 in every dtype
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
    parameter = patterns[(patterns & 0x7FFF) < infinity].view(numpy_dtype(dtype))
    start, rng = parameter.copy(), np.random.default_rng(0)
    state = init_state(numpy_ops, ADAMW, parameter, state_dtypes(ADAMW.fields, dtype, (0.9, 0.999)), "stochastic")
    for step in range(1, 4):
        gradient = rng.normal(size=parameter.shape).astype(np.float32)
        words = rng.integers(0, 2**32, parameter.shape)
        corrections = ADAMW.corrections(current, step, np)
        given = (current, corrections, "stochastic", parameter, gradient, state)
        parameter, state = update(numpy_ops, ADAMW, *given, bits=[words, None, None].__getitem__)
    assert np.array_equal(parameter.view(np.uint16), start.view(np.uint16))
