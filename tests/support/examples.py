"""The examples of the documentation, by heading. They run in the process of the tests: imports take longer than examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def examples(page: str) -> dict[str, str]:
    """The first Python example below each heading of a page; the page as a path from docs/."""
    sections = re.split(r"^###? ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)[1:]
    found = {text.splitlines()[0]: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in sections}
    return {heading: blocks[0] for heading, blocks in found.items() if blocks}


NEEDS = {
    "flax.linen": "flax",
    "flax.nnx": "flax",
    "flax.nnx.Optimizer": "flax",
    "MaxText: a scanned decoder": "flax",
    "equinox": "equinox",
    "Checkpoints": "orbax.checkpoint",
}


def run(heading: str, text: str) -> dict[str, Any]:
    """The names that an example defines."""
    if heading in NEEDS:
        pytest.importorskip(NEEDS[heading])
    if heading == "A loop of one's own" and not hasattr(pytest.importorskip("jax"), "new_ref"):
        pytest.skip("this jax has no references")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, heading, "exec", dont_inherit=True), names)  # without the __future__ of this module
    return names
