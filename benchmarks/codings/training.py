"""Training of rows, one process a framework, and the file of their losses."""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.support import write_result

from .rows import LAST, QUICK, Settings
from .verdicts import goals

ONE_THREAD = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}


def mean_loss(framework: str, name: str, settings: Settings, seed: int) -> float:
    """Train with a coding; return the mean loss of the last steps."""
    losses = importlib.import_module(f"benchmarks.codings.{framework}_training").train(name, settings, seed)
    return statistics.fmean(losses[-LAST:])


def use_one_thread() -> None:
    """Set up a process that has imported no framework yet."""
    os.environ.update(ONE_THREAD)


def worker(*, quick: bool) -> Executor:
    """Return what trains one row after the other; a process of its own unless the run is quick."""
    if quick:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), use_one_thread)


def measure(names: Sequence[str], seeds: int, frameworks: Sequence[str], path: Path, *, quick: bool) -> dict[str, Any]:
    """Train what the file does not have yet, and write the file after every run; return its content."""
    settings = QUICK if quick else Settings()
    content: dict[str, Any] = {"settings": dataclasses.asdict(settings), "losses": {}}
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("settings") == content["settings"]:
        content["losses"] = before["losses"]
    losses = content["losses"]
    workers = {framework: worker(quick=quick) for framework in frameworks}
    runs = {}
    for framework in frameworks:
        rows = losses.setdefault(framework, {})
        for name in names:
            for seed in (seed for seed in range(seeds) if str(seed) not in rows.get(name, {})):
                run = workers[framework].submit(mean_loss, framework, name, settings, seed)
                runs[run] = framework, name, str(seed)
    try:
        console = Console(stderr=True)
        for run in track(as_completed(runs), "training", len(runs), console=console, transient=True):
            framework, name, seed = runs[run]
            losses[framework].setdefault(name, {})[seed] = run.result()
            write_result(path, {**content, "goals": [goal.as_json() for goal in goals(losses)]})
    finally:
        for each in workers.values():
            each.shutdown(cancel_futures=True)
    return content
