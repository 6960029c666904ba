"""A bad value raises an error that names the argument, the value and the range."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.core.codings import state_dtypes
from penstock.core.dtypes import check_parameter_dtype, compute_dtype
from penstock.core.errors import InvalidArgumentError, UnsupportedTensorError
from penstock.core.rules import ADAM, RANGER
from penstock.core.rules.adam_family import AdamHyperparameters

GOOD = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.01}
BAD = [
    ("learning_rate", -1e-3, r"\[0, inf\)"),
    ("learning_rate", float("nan"), r"\[0, inf\)"),
    ("learning_rate", float("inf"), r"\[0, inf\)"),
    ("learning_rate", "1e-3", "not a number"),
    ("learning_rate", None, "not a number"),
    ("beta1", 1.0, r"\[0, 1\)"),
    ("beta1", -0.1, r"\[0, 1\)"),
    ("beta2", 1.5, r"\[0, 1\)"),
    ("eps", 0.0, r"\(0, inf\)"),
    ("eps", -1e-8, r"\(0, inf\)"),
    ("weight_decay", -0.1, r"\[0, inf\)"),
    ("weight_decay", True, "not a number"),
    ("max_lr", 0.0, r"\(0, inf\)"),
]


@pytest.mark.parametrize(("field", "value", "said"), BAD)
def test_a_bad_value_names_itself(field: str, value: object, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"spelled={value!r}.*{said}"):
        AdamHyperparameters(**{**GOOD, "decouple_lr": True, "max_lr": 1.0, field: value}, names={field: "spelled"})


def test_it_is_frozen_and_lets_arrays_through() -> None:
    good = AdamHyperparameters(**{**GOOD, "learning_rate": np.float32(0.1)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        good.eps = 1.0  # type: ignore[misc]
    AdamHyperparameters(**{**GOOD, "learning_rate": np.array(-1.0)})  # an array may be on a device: it is not looked into


def test_fully_decoupled_decay() -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_lr=None.*decouple_lr=True"):
        AdamHyperparameters(**GOOD, decouple_lr=True)
    full = AdamHyperparameters(**GOOD, decouple_lr=True, max_lr=0.1)
    assert full.decay_rate == pytest.approx(0.1)
    assert full.fully_decoupled_decay_is_high
    assert not AdamHyperparameters(**GOOD).fully_decoupled_decay_is_high


def moments(parameter: str, beta2: object, *asked: str) -> tuple[str, ...]:
    """The dtypes of Adam's moments."""
    return state_dtypes(ADAM.fields, parameter, (0.9, beta2), asked)


def test_state_dtypes_follow_the_parameter_where_they_can() -> None:
    assert moments("float32", 0.999) == ("float32", "float32")
    assert moments("float64", 0.999) == ("float64", "float64")
    assert moments("bfloat16", 0.99) == ("bfloat16", "bfloat16")
    assert moments("bfloat16", 0.999) == ("bfloat16", "float32")
    assert moments("bfloat16", 1 - 2.0**-7) == ("bfloat16", "bfloat16")
    assert moments("bfloat16", np.array(0.5)) == ("bfloat16", "float32")  # not known yet
    assert moments("float16", 0.5) == ("float16", "float32")
    assert moments("float32", 0.99, "bfloat16", "bfloat16") == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("parameter", "asked", "expected"),
    [
        ("float32", "8bit", "float32"),
        ("bfloat16", "8bit", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float64", "float32", "float64"),
        ("bfloat16", "float16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_the_way_from_the_slow_weights_keeps_the_precision_of_the_parameter(parameter: str, asked: str, expected: str) -> None:
    assert state_dtypes(RANGER.fields[2:], parameter, (None,), [asked]) == (expected,)


@pytest.mark.parametrize(("asked", "beta2"), [("float16", 0.5), ("float16", 0.999)])
def test_a_state_dtype_that_is_too_low_is_refused(asked: str, beta2: float) -> None:
    for parameter in ("float32", "bfloat16", "float16"):
        with pytest.raises(InvalidArgumentError, match=rf"state_dtype={asked}.*float32"):
            moments(parameter, beta2, asked, asked)
    with pytest.raises(InvalidArgumentError, match="state_dtype=int8"):
        moments("float32", 0.9, "int8", "int8")


def test_parameter_dtypes() -> None:
    assert [compute_dtype(name) for name in ("float64", "float32", "bfloat16", "float16")] == ["float64"] + ["float32"] * 3
    for name in ("complex64", "int32", "bool", "float8_e4m3fn"):
        with pytest.raises(UnsupportedTensorError, match=name):
            check_parameter_dtype(name)
