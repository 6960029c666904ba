"""`penstock convert`: it shows a file, changes it, and on a fault says a sentence and leaves everything as it was."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.portable_states import changed, contents, parameter, state

from penstock.__main__ import main
from penstock.core.portable.file import load, save
from penstock.core.portable.state import PortableGroup, PortableState

ROOT = Path(__file__).resolve().parents[2]


def made() -> PortableState:
    return state({"layers.w": parameter((3, 2, 4), ("bfloat16", "split"), seed=1), "b\x1b[2J": parameter((), seed=2)})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(tmp_path / "in", made())
    return tmp_path / "in"


def test_it_shows_what_a_file_holds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(file)]) == 0
    printed, wrong = capsys.readouterr()
    assert wrong == ""
    for part in ("layers.w", "3 x 2 x 4", "bfloat16", "split", "learning_rate 0.001", "rule adamw, 2 parameters, with the"):
        assert part in printed
    assert f"{file.stat().st_size} bytes" in printed
    assert "\x1b[2J" not in printed  # a name does not steer the terminal
    assert "b\\x1b[2J" in printed


def test_it_shows_the_fields_of_the_files_rule(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = parameter((2,), seed=1)
    fields = {"exp_avg": one.fields["exp_avg"]}
    save(file, state({"w": dataclasses.replace(one, fields=fields)}, rule="lion"))
    assert main(["convert", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "exp_avg" in printed
    assert "exp_avg_sq" not in printed


def test_it_shows_the_rule_of_each_parameter(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix, rest = parameter((2, 3), seed=1), parameter((2,), seed=2)
    matrix = dataclasses.replace(matrix, fields={"momentum_buffer": matrix.fields["exp_avg"]})
    groups = PortableGroup("muon", {"momentum": 0.95}, ("w",)), PortableGroup("adamw", {}, ("b",))
    save(file, PortableState(groups, {"w": matrix, "b": rest}))
    assert main(["convert", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][3:-3] == ["exp_avg", "exp_avg_sq", "momentum_buffer"]
    assert lines[2:4] == [
        ["b", "2", "float32", "float32", "float32", "-", "none", "3", "0"],
        ["w", "2", "x", "3", "float32", "-", "-", "float32", "none", "3", "1"],
    ]
    assert [line[:3] for line in lines[5:7]] == [["group", "0,", "adamw,"], ["group", "1,", "muon,"]]
    assert lines[7][:3] == ["rules", "adamw,", "muon,"]


def test_without_changes_the_copy_is_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = file.with_name("out")
    assert main(["convert", str(file), str(target)]) == 0
    assert target.read_bytes() == file.read_bytes()
    assert "(2 parameters, rule adamw)" in capsys.readouterr().out


def test_names_there_and_back(file: Path) -> None:
    table, there, back = (file.with_name(name) for name in ("table.json", "there", "back"))
    table.write_text(json.dumps({"layers.w": {"name": [f"h.{n}.weight" for n in range(3)], "transposed": True}}))
    assert main(["convert", str(file), str(there), "--names", str(table)]) == 0
    assert set(load(there).parameters) == {"h.0.weight", "h.1.weight", "h.2.weight", "b\x1b[2J"}
    assert load(there).parameters["h.0.weight"].shape == (4, 2)
    assert main(["convert", str(there), str(back), "--names", str(table), "--inverse"]) == 0
    assert back.read_bytes() == file.read_bytes()


def test_rule_compensation_and_parameters(file: Path) -> None:
    arguments = ["--rule", "stable_adamw", "--drop-compensation", "--without-parameters"]
    assert main(["convert", str(file), str(file), *arguments]) == 0  # onto itself
    before = made()
    expected = {
        name: dataclasses.replace(one, compensated="none", compensation=None, parameter=None)
        for name, one in before.parameters.items()
    }
    assert contents(load(file)) == contents(
        PortableState((dataclasses.replace(before.groups[0], rule="stable_adamw"),), expected)
    )


def test_encoded_fields_are_those_of_large_matrices_near_the_numbers_and_right_in_the_mean(file: Path) -> None:
    """Squares of a thousandth of their block's largest are 3% above the nearest code, and their mean is right nevertheless."""
    squares = np.full((32, 256), 1e-3, np.float32)
    squares[:, ::128] = 1.0
    large = changed(parameter((32, 256), ("bfloat16", "split")), exp_avg_sq=squares)
    save(file, state({"w": large, "small": parameter((3, 5))}))
    before, target = load(file).parameters, file.with_name("out")
    assert main(["convert", str(file), str(target), "--encode"]) == 0
    after = load(target).parameters
    assert contents(state({"small": after["small"]})) == contents(state({"small": before["small"]}))
    kinds = {name: array.dtype.name for name, array in after["w"].fields.items()}
    scales = {"exp_avg_scale": "float32", "exp_avg_sq_scale": "float32"}
    assert kinds == {"exp_avg": "int8", "exp_avg_sq": "uint8", **scales}
    blocks, decoded = (one.decoded("exp_avg").astype(np.float32).reshape(-1, 128) for one in (before["w"], after["w"]))
    assert (np.abs(decoded - blocks) <= 0.008 * np.abs(blocks).max(1, keepdims=True)).all()
    found = after["w"].decoded("exp_avg_sq")
    assert (found[squares == 1.0] == 1.0).all()
    assert abs(found[squares < 1.0].mean() / 1e-3 - 1.0) < 0.003  # six standard deviations
    assert np.array_equal(after["w"].arrays()["compensation"], before["w"].arrays()["compensation"])
    assert main(["convert", str(target), str(file), "--encode"]) == 0  # again
    assert file.read_bytes() == target.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "'nowhere' cannot be read: No such file or directory."),
        (["nowhere", "out"], "'nowhere' cannot be read: No such file or directory."),
        (["table", "out"], "'table' is not a portable state that can be read"),
        (["in", "--rule", "adam"], "--rule changes the state; say with OUT where to write it."),
        (["in", "--without-parameters"], "--without-parameters changes the state; say with OUT"),
        (["in", "out", "--encode"], "no field of the state can be in 8 bits: those of large matrices can"),
        (["in", "out", "--encode", "--decode"], "--encode and --decode are opposites; leave one of them out."),
        (["in", "out", "--inverse"], "--inverse needs the table of --names."),
        (
            ["in", "out", "--rule", "adagrad"],
            "rule='adagrad' is not known; it must be one of stable_adamw, adamw, ",
        ),
        (["in", "out", "--names", "nowhere"], "--names 'nowhere' cannot be read: No such file or directory."),
        (["in", "out", "--names", "in"], "--names 'in' cannot be read: "),
        (["in", "out", "--names", "table"], "names has 'layer.w', and no parameter is called so; did you mean 'layers.w'"),
        (["in", "out", "--names", "list"], "the table must be a JSON object"),
        (["in", "below/out"], "'below/out' could not be written: No such file or directory; what was there is as it was."),
        (["damaged", "out"], "the bytes of 'compensation/layers.w' are damaged."),
    ],
)
def test_a_fault_is_one_sentence_and_status_2(
    arguments: list[str], sentence: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    Path("out").write_text("mine")
    Path("table").write_text('{"layer.w": "x"}')
    Path("list").write_text("[]")
    Path("damaged").write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert main(["convert", *arguments]) == 2
    printed, wrong = capsys.readouterr()
    assert sentence in wrong
    assert wrong.startswith("penstock convert: ")
    assert wrong.count("\n") == 1
    assert printed == ""
    assert Path("out").read_text() == "mine"
    assert sorted(path.name for path in Path().iterdir()) == ["damaged", "in", "list", "out", "table"]


def test_it_needs_no_framework_and_nothing_that_draws(file: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'jax', 'optax', 'matplotlib', 'rich']))\n"
        "from penstock.__main__ import main\n"
        f"sys.exit(main(['convert', {str(file)!r}]) or main(['convert', {str(file)!r}, {str(file)!r}, '--drop-compensation']))"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert load(file).parameters["layers.w"].compensated == "none"
