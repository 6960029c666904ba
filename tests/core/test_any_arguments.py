"""Random arguments in both frontends: each is used as it says, or refused in one sentence that names it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import pytest
import torch
from tests.support.jax_training import TRANSFORMS, float64
from tests.support.rows import rows
from tests.support.torch_models import OPTIMIZERS
from torch import nn

from penstock.core.codings.eight_bit import is_coded
from penstock.core.compensation import COMPENSATIONS
from penstock.core.errors import PenstockError
from penstock.core.precision import PRECISIONS
from penstock.core.rules import Rule
from penstock.jax_frontend.leaves import stored_dtype
from penstock.torch_frontend import AdamW
from penstock.torch_frontend.groups import rule_of

GOOD: dict[str, list[Any]] = {
    "dtype": [None, "8bit", "float32", "bfloat16", "float64"],
    "compensation": list(COMPENSATIONS),
    "precision": list(PRECISIONS),
    "seed": [0, 7, 2**32 - 1],
}
BAD: dict[str, list[Any]] = {
    "dtype": ["4bit", "int8", "complex64", 3, ["8bit"]],
    "compensation": [None, 3, "Kahan", ["split"]],
    "precision": [None, 3, "small", ["exact"]],
    "seed": [-1, 2**32, 1.0, True, "1"],
}
SHAPES, DTYPES = [(32, 256), (4, 3)], ["float32", "bfloat16", "float16", "float64"]
LOW = {"bfloat16": {"split": "int16", "split8": "int8", "kahan": "bfloat16"}, "float16": {"kahan": "float16"}}
"""By dtype of the parameter: the dtype of each compensation that is an array."""

Stored = tuple[list[Any], str | None]
"""Dtypes of the fields, "8bit" where they are coded, and of the compensation."""


class Trial(NamedTuple):
    """An optimizer of one parameter with random arguments.

    rule, dtype, shape: of the parameter. given: the arguments, by their names in the frontend. possible: each value alone is.
    call: construct it, take a step, and return what is `Stored`. unchanged: whether the parameter is as it was.
    """

    rule: Rule
    dtype: str
    shape: tuple[int, ...]
    given: dict[str, Any]
    possible: bool
    call: Callable[[], Stored]
    unchanged: Callable[[], bool]


def drawn(generator: random.Random, names: list[str]) -> tuple[dict[str, Any], bool]:
    """Up to three arguments, and whether each value is possible."""
    arguments, possible = {}, True
    for name in generator.sample(names, generator.randrange(min(3, len(names)) + 1)):
        good = generator.random() < 0.85
        arguments[name] = generator.choice((GOOD if good else BAD)["dtype" if name.endswith("_dtype") else name])
        possible &= good
    return arguments, possible


def in_torch(generator: random.Random) -> Trial:
    make, dtype, shape = generator.choice(OPTIMIZERS), generator.choice(DTYPES), generator.choice(SHAPES)
    given, possible = drawn(generator, ["state_dtype", "compensation", "precision", "seed"])
    parameter = nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    rule = rule_of(make([parameter]).param_groups[0])
    arguments = dict(given)
    if isinstance(name := given.get("state_dtype"), str):
        arguments["state_dtype"] = getattr(torch, name, name)

    def call() -> Stored:
        optimizer = make([parameter], **arguments)
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        state = optimizer.state[parameter]
        names = {key: str(value.dtype).partition(".")[2] for key, value in state.items() if isinstance(value, torch.Tensor)}
        keys = [f"debiased_{field.name}" if field.beta else field.name for field in rule.fields]
        return ["8bit" if f"{key}_scale" in state else names[key] for key in keys], names.get("compensation")

    return Trial(rule, dtype, shape, given, possible, call, lambda: bool((parameter == 1).all()))


def in_jax(generator: random.Random) -> Trial:
    make, dtype, shape = TRANSFORMS[generator.choice(list(TRANSFORMS))], generator.choice(DTYPES), generator.choice(SHAPES)
    known = inspect.signature(make).parameters
    given, possible = drawn(
        generator, [name for name in ("mu_dtype", "nu_dtype", "compensation", "precision", "seed") if name in known]
    )
    rule, params = make(1e-3).rule, {"w": jax.ShapeDtypeStruct(shape, dtype)}

    def call() -> Stored:
        tx = make(1e-3, **given)
        state: Any = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)[1]
        kept = jax.tree.leaves(state.compensation)
        return [stored_dtype(state.fields[field.name]["w"]) for field in rule.fields], kept[0].dtype.name if kept else None

    return Trial(rule, dtype, shape, given, possible, call, lambda: True)


def wanted(trial: Trial) -> Stored | None:
    """What is stored, None for a field that has its default; None if the arguments do not go together."""
    given, low = trial.given, LOW.get(trial.dtype, {})
    compensation, precision = given.get("compensation", "auto"), given.get("precision", "exact")
    asked = {name: value for name, value in given.items() if name.endswith("_dtype") and value is not None}
    if precision != "exact":
        if asked or compensation != "auto":
            return None
        asked = dict.fromkeys(("mu_dtype", "nu_dtype"), "8bit") if trial.rule.fields else {}
        compensation = {"compact": "auto8", "smallest": "stochastic"}[precision]
    if (asked and not trial.rule.fields) or (trial.dtype == "float16" and compensation in ("split", "split8")):
        return None
    fields = []
    for field in trial.rule.fields:
        dtype = asked.get("state_dtype") or asked.get("nu_dtype" if field.of_squares else "mu_dtype")
        if trial.dtype == "float64" and (dtype == "8bit" or (field.of_squares and dtype == "bfloat16")):
            return None
        small = dtype == "8bit" and not is_coded(trial.shape)
        fields.append(None if field.is_precise else "float32" if small else dtype)
    automatic = {"auto": "split", "auto8": "split8"}.get(compensation, compensation)
    kind = "kahan" if compensation != automatic and trial.dtype == "float16" else automatic
    return fields, low.get(kind)


def check_refusal(error: Exception, names: Iterable[str]) -> None:
    text = str(error)
    assert isinstance(error, PenstockError), repr(error)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    assert any(name in text for name in names), text


@pytest.mark.parametrize("seed", rows(range(10), (0).__eq__))
@pytest.mark.parametrize("frontend", [in_torch, in_jax])
def test_any_arguments_are_used_or_refused(frontend: Callable[[random.Random], Trial], seed: int) -> None:
    generator, refused = random.Random(seed), 0
    with float64():
        for _ in range(150):
            trial = frontend(generator)
            expected = wanted(trial) if trial.possible else None
            try:
                fields, compensation = trial.call()
            except Exception as error:
                check_refusal(error, trial.given)
                assert expected is None
                assert trial.unchanged()
                refused += 1
                continue
            assert expected is not None, trial
            for found, asked in zip(fields, expected[0], strict=True):
                assert found == asked if asked is not None else found != "8bit", trial
            assert compensation == expected[1], trial
    assert 20 < refused < 130


KEYS: list[tuple[str, list[Any], list[Any]]] = [
    ("lr", [1e-3], [-1.0, "high"]),
    ("betas", [(0.8, 0.9)], [(0.8, 1.0), 0.9]),
    ("weight_decay", [0.1], [-0.1]),
    ("state_dtype", [None, "8bit", torch.float32], ["4bit", torch.int8, 3]),
    ("compensation", ["auto", "stochastic"], ["Kahan", None]),
    ("seed", [3], [-1, None]),
    ("name", ["mine"], []),  # a key of the user's own
    ("lr_scale", [0.5], []),
    ("initial_lr", [0.5], []),
    ("decay", [False], [0.1]),  # a mark of the user's own, or what others call weight_decay
    ("lr_rate", [], [1e-3]),
    ("WD", [], [0.1]),
    ("momentum", [], [0.9]),  # of other rules
    ("ns_steps", [], [5]),
    ("precision", [], ["exact", "compact"]),  # of the optimizer
    ("backend", [], ["eager"]),
    ("learning_rate", [], [1e-3]),  # of JAX
    ("beta2", [], [0.9]),
    ("weight_decy", [], [0.1]),
    ("beta", [], [(0.9, 0.9)]),
    ("stat_dtype", [], ["8bit"]),
]
"""Keys of a group of AdamW, with values that it can have, and others that it cannot."""


@pytest.mark.parametrize("seed", rows(range(10), (0).__eq__))
def test_any_keys_of_a_group_are_used_or_refused(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(100):
        optimizer, parameter = AdamW([nn.Parameter(torch.ones(3))]), nn.Parameter(torch.ones(32, 256))
        group, possible = {}, True
        for name, good, bad in generator.sample(KEYS, generator.randrange(4)):
            group[name] = generator.choice(good + bad)
            possible &= group[name] in good
        if generator.random() < 0.2:
            group["rule"], possible = generator.choice(["adamw2", None, 3]), False
        try:
            optimizer.add_param_group({"params": [parameter], **group})
        except Exception as error:
            check_refusal(error, group)
            assert not possible, group
            assert len(optimizer.param_groups) == 1
            continue
        assert possible, group
        assert {name: optimizer.param_groups[1][name] for name in group} == group
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert ("debiased_exp_avg_scale" in optimizer.state[parameter]) == (group.get("state_dtype") == "8bit")
