"""Names between two sides: what a table does, its inverse undoes, and what cannot be is one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.portable_states import KINDS, changed, contents, parameter, state

from penstock.core.compensation import WITH_RANDOM_BITS
from penstock.core.errors import InvalidArgumentError
from penstock.core.portable.names import Line, Names, Target, Transposed, inverted, parse_table, table_of
from penstock.core.portable.rename import rename as renamed
from penstock.core.portable.state import PortableGroup, PortableState

SPLIT = ("bfloat16", "split")
KAHAN = ("float16", "kahan")


def rename(given: PortableState, names: Names) -> PortableState:
    return renamed(given, table_of(names, given.parameters))


def h(count: int, last: str = ".weight") -> list[str]:
    return [f"h.{n}{last}" for n in range(count)]


def stacked() -> PortableState:
    """Three layers along a leading axis, in two groups, and two parameters outside of layers."""
    parameters = {
        "layers.w": parameter((3, 2, 4), SPLIT, seed=1, step=7),
        "layers.cube": parameter((3, 2, 4, 5), KAHAN, seed=2, step=8),
        "head": parameter((4, 2), seed=3),
        "scale": parameter((), seed=4, held=False),
    }
    groups = (
        PortableGroup("stable_adamw", {"weight_decay": 0.1}, ("head", "layers.w")),
        PortableGroup("adamw", {}, ("scale", "layers.cube")),
    )
    return PortableState(groups, parameters)


TABLES: dict[str, Names] = {
    "none": None,
    "names": {"head": "lm_head.weight"},
    "swapped": {"head": "scale", "scale": "head"},
    "a function": lambda name: f"model.{name}",
    "a function that transposes": lambda name: Transposed(name) if name == "head" else name,
    "transposed": {"head": Transposed("lm_head.weight")},
    "axes": {"layers.cube": Transposed("cube", (2, 0, 3, 1)), "layers.w": Transposed("w", (1, 2, 0))},
    "layers apart": {"layers.w": h(3), "layers.cube": h(3, ".cube")},
    "layers apart, transposed": {"layers.w": Transposed(h(3)), "layers.cube": Transposed(["0", "1", "2"], (1, 2, 0))},
}


@pytest.mark.parametrize("names", TABLES)
def test_there_and_back_is_bit_for_bit(names: str) -> None:
    made = stacked()
    table = table_of(TABLES[names], made.parameters)
    there, back = renamed(made, table), inverted(table)
    assert contents(renamed(there, back)) == contents(made)
    assert (contents(there) == contents(made)) == (names == "none")
    # and in the other direction, from the layers that are apart
    assert contents(renamed(renamed(there, back), inverted(back))) == contents(there)


def test_a_tuple_of_names_is_stacked() -> None:
    made = stacked()
    there = rename(made, {"layers.w": Transposed(h(3))})
    assert contents(rename(there, {tuple(h(3)): Transposed("layers.w")})) == contents(made)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_every_array_of_every_layer_is_where_it_should_be(kind: tuple[str, str]) -> None:
    made = state({"layers.w": parameter((3, 2, 4), kind, seed=1, step=7)})
    there = rename(made, {"layers.w": Transposed(h(3))})
    assert there.groups[0].parameters == ("h.0.weight", "h.1.weight", "h.2.weight")
    keys = [key for one in there.parameters.values() for key in one.random_keys]
    assert len(set(keys)) == len(keys) == (3 if kind[1] in WITH_RANDOM_BITS else 0)  # the layers' random bits are others
    together = rename(there, {tuple(h(3)): Transposed("layers.w")})
    assert together.parameters["layers.w"].random_keys == tuple(keys)
    assert rename(together, {"layers.w": Transposed(h(3))}).parameters["h.2.weight"].random_keys == tuple(keys[2:])
    given = made.parameters["layers.w"]
    for number in range(3):
        one = there.parameters[f"h.{number}.weight"]
        assert (one.step, one.shape, one.dtype, one.compensated) == (7, (4, 2), given.dtype, given.compensated)
        assert set(one.arrays()) == set(given.arrays())
        for field, array in one.arrays().items():
            assert array.tobytes() == given.arrays()[field][number].T.tobytes()


def test_axes_are_those_of_the_file() -> None:
    given = np.asarray(stacked().parameters["layers.cube"].fields["exp_avg"])
    there = rename(stacked(), {"layers.cube": Transposed("cube", (3, 0, 2, 1))}).parameters["cube"].fields["exp_avg"]
    assert there.tobytes() == given.transpose(3, 0, 2, 1).tobytes()


def test_every_layer_can_have_another_name() -> None:
    names = {f"blocks.{number}.w": parameter(seed=number, step=number) for number in range(12)}
    made = state({**names, "blocks.x.w": parameter()})
    table = table_of({f"blocks.{n}.w": Transposed(f"h.{n}.weight") for n in range(12)}, made.parameters)
    there = renamed(made, table)
    assert set(there.parameters) == {f"h.{number}.weight" for number in range(12)} | {"blocks.x.w"}
    assert there.parameters["h.11.weight"].step == 11
    assert contents(renamed(there, inverted(table))) == contents(made)


def test_a_table_leaves_out_what_keeps_its_name() -> None:
    assert table_of({"a": "b", "c": "c"}, ["a", "c", "d"]) == [Line("a", "b")]
    assert table_of(lambda name: name, ["a"]) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_table_is_undone_by_its_inverse(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from([(2, 3), (3, 2, 4), (1, 2), (2,)]), min_size=1, max_size=4))
    made = state({f"p{n}": parameter(shape, SPLIT, seed=n) for n, shape in enumerate(shapes)})
    order = data.draw(st.permutations(range(len(shapes))))
    table: dict[str, Target] = {}
    for n, shape in enumerate(shapes):
        layered = data.draw(st.booleans())
        name: Any = f"p{order[n]}"
        name = [f"{name}.{layer}" for layer in range(shape[0])] if layered else name
        axes = data.draw(st.none() | st.permutations(range(len(shape) - layered)))
        table[f"p{n}"] = data.draw(st.sampled_from([name, Transposed(name, None if axes is None else tuple(axes))]))
    lines = table_of(table, made.parameters)
    assert contents(renamed(renamed(made, lines), inverted(lines))) == contents(made)


def layers(**changes: Any) -> PortableState:
    """Two layers, the second with changes."""
    return state({"h.0.w": parameter(), "h.1.w": changed(parameter(), **changes)})


TOGETHER = {("h.0.w", "h.1.w"): "w"}
FAULTS: dict[str, tuple[Callable[[], PortableState], Names, str]] = {
    "unknown": (stacked, {"heads": "x"}, "names has 'heads', and no parameter is called so; did you mean 'head'"),
    "unknown layers": (stacked, {("head", "blocks.1.w"): "x"}, "names has 'blocks.1.w', and no parameter is called so"),
    "in an empty state": (lambda: state({}), {"w": "x"}, "names has 'w', and no parameter is called so; there are none."),
    "two become one": (stacked, {"head": "x", "scale": "x"}, "names makes one of several parameters: 'x'"),
    "one becomes what another is": (stacked, {"head": "scale"}, "names makes one of several parameters: 'scale'"),
    "a layer becomes what another is": (stacked, {"layers.w": h(3, ""), "head": "h.1"}, "several parameters: 'h.1'"),
    "a function makes one": (stacked, lambda name: "x", "names makes one of several parameters: 'x'"),
    "a function gives nothing": (stacked, lambda name: None, "names gives None for 'layers.w'; it must be a name"),
    "a number": (
        stacked,
        {"head": 3},
        "names gives 3 for 'head'; it must be a name, a list of the layers' names",
    ),
    "numbers": (stacked, {"layers.w": [0, 1, 2]}, "names gives [0, 1, 2] for 'layers.w'; it must be a name"),
    "no names": (stacked, {"layers.w": []}, "names gives [] for 'layers.w'; it must be a name"),
    "no key": (stacked, {(): "w"}, "names gives 'w' for (); it must be a name"),
    "layers on both sides": (layers, {("h.0.w", "h.1.w"): h(2)}, "names gives several names for the layers"),
    "said twice": (
        layers,
        {("h.0.w", "h.1.w"): "x", "h.0.w": "y"},
        "says twice what 'h.0.w' becomes",
    ),
    "no layers": (stacked, {"scale": ["scale.0"]}, "'scale' has shape (), and names gives 1 names for the layers"),
    "too few layers": (stacked, {"layers.w": h(2)}, "'layers.w' has shape (3, 2, 4), and names gives 2 names for the layers"),
    "other axes": (stacked, {"head": Transposed("x", (0, 2, 1))}, "axes=(0, 2, 1) cannot be those of 'head', of shape (4, 2)"),
    "a layer's axes": (stacked, {"layers.w": Transposed(h(3), (0, 2, 1))}, "of shape (2, 4) (without layers)"),
    "steps": (lambda: layers(step=4), TOGETHER, "step of 'h.1.w' is 4, of 'h.0.w' 3; keep the layers apart"),
    "shapes": (
        lambda: state({"h.0.w": parameter(), "h.1.w": parameter((3, 2))}),
        TOGETHER,
        "shape of 'h.1.w' is (3, 2), of 'h.0.w' (2, 3)",
    ),
    "dtypes": (
        lambda: state({"h.0.w": parameter(), "h.1.w": parameter(kind=("float64", "none"))}),
        TOGETHER,
        "dtype of exp_avg of 'h.1.w' is float64, of 'h.0.w' float32",
    ),
    "moments": (
        lambda: layers(exp_avg_sq=np.ones((2, 3))),
        TOGETHER,
        "dtype of exp_avg_sq of 'h.1.w' is float64, of 'h.0.w' float32",
    ),
    "compensations": (
        lambda: state({"h.0.w": parameter(kind=("bfloat16", "none")), "h.1.w": parameter(kind=SPLIT)}),
        TOGETHER,
        "dtype of compensation of 'h.1.w' is int16, of 'h.0.w' None",
    ),
    "parameters": (lambda: layers(parameter=None), TOGETHER, "dtype of parameter of 'h.1.w' is None, of 'h.0.w' float32"),
    "groups": (
        lambda: dataclasses.replace(layers(), groups=tuple(PortableGroup("adamw", {}, (name,)) for name in ("h.0.w", "h.1.w"))),
        TOGETHER,
        "group of 'h.1.w' is 1, of 'h.0.w' 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_that_does_not_fit_is_refused_in_one_sentence(fault: str) -> None:
    make, names, sentence = FAULTS[fault]
    with pytest.raises(InvalidArgumentError) as raised:
        rename(make(), names)
    assert sentence in str(raised.value)


def test_a_table_without_an_inverse_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="several parameters: 'x'"):
        inverted([Line("a", "x"), Line("b", "x", None, True)])
    unfit: Any
    for unfit in ((0, 0), (1, 2), "10", 1, (1.0, 0.0)):
        with pytest.raises(InvalidArgumentError, match="must be a permutation"):
            Transposed("x", unfit)
    unfit = [1, 0]
    assert Transposed("x", unfit) == Transposed("x", (1, 0))
    unfit = 3
    with pytest.raises(InvalidArgumentError, match=r"Transposed\(3\) must have a name"):
        Transposed(unfit)


def square(*names: str, shape: tuple[int, ...] = (3, 3)) -> PortableState:
    return state({name: parameter(shape, seed=number) for number, name in enumerate(names)})


FORGOTTEN: dict[str, tuple[PortableState, Names, str]] = {
    "to torch": (
        square("up.kernel"),
        {"up.kernel": "h.weight"},
        "'up.kernel' becomes 'h.weight', which would be transposed",
    ),
    "to flax": (square("h.weight"), lambda name: "up.kernel", "by the conventions of torch and flax, and the shape (3, 3)"),
    "layers apart": (square("kernel", shape=(2, 3, 3)), {"kernel": h(2)}, "the shape (3, 3) does not tell"),
    "layers stacked": (square(*h(2)), {tuple(h(2)): "kernel"}, "'h.0.weight' becomes 'kernel'"),
    "as another": (
        square("a.w", "b.w"),
        {"a.w": Transposed("a.v"), "b.w": "b.v"},
        "'b.w' becomes 'b.v', which would be transposed as names says of 'a.w'",
    ),
    "as another, kept": (
        square("a.w", "b.w"),
        {"a.w": Transposed("c.w")},
        "'b.w' becomes 'b.w', which would be transposed",
    ),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_square_matrix_must_be_declared_where_others_are_transposed(forgotten: str) -> None:
    made, names, sentence = FORGOTTEN[forgotten]
    with pytest.raises(InvalidArgumentError) as raised:
        rename(made, names)
    assert sentence in str(raised.value)
    assert "Say it with names=: Transposed(NAME), or Transposed(NAME, ())" in str(raised.value)
    for axes in (None, ()):
        said = {name: Transposed(f"{name}.new", axes) for name in made.parameters}
        there = rename(made, said)
        for name, old in made.parameters.items():
            array = there.parameters[f"{name}.new"].fields["exp_avg"]
            assert array.tobytes() == (old.fields["exp_avg"].T if axes is None else old.fields["exp_avg"]).tobytes()
        assert contents(renamed(there, inverted(table_of(said, made.parameters)))) == contents(made)


def test_no_declaration_is_needed_where_the_shape_tells_or_nothing_is_transposed() -> None:
    table: dict[str, Target] = {"v.kernel": "v.weight", "one.kernel": "one.weight", "w": "lm.w", "n.kernel": "m.kernel"}
    shapes = {"v.kernel": (3,), "one.kernel": (1, 1), "w": (3, 3), "n.kernel": (3, 3), "oblong.kernel": (3, 4)}
    made = state({name: parameter(shape) for name, shape in shapes.items()})
    assert set(rename(made, table | {"oblong.kernel": "oblong.weight"}).parameters) == {*table.values(), "oblong.weight"}


def test_a_table_as_json() -> None:
    content = {
        "a": "b",
        "c": {"name": "d", "transposed": True},
        "e": {"name": "f", "transposed": [1, 0]},
        "g": {"name": "h", "transposed": False},
        "i": {"name": "j"},
        "k": ["l", "m"],
        "n": {"name": ["o", "p"], "transposed": True},
    }
    assert parse_table(json.dumps(content)) == [
        Line("a", "b"),
        Line("c", "d", None, True),
        Line("e", "f", (1, 0), True),
        Line("g", "h", (), True),
        Line("i", "j"),
        Line("k", ("l", "m")),
        Line("n", ("o", "p"), None, True),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the table is no JSON"),
        ("[" * 100_000, "the table is no JSON"),
        ("[]", "the table must be a JSON object"),
        ('{"a": 1}', "the table gives 1 for 'a'"),
        ('{"a": ["b", 1]}', "it must be a name, a list"),
        ('{"a": {"transposed": true}}', "it must be a name, or"),
        ('{"a": {"name": "b", "transpose": true}}', "it must be a name, or"),
        ('{"a": {"name": "b", "transposed": [0.5]}}', "must be a permutation"),
        ('{"a": {"name": "b", "transposed": [1, 1]}}', "must be a permutation"),
        ('{"a": "b", "a": "c"}', "the table has 'a' twice"),
    ],
)
def test_json_that_is_no_table_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        parse_table(text)


def test_a_transposed_matrix_has_the_other_axis_of_outputs() -> None:
    """Muon's scale depends on it; others of the group keep theirs, and the way back is the same."""
    one = parameter((2, 3))
    matrix = dataclasses.replace(one, fields={"momentum_buffer": one.fields["exp_avg"]})
    group = PortableGroup("muon", {"output_axis": 0, "nesterov": True}, ("a", "b"))
    made = PortableState((group,), {"a": matrix, "b": matrix})
    found = rename(made, {"b": Transposed("kernel")})
    axes = {group.parameters: group.hyperparameters["output_axis"] for group in found.groups}
    assert axes == {("a",): 0, ("kernel",): 1}
    back = rename(found, {"kernel": Transposed("b")})
    assert {name: group.hyperparameters for group in back.groups for name in group.parameters} == dict.fromkeys(
        "ab", group.hyperparameters
    )
