"""Files that are damaged or lie: one sentence each, nothing of them is returned, and no memory that they only claim."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.portable_states import contents, parameter, put_together, signed, state, taken_apart, with_header

from penstock.core.errors import InvalidArgumentError
from penstock.core.portable.file import describe, load, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    save(path, state({"w": parameter((2,), ("bfloat16", "split"))}))
    return path


def refused(path: Path) -> str:
    """The sentence that both `load` and `describe` raise."""
    with pytest.raises(InvalidArgumentError) as raised:
        load(path)
    said = str(raised.value)
    assert said.startswith(f"{str(path)!r} ")
    assert said.endswith(".")
    assert "\n" not in said
    return said


def test_a_truncated_file_is_refused_at_every_length(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused(file)
    file.write_bytes(whole + b"\0")
    assert LIBRARY in refused(file)


def test_every_flipped_byte_is_noticed_or_changes_nothing(file: Path) -> None:
    """In the length of the header, in the header, in the document, and in each array; only blanks may become other blanks."""
    whole, before = file.read_bytes(), contents(load(file))
    end = 8 + int.from_bytes(whole[:8], "little")
    blanks = range(8 + len(whole[8:end].rstrip(b" ")), end)
    assert blanks
    generator = random.Random(6)
    for place in range(len(whole)):
        every = [whole[place] ^ ord(blank) for blank in "\n\t\r"] if place in blanks else []
        for mask in (1 << generator.randrange(8), generator.randrange(1, 256), *every):
            damaged = bytearray(whole)
            damaged[place] ^= mask
            file.write_bytes(damaged)
            if place in blanks and damaged[place : place + 1].isspace():
                assert contents(load(file)) == before
            else:
                refused(file)


Change = Callable[[dict[str, Any], dict[str, Any], dict[str, bytes]], None]


def forged(file: Path, change: Change) -> None:
    """The file with a change that its digests agree with."""
    table, document, data = taken_apart(file)
    arrays = {name: data[slice(*row["data_offsets"])] for name, row in table.items()}
    change(table, document, arrays)
    end = 0
    for name, row in table.items():
        row["data_offsets"] = [end, end := end + len(arrays[name])]
    put_together(file, table, document, b"".join(arrays[name] for name in table))


def test_forging_alone_changes_nothing(file: Path) -> None:
    before = file.read_bytes()
    forged(file, lambda table, document, arrays: None)
    assert file.read_bytes() == before


def missing(name: str) -> Change:
    def change(table: dict[str, Any], document: dict[str, Any], arrays: dict[str, bytes]) -> None:
        del table[name], arrays[name]

    return change


def array(name: str, dtype: str, shape: list[int], content: bytes) -> Change:
    def change(table: dict[str, Any], document: dict[str, Any], arrays: dict[str, bytes]) -> None:
        table[name], arrays[name] = {"dtype": dtype, "shape": shape}, content

    return change


def said(*path: str | int, value: Any) -> Change:
    def change(table: dict[str, Any], document: dict[str, Any], arrays: dict[str, bytes]) -> None:
        place: Any = document
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value

    return change


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


LIBRARY = "the safetensors library says"
W = {"dtype": "bfloat16", "shape": [2], "compensated": "split"}
LIES: dict[str, tuple[Change, str]] = {
    "version": (said("version", value=4), "it has version 4, and this penstock reads versions 1 to 3"),
    "version of none": (said("version", value=0), "it has version 0"),
    "version of other entries": (said("version", value=1), "its document has other entries than those of its version"),
    "version of no kind": (said("version", value=True), "it has version True"),
    "no version": (lambda table, document, arrays: document.pop("version"), "its document is damaged"),
    "missing moment": (missing("exp_avg/w"), "parameter 'w' has no exp_avg"),
    "missing step": (missing("step/w"), "parameter 'w' has no step, one int64"),
    "missing compensation": (missing("compensation/w"), "is 'split', but as an array it has none"),
    "extra array": (array("exp_avg/v", "F32", [1], bytes(4)), "it has an array 'exp_avg/v', which belongs to no parameter"),
    "extra field": (array("momentum/w", "F32", [1], bytes(4)), "it has an array 'momentum/w'"),
    "wrong shape": (array("exp_avg/w", "BF16", [2, 1], bytes(4)), r"exp_avg of 'w' has shape (2, 1), the parameter has (2,)"),
    "wrong dtype": (array("exp_avg/w", "I16", [2], bytes(4)), "exp_avg of 'w' has dtype int16"),
    "dtype of k": (array("compensation/w", "BF16", [2], bytes(4)), "compensation of 'w' has dtype bfloat16; it must be int16"),
    "dtype of p": (array("parameter/w", "F16", [2], bytes(4)), "parameter of 'w' has dtype float16; it must be bfloat16"),
    "dtype of step": (array("step/w", "F64", [], bytes(8)), "parameter 'w' has no step, one int64"),
    "foreign dtype": (array("exp_avg/w", "U32", [1], bytes(4)), "'exp_avg/w' has dtype 'U32'; known are F64"),
    "unknown dtype": (array("exp_avg/w", "F5", [8], bytes(4)), LIBRARY),
    "dtype of no kind": (array("exp_avg/w", [], [8], bytes(4)), LIBRARY),
    "negative shape": (array("exp_avg/w", "F32", [-1, -1], bytes(4)), LIBRARY),
    "shape of truths": (array("exp_avg/w", "F32", [True], bytes(4)), LIBRARY),
    "many axes": (array("exp_avg/w", "F32", [1] * 65, bytes(4)), "exp_avg of 'w' has shape (1, 1"),
    "not enough bytes": (array("exp_avg/w", "F32", [2], bytes(4)), LIBRARY),
    "nan": (array("exp_avg_sq/w", "F32", [2], floats(1, np.nan)), "exp_avg_sq of 'w' holds an infinity or a NaN"),
    "negative": (array("exp_avg_sq/w", "F32", [2], floats(1, -1)), "exp_avg_sq of 'w' holds a negative number"),
    "bad step": (array("step/w", "I64", [], b"\xff" * 8), "step of parameter 'w' is -1"),
    "nan hyperparameter": (said("groups", 0, "hyperparameters", "beta1", value=float("nan")), "its document is damaged"),
    "word for a number": (said("groups", 0, "hyperparameters", "beta1", value="high"), "'beta1' of group 0 is 'high'"),
    "list for a number": (said("groups", 0, "hyperparameters", "beta1", value=[]), "'beta1' of group 0 is []"),
    "unknown rule": (said("groups", 0, "rule", value="adagrad"), "rule='adagrad' is not known"),
    "rule of no kind": (said("groups", 0, "rule", value=None), "rule of a group cannot be None"),
    "groups of no kind": (said("groups", value={}), "the groups cannot be {}"),
    "group of no kind": (said("groups", 0, value=[]), "a group cannot be []"),
    "names of no kind": (said("groups", 0, "parameters", value="w"), "parameters of a group cannot be 'w'"),
    "name of no kind": (said("groups", 0, "parameters", value=[["w"]]), "a parameter of a group cannot be ['w']"),
    "in no group": (said("groups", value=[]), "every parameter must be in one group"),
    "parameters of no kind": (said("parameters", value=["w"]), "the parameters cannot be ['w']"),
    "parameter of no kind": (said("parameters", "w", value=3), "parameter 'w' cannot be 3"),
    "unknown parameter": (said("parameters", "v", value=W), "every parameter must be in one group; this is not so for 'v'"),
    "no random keys": (said("parameters", "w", value={**W, "compensated": "stochastic"}), "parameter 'w' cannot be"),
    "a random key that is a text": (
        said("parameters", "w", value={**W, "compensated": "stochastic", "random_keys": ["0"]}),
        "a random key of parameter 'w' is '0'",
    ),
    "unknown compensation": (said("parameters", "w", value={**W, "compensated": "ozaki"}), "compensation='ozaki' is not known"),
    "unknown parameter dtype": (said("parameters", "w", value={**W, "dtype": "int8"}), "parameter 'w' has dtype int8"),
    "another shape": (said("parameters", "w", value={**W, "shape": [3]}), "has shape (2,), the parameter has (3,)"),
    "shape of no kind": (said("parameters", "w", value={**W, "shape": ["2"]}), "a length in the shape of parameter 'w'"),
    "another entry": (said("executes", value="this"), "its document has other entries"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_that_its_digests_agree_with_is_one_sentence(file: Path, lie: str) -> None:
    change, sentence = LIES[lie]
    forged(file, change)
    assert sentence in refused(file)
    if lie not in ("nan", "negative", "bad step"):  # which only the arrays say
        with pytest.raises(InvalidArgumentError):
            describe(file)


def test_digests_of_other_arrays_are_refused(file: Path) -> None:
    table, document, data = taken_apart(file)
    document["digests"].pop("exp_avg/w")
    put_together(file, table, document, data, digests=False)
    assert "do not have the same names" in refused(file)
    document["digests"] = None
    put_together(file, table, document, data, digests=False)
    assert "do not have the same names" in refused(file)


def document(text: str) -> str:
    """A header with only this for metadata."""
    return json.dumps({"__metadata__": {"penstock": text}})


DOCUMENTS = {
    "no JSON": "{",
    "list": "[]",
    "no document": "{}",
    "number": '{"document":1}',
    "text": '{"document":"version"}',
    "without a digest": '{"document":{"version":1}}',
    "digest of no kind": '{"digest":[],"document":{"version":1}}',
    "wrong digest": '{"digest":"00","document":{"version":1}}',
    "deep": "[" * 100_000,
    "deep document": '{"document":{"version":' + "[" * 100_000,
    "endless number": '{"document":{"version":' + "9" * 100_000 + "}}",
    "surrogate": '{"digest":"","document":{"version":1,"rule":"\\ud800"}}',
    "nan": signed({"version": 1, "rule": float("nan")}),
    "blanks": signed({"version": 1}).replace(":1", ": 1"),
    "twice": signed({"version": 1}).replace('"version":1', '"version":1,"version":1'),
    "another entry": signed({"version": 1})[:-1] + ',"more":1}',
}


@pytest.mark.parametrize("damage", DOCUMENTS)
def test_a_damaged_document_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(with_header(document(DOCUMENTS[damage])))
    assert "its document is damaged" in refused(path)


@pytest.mark.parametrize("header", ["{}", '{"__metadata__":{}}', '{"__metadata__":{"format":"pt"}}'])
def test_the_file_of_another_program_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(with_header(header))
    assert "but not one that export_state or penstock convert wrote" in refused(path)


DEEP = 100_000
HUGE: dict[str, bytes] = {
    "header of 2^63 bytes": with_header("{}", length=2**63),
    "header of 99 MB": with_header("{}", length=99_000_000),
    "array of 4 TB": with_header('{"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'),
    "shapes of 2^126": with_header(f'{{"w":{{"dtype":"F32","shape":[{2**62},{2**62},0],"data_offsets":[0,0]}}}}'),
    "endless number": with_header('{"w":' + "9" * 100_000 + "}"),
    "deep lists": with_header('{"w":' + "[" * DEEP + "]" * DEEP + "}"),
    "deep objects": with_header('{"w":' * DEEP + "1" + "}" * DEEP),
    "no text": with_header(b'{"\xff":1}'),
    "no object": with_header("[1,2,3]"),
    "metadata of no kind": with_header('{"__metadata__":[]}'),
    "document of no kind": with_header('{"__metadata__":{"penstock":1}}'),
    "lines in a name": with_header('{"\\n":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
    "empty": b"",
    "seven bytes": b"1234567",
}


@pytest.mark.parametrize("claim", HUGE)
def test_an_error_of_the_safetensors_library_is_one_sentence(tmp_path: Path, claim: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(HUGE[claim])
    assert LIBRARY in refused(path)


CLAIMED = """
import sys
from pathlib import Path
from penstock.core.errors import InvalidArgumentError
from penstock.core.portable.file import describe, load

