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
    assert {*steps, "States in 8 bits", "Donation", "Checkpoints", "Many devices"} == set(GUIDE)


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


def table(start: str) -> list[list[str]]:
    """The cells of the guide's table that starts with a text, line by line."""
    text = (ROOT / "docs" / "jax.md").read_text()
    lines = text[text.index(start) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("start", "result"),
    [
        ("| step | optax", "peak_memory_jax.json"),
        ("| step, on 4 devices", "peak_memory_jax_4_devices.json"),
        ("| step, 12 layers in bfloat16", "peak_memory_jax_codings.json"),
    ],
    ids=["one device", "four devices", "states in 8 bits"],
)
def test_the_memory_tables_equal_the_measured_figures(start: str, result: str) -> None:
    (_, *optimizers), _, *lines = table(start)
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
    coded = measured("peak_memory_jax_codings.json")["make_release_step"]
    assert coded["8bit, stochastic"] < coded["8bit, split8"] < coded["optax.adamw"] < coded["adamw"]


def test_the_table_of_sizes_equals_the_measured_figures() -> None:
    figures = measured("peak_memory_jax_sizes.json")
    (_, *steps), _, *lines = table("| model | scan")
    assert [f"{size}: {step}" for size, *_ in lines for step in steps] == list(figures)
    for size, *cells in lines:
        assert cells == [" / ".join(f"{x:.2f}" for x in figures[f"{size}: {step}"].values()) for step in steps]


def test_no_walk_takes_more_than_a_donated_scan_that_recomputes_its_layers() -> None:
    """For every size and optimizer; and in bfloat16 at most the state, the outer gradient (1.0) and 0.5."""
    figures = measured("peak_memory_jax_sizes.json")
    sizes = {name.split(": ")[0] for name in figures}
    assert len(sizes) == 8
    for size in sizes:
        for optimizer, walk in figures[f"{size}: make_release_step"].items():
            assert walk <= figures[f"{size}: scan, remat"][optimizer] + 2e-5, (
                size,
                optimizer,
            )  # its metrics, and numbers of a loop
    low = figures["12 layers, bfloat16: make_release_step"]
    assert low["adamw"] <= 5.0 + 1.5
    assert low["stable_adamw"] <= 4.0 + 1.5
