"""The README's examples run as they stand, and it names the commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import front_page, pages
from benchmarks.bench import figure
from benchmarks.support import result
from tests.support.examples import ROOT, run

README = (ROOT / "README.md").read_text()
EXAMPLES = dict(zip(("PyTorch", "JAX"), re.findall(r"```python\n(.*?)```", README, re.DOTALL), strict=True))


@pytest.mark.parametrize("framework", EXAMPLES)
def test_examples_run_and_are_short(framework: str) -> None:
    if framework == "JAX":
        pytest.importorskip("optax")
    run(framework, EXAMPLES[framework])
    assert EXAMPLES[framework].count("\n") <= 16


@pytest.mark.parametrize("page", front_page.PAGES, ids=lambda page: page.name)
def test_its_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert front_page.made_again(text) == text, "make it again: python -m benchmarks.pages"


def test_the_figure_shows_the_results() -> None:
    """The picture holds a number of what it shows: drawing it again gives other bytes with another matplotlib."""
    picture = (ROOT / "docs" / pages.PNG).read_bytes()
    assert figure.digest(result("bench")).encode() in picture, "make it again: python -m benchmarks.pages"


def test_figures_in_its_sentences_are_those_of_the_results() -> None:
    steps = result("peak_memory_jax")["figures"]
    scan, walk = (f"{steps[name]['adamw']['peak_over_parameters']:.2f}" for name in ("scan", "make_release_step"))
    assert f"a donated scan\n{scan}, the walk {walk}, where" in README


def test_the_commands_it_names_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets | {"a"}
    assert {"demo", "test"} <= targets
