"""The README's examples run as they stand, and it names the commands that there are."""

from __future__ import annotations

import re

import pytest
from tests.support.examples import ROOT, examples, run

README = (ROOT / "README.md").read_text()
EXAMPLES = examples("../README.md")


@pytest.mark.parametrize("way", EXAMPLES)
def test_examples_run(way: str) -> None:
    run(way, EXAMPLES[way])


def test_there_is_an_example_for_each_way_of_use() -> None:
    assert len(EXAMPLES) == README.count("```python") == 3


def test_the_commands_it_names_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets | {"a"}
    assert {"demo", "test"} <= targets