def peak():  # resource's counts the parent's, too
    rows = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0])

first, *others = sorted(Path(sys.argv[1]).iterdir())
load(first)  # which imports what is needed
before = peak()
for path in others:
    for read in (load, describe):
        try:
            read(path)
        except InvalidArgumentError:
            continue
        sys.exit(f"{path} was not refused")
print(peak() - before)
"""


def of_shape(shape: list[int]) -> Change:
    def change(table: dict[str, Any], document: dict[str, Any], arrays: dict[str, bytes]) -> None:
        document["parameters"]["w"]["shape"] = shape
        for name in ("exp_avg/w", "exp_avg_sq/w", "parameter/w", "compensation/w"):
            table[name]["shape"] = shape
            arrays[name] = b""

    return change


@pytest.mark.parametrize("shape", [[2**62, 0], [2**63, 0]])
def test_a_shape_that_no_array_can_have_is_refused(file: Path, shape: list[int]) -> None:
    """The library's header may have it: there are no bytes of it. Only reading it shows the fault."""
    forged(file, of_shape(shape))
    assert "cannot be read, " in refused(file)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_sizes_that_a_file_only_claims_cost_no_memory(file: Path) -> None:
    """Headers and arrays that are not there; also where everything else agrees with them."""
    folder = file.with_name("claims")
    folder.mkdir()
    (folder / "0 is whole").write_bytes(file.read_bytes())
    for number, content in enumerate(HUGE.values(), start=1):
        (folder / str(number)).write_bytes(content)
    (folder / "hole").write_bytes(with_header("{}", length=200_000_000))  # of so many bytes, which take no room on the disk
    os.truncate(folder / "hole", 300_000_000)
    whole = file.read_bytes()
    for number, shape in enumerate(([2**40], [2**62, 2**62, 0], [2**63], [10**4000])):
        file.write_bytes(whole)
        forged(file, of_shape(shape))
        file.rename(folder / f"shape {number}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", CLAIMED, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000  # KiB


class Executed:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_loading_executes_nothing(tmp_path: Path) -> None:
    path, trace = tmp_path / "file", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Executed(trace)))
    refused(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())  # which does it
    assert trace.exists()


def test_a_path_without_a_file_is_refused(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is not a regular file" in refused(tmp_path)
    assert "cannot be read: No such file or directory" in refused(tmp_path / "nowhere")
    assert "cannot be read: Not a directory" in refused(file / "below")
    with pytest.raises(InvalidArgumentError, match=r"cannot be read: (stat: )?embedded null"):
        load("a\0b")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    assert "it is not a regular file" in refused(tmp_path / "pipe")

    def denied(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    assert "cannot be read: Permission denied" in refused(file)


def test_long_names_do_not_make_long_sentences(file: Path) -> None:
    forged(file, array("exp_avg/" + "v" * 100_000, "F32", [1], bytes(4)))
    assert len(refused(file)) < 600 + len(str(file))
