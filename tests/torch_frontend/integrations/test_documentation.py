"""The examples of docs/trainers.md run as they stand, and what an integration says when its framework is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import tiny_llama  # noqa: F401  (no downloads)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trainers.md").read_text(), re.DOTALL)
FRAMEWORKS = ("accelerate", "lightning", "transformers")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch's trees
def test_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the frameworks take long to import."""
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], f"docs/trainers.md, example {number + 1}", "exec"), {"__name__": "__main__"})


def test_there_is_an_example_for_each_framework() -> None:
    for framework in FRAMEWORKS:
        assert any(f"integrations.{framework} import" in example for example in EXAMPLES)


def test_a_missing_framework_names_the_extra() -> None:
    lines = ["import importlib, sys", "from penstock.core.errors import MissingDependencyError"]
    for framework in FRAMEWORKS:
        lines += [
            f"sys.modules[{framework!r}] = None",
            f"try: importlib.import_module('penstock.torch_frontend.integrations.{framework}')",
            "except MissingDependencyError as error: assert 'penstock[trainers]' in str(error)",
            f"else: sys.exit({framework!r})",
        ]
    lines += ["import penstock.torch_frontend.integrations"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
