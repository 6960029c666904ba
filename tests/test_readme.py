"""The README's examples run as they stand, and it names the commands that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: next(line for line in text.splitlines() if "import" in line))
def test_examples_run(example: str) -> None:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_an_example_for_each_way_of_use() -> None:
    assert len(EXAMPLES) == 3


def test_the_commands_it_names_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets | {"a"}
    assert {"demo", "test"} <= targets
