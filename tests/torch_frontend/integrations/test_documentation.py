"""The examples of docs/trainers.md run as they stand, and what an integration says when its framework is missing."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from tests.support import tiny_llama  # noqa: F401  (no downloads)

from penstock.core.errors import MissingDependencyError

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


def test_a_missing_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    integrations = "penstock.torch_frontend.integrations"
    for name in [name for name in sys.modules if name.startswith((integrations, *(f"{each}." for each in FRAMEWORKS)))]:
        monkeypatch.delitem(sys.modules, name)
    for framework in FRAMEWORKS:
        monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.setattr("penstock.torch_frontend.integrations", importlib.import_module(integrations))  # and put back
    for framework in FRAMEWORKS:
        with pytest.raises(MissingDependencyError, match=r"clone of penstock run: pip install '\.\[trainers\]'"):
            importlib.import_module(f"{integrations}.{framework}")
