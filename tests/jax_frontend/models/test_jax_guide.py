"""The guide to training in JAX: its examples run as they stand, and its table is what was measured."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from tests.guide_support import ROOT, examples, run

GUIDE = examples("jax.md")


def test_there_is_an_example_for_every_use() -> None:
    assert {"Micro-batches, clipping, loss scaling", "Checkpoints", "Many devices", "A loop of one's own"} == set(GUIDE)


@pytest.mark.parametrize("heading", GUIDE)
def test_the_examples_run(heading: str) -> None:
    names = run(heading, GUIDE[heading])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.tree.map(np.array, names["state"].params)))


def test_the_memory_table_is_what_was_measured() -> None:
    text = (ROOT / "docs" / "jax.md").read_text()
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index("| step | optax") :].split("\n\n")[0].splitlines()
    ]
    measured = json.loads((ROOT / "benchmarks" / "results" / "peak_memory_jax.json").read_text())["figures"]
    header, _, *lines = shown
    assert [line[0] for line in lines] == list(measured)
    for name, *cells in lines:
        figures = [measured[name].get(optimizer) for optimizer in header[1:]]
        assert cells == ["-" if figure is None else f"{figure['peak_over_parameters']:.2f}" for figure in figures]
