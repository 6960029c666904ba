"""The examples of the guide to training in JAX run, and its tables equal the measured figures."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from tests.support.examples import ROOT, examples, run

GUIDE = examples("jax.md")


def test_there_is_an_example_for_every_use() -> None:
    steps = ("Micro-batches, clipping, loss scaling", "Evaluation, averages and metrics", "A loop of one's own")
    assert {*steps, "Donation", "Checkpoints", "Many devices"} == set(GUIDE)


@pytest.mark.parametrize("heading", GUIDE)
def test_the_examples_run(heading: str) -> None:
    names = run(heading, GUIDE[heading])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.tree.map(np.array, names["state"].params)))


def measured(name: str) -> dict[str, dict[str, float]]:
    """method -> optimizer -> peak bytes over the bytes of the parameters."""
    figures = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["figures"]
    return {
        method: {optimizer: parts["peak_over_parameters"] for optimizer, parts in by_optimizer.items()}
        for method, by_optimizer in figures.items()
    }


@pytest.mark.parametrize(
    ("start", "result"),
    [("| step | optax", "peak_memory_jax.json"), ("| step, on 4 devices", "peak_memory_jax_4_devices.json")],
    ids=["one device", "four devices"],
)
def test_the_memory_tables_equal_the_measured_figures(start: str, result: str) -> None:
    text = (ROOT / "docs" / "jax.md").read_text()
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index(start) :].split("\n\n")[0].splitlines()
    ]
    (_, *optimizers), _, *lines = shown
    figures = measured(result)
    assert [line[0] for line in lines] == list(figures)
    for name, *cells in lines:
        assert cells == [f"{figures[name][o]:.2f}" if o in figures[name] else "-" for o in optimizers]


def test_the_measured_figures_keep_the_promises() -> None:
    figures = measured("peak_memory_jax.json")
    assert figures["make_release_step"]["stable_adamw"] <= 3.35
    assert max(figures["make_release_step, 4 micro-batches"].values()) <= 3.40
    assert max(figures["make_release_step, max_norm"].values()) <= 3.40
    assert figures["make_release_step, 4 micro-batches into the moments"]["stable_adamw"] <= 3.30
    assert max(figures["make_train_step, unrolled, max_norm"].values()) <= 3.25
