"""Files of the portable state: equal states make equal bytes, and everything comes back bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tests.support.portable_states import KINDS, changed, contents, parameter, put_together, state, taken_apart

from penstock.core.errors import InvalidArgumentError, UnsupportedTensorError
from penstock.core.portable.conversions import with_codes, with_rule, without_compensation, without_parameters
from penstock.core.portable.file import describe, load, save
from penstock.core.portable.state import (
    BESIDES,
    Layout,
    PortableGroup,
    PortableState,
    array_names,
    scale_name,
)
from penstock.core.rules import ADAMW, RANGER

SHAPES = ((), (1,), (3, 5), (0,), (4, 0, 2), (2, 1, 3))


def test_every_dtype_compensation_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    cases = itertools.product(KINDS, SHAPES, ("float32", "float64", "bfloat16"), (True, False))
    made = state(
        {
            f"p{number}/é.{number}": parameter(shape, kind, second=second, held=held, seed=number, step=2**40 * (number % 2))
            for number, (kind, shape, second, held) in enumerate(cases)
        }
    )
    save(tmp_path / "one", made)
    read = load(tmp_path / "one")
    assert contents(read) == contents(made)
    save(tmp_path / "two", read)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_special_numbers_keep_their_bits(tmp_path: Path) -> None:
    one = parameter((4,), ("float32", "none"))
    moments = np.array([-0.0, 1e-45, 3.4e38, -1e-39], np.float32)
    one = changed(one, exp_avg=moments, exp_avg_sq=np.array([-0.0, 1e-45, 3.4e38, 0.0], np.float32))
    save(tmp_path / "file", state({"w": one}))
    assert load(tmp_path / "file").parameters["w"].fields["exp_avg"].tobytes() == moments.tobytes()


def test_the_order_of_parameters_and_how_they_lie_in_memory_do_not_change_the_file(tmp_path: Path) -> None:
    made = state()
    moved = dict(reversed(made.parameters.items()))
    w = moved["w"]
    big_endian = {"exp_avg_sq": w.fields["exp_avg_sq"].astype(">f4"), "compensation": w.compensation.astype(">i2")}
    moved["w"] = changed(w, exp_avg=np.asfortranarray(w.fields["exp_avg"]), **big_endian)
    group = dataclasses.replace(made.groups[0], parameters=tuple(moved))
    group = dataclasses.replace(group, hyperparameters=dict(reversed(group.hyperparameters.items())))
    save(tmp_path / "one", made)
    save(tmp_path / "two", dataclasses.replace(made, groups=(group,), parameters=moved))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    made = state()
    save(tmp_path / "file", made)
    wanted = {f"{field}/{name}": array for name, one in made.parameters.items() for field, array in one.arrays().items()} | {
        f"step/{name}": np.asarray(one.step) for name, one in made.parameters.items()
    }
    with safe_open(tmp_path / "file", framework="np") as file:
        assert set(file.metadata()) == {"penstock"}
        assert set(file.keys()) == set(wanted)
        for name, array in wanted.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_the_format_is_as_described(tmp_path: Path) -> None:
    save(tmp_path / "file", state())
    table, document, data = taken_apart(tmp_path / "file")
    assert document["version"] == 3
    assert document["parameters"]["w"] == {"dtype": "bfloat16", "shape": [2, 3], "compensated": "split"}
    assert document["groups"][0]["parameters"] == ["empty", "layers.b", "w"]
    begin = 8 + int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")
    assert begin % 8 == 0
    for row in table.values():
        size = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "I16": 2}[row["dtype"]]
        assert row["data_offsets"][0] % size == 0
    put_together(tmp_path / "again", table, document, data)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_file_of_version_1_has_one_rule_for_all_groups(tmp_path: Path) -> None:
    save(tmp_path / "file", state(rule="stable_adamw"))
    table, document, data = taken_apart(tmp_path / "file")
    rules = {group.pop("rule") for group in document["groups"]}
    put_together(tmp_path / "old", table, {**document, "version": 1, "rule": rules.pop()}, data)
    assert contents(load(tmp_path / "old")) == contents(load(tmp_path / "file"))
    save(tmp_path / "new", load(tmp_path / "old"))
    assert (tmp_path / "new").read_bytes() == (tmp_path / "file").read_bytes()


def test_codes_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    """They stood for other numbers."""
    large = parameter(shape=(32, 256), kind=("bfloat16", "split8"))
    save(tmp_path / "file", with_codes(state({"w": dataclasses.replace(large, random_keys=(1,))})))
    table, document, data = taken_apart(tmp_path / "file")
    put_together(tmp_path / "old", table, {**document, "version": 2}, data)
    with pytest.raises(InvalidArgumentError, match="parameter 'w' has 8-bit codes as of version 2"):
        load(tmp_path / "old")


def test_describe_says_what_load_returns(tmp_path: Path) -> None:
    made = state()
    save(tmp_path / "file", made)
    about = describe(tmp_path / "file")
    assert (about.groups[0].rule, about.nbytes) == ("adamw", (tmp_path / "file").stat().st_size)
    assert dict(about.groups[0].hyperparameters) == dict(made.groups[0].hyperparameters)
    assert list(about.parameters) == sorted(made.parameters)
    for name, one in about.parameters.items():
        given = made.parameters[name]
        assert (one.dtype, one.shape, one.compensated, one.step) == (given.dtype, given.shape, given.compensated, given.step)
        assert one.dtypes == {field: array.dtype.name for field, array in given.arrays().items()}


def test_describe_reads_no_moments(tmp_path: Path) -> None:
    """A damaged one does not stop it, as it stops load."""
    save(tmp_path / "file", state({"w": parameter()}))
    content = bytearray((tmp_path / "file").read_bytes())
    content[-1] ^= 1
    (tmp_path / "file").write_bytes(content)
    assert describe(tmp_path / "file").parameters["w"].step == 3
    with pytest.raises(InvalidArgumentError, match=r"the bytes of 'parameter/w' are damaged"):
        load(tmp_path / "file")


def test_left_out_arrays_are_gone_and_the_rest_is_unchanged() -> None:
    made = state()
    assert [group.rule for group in with_rule(made, "adam").groups] == ["adam"]
    for after, gone in ((without_compensation(made), "compensation"), (without_parameters(made), "parameter")):
        for name, one in made.parameters.items():
            kept = {field: array for field, array in one.arrays().items() if field != gone}
            assert after.parameters[name].arrays() == kept  # the arrays themselves, not copies
    assert {one.compensated for one in without_compensation(made).parameters.values()} == {"none"}


STOCHASTIC = {"dtype": "bfloat16", "compensated": "stochastic"}
BAD = {
    "dtype": ({"dtype": "int32"}, UnsupportedTensorError, "dtype int32"),
    "compensated": ({"compensated": "kahan"}, InvalidArgumentError, "cannot be 'kahan'"),
    "automatic": ({"compensated": "auto"}, InvalidArgumentError, "cannot be 'auto'"),
    "shape": ({"shape": (3, 2)}, InvalidArgumentError, r"exp_avg of 'w' has shape \(2, 3\), the parameter has \(3, 2\)"),
    "moment": ({"exp_avg": np.zeros((2, 3), np.int16)}, InvalidArgumentError, "exp_avg of 'w' has dtype int16"),
    "parameter": ({"parameter": np.zeros((2, 3), np.float64)}, InvalidArgumentError, "has dtype float64; it must be float32"),
    "compensation": (
        {"compensation": np.zeros((2, 3), np.int16)},
        InvalidArgumentError,
        "is 'none', but as an array it has one",
    ),
    "nan": (
        {"exp_avg": np.full((2, 3), np.nan, np.float32)},
        InvalidArgumentError,
        "exp_avg of 'w' holds an infinity or a NaN",
    ),
    "infinity": ({"parameter": np.full((2, 3), np.inf, np.float32)}, InvalidArgumentError, "parameter of 'w' holds an inf"),
    "negative": ({"exp_avg_sq": np.full((2, 3), -1e-45, np.float32)}, InvalidArgumentError, "holds a negative number"),
    "step": ({"step": -1}, InvalidArgumentError, "step of parameter 'w' is -1"),
    "fraction": ({"step": 1.5}, InvalidArgumentError, "step of parameter 'w' is 1.5"),
    "late": ({"step": 2**63}, InvalidArgumentError, "step of parameter 'w'"),
    "keys of none": ({"random_keys": (1,)}, InvalidArgumentError, "'w', 'none' of shape .* has 1 random_keys"),
    "too many keys": (
        {**STOCHASTIC, "random_keys": (1, 2, 3)},
        InvalidArgumentError,
        "has 3 random_keys; ",
    ),
    "key": ({**STOCHASTIC, "random_keys": (2**32,)}, InvalidArgumentError, "a random key of parameter 'w' is 4294967296"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_parameter_that_cannot_be_is_refused(fault: str) -> None:
    changes, kind, sentence = BAD[fault]
    with pytest.raises(kind, match=sentence):
        state({"w": changed(parameter(), **changes)})


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ((PortableGroup("adagrad", {}, ("w",)),), "rule='adagrad' is not known"),
        ((PortableGroup("muon", {}, ("w",)),), "parameter 'w' has no momentum_buffer"),
        ((), "every parameter must be in one group; this is not so for 'w'"),
        ((PortableGroup("adamw", {}, ("w", "w")),), "this is not so for 'w'"),
        ((PortableGroup("adamw", {}, tuple("wabcdefg")),), "'a', 'b', 'c', 'd', 'e' and 2 more"),
        ((PortableGroup("adamw", {"beta1": float("nan")}, ("w",)),), "'beta1' of group 0 is not finite"),
        ((PortableGroup("adamw", {"beta1": 10**400}, ("w",)),), "'beta1' of group 0 is not finite"),
        ((PortableGroup("adamw", {"beta2": 99.9}, ("w",)),), r"group 0: beta2=99.9 is out of range; .*\[0, 1\)"),
        ((PortableGroup("adamw", {"beta1": 1}, ("w",)),), "group 0: beta1=1 is out of range"),
        ((PortableGroup("adamw", {"beta1": "0.9"}, ("w",)),), "it must be a number"),
    ],
)
def test_a_state_that_cannot_be_is_refused(groups: tuple[PortableGroup, ...], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        PortableState(groups, {"w": parameter()})


def test_codes_of_a_field_that_is_precise_are_refused() -> None:
    """Ranger's moments may be codes, and what it must know exactly may not."""
    arrays = {field.name: ("float32", (32, 256)) for field in RANGER.fields}
    for name, possible in (("exp_avg", True), ("lookahead", False)):
        coded = {**arrays, name: ("int8", (32, 256)), scale_name(name): ("float32", (32, 2))}
        layout = Layout("float32", (32, 256), "none", coded)
        with contextlib.nullcontext() if possible else pytest.raises(InvalidArgumentError, match="lookahead of 'w' has"):
            layout.check("w", RANGER)


def test_an_array_is_never_left_out_of_the_file(tmp_path: Path) -> None:
    """`array_names` is what a parameter has beside its step: an array more would have to be written, too."""
    fields = {field.name for field in dataclasses.fields(parameter())}
    assert fields == {"dtype", "shape", "compensated", "step", "fields", "random_keys", *BESIDES}
    save(tmp_path / "file", state({"w": parameter(kind=("bfloat16", "split"))}))
    scales = {scale_name(field.name) for field in ADAMW.fields}  # of codes alone
    assert set(taken_apart(tmp_path / "file")[0]) == {f"{field}/w" for field in {"step", *array_names(ADAMW)} - scales}
