"""The guide to portable state: its examples and commands run as they stand, and it describes the file that is written."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from tests.support.examples import ROOT, examples, run
from tests.support.portable_states import taken_apart

from penstock.__main__ import main
from penstock.core.portable.file import describe
from penstock.core.portable.safetensors import VERSION
from penstock.core.portable.state import array_names, scale_name
from penstock.core.rules import RULES

TEXT = (ROOT / "docs" / "portable_state.md").read_text()
EXAMPLES = examples("portable_state.md")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_example_was_found() -> None:
    assert len(EXAMPLES) == TEXT.count("```python")


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_examples_run(heading: str) -> None:
    run(heading, EXAMPLES[heading])


def test_the_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    run("A state of one's own", EXAMPLES["A state of one's own"])
    (table,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    Path("names.json").write_text(table)
    (commands,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for command in commands.splitlines():
        name, *arguments = shlex.split(command)
        assert name == "penstock"
        assert main(arguments) == 0, capsys.readouterr().err
    layers = {f"blocks.{number}.weight" for number in range(4)}
    assert set(describe("renamed.safetensors").parameters) == {*layers, "lm_head.weight"}
    assert Path("back.safetensors").read_bytes() == Path("state.safetensors").read_bytes()
    assert describe("small.safetensors").groups[0].rule == "stable_adamw"


def test_it_describes_the_file_that_is_written() -> None:
    run("A state of one's own", EXAMPLES["A state of one's own"])
    _, document, _ = taken_apart(Path("state.safetensors"))
    section = TEXT[TEXT.index("## The file") : TEXT.index("## When something goes wrong")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(document)
    arrays = {name for rule in RULES.values() for name in array_names(rule)}
    scales = {scale_name(field.name) for rule in RULES.values() for field in rule.fields}
    assert set(re.findall(r"`(\w+)/NAME`", section)) == {"step", "FIELD_scale", *arrays - scales}
    assert f"| `version` | {VERSION};" in section
    assert all(f"`{rule}`" in section for rule in RULES)
    about = describe("state.safetensors").parameters["head"]
    keys = {field.name for field in dataclasses.fields(about)} - {"step", "dtypes"}
    assert set(document["parameters"]["head"]) == keys - {"random_keys"}  # only where it is rounded stochastically
    assert all(f'"{key}"' in section for key in keys)
