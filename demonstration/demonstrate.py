"""Runs the demonstration: train, compare, print, draw."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import figure, jax_run, torch_runs
from .initialisation import initial_parameters, nbytes
from .results import MIB, Run, relative_difference
from .settings import AGREEMENT, Settings
from .table import closing_table
from .text import Batches, read_text

if TYPE_CHECKING:
    from .initialisation import Parameters

WIDTH = 120  # characters, if the output is not a terminal


def check(settings: Settings) -> np.ndarray:
    """Raise if a setting is wrong, before anything runs.

    Returns:
        The text, uint8.

    Raises:
        InvalidArgumentError: no such device, a text that cannot be read or is too short, or nowhere to write the figure.
    """
    figure.check_output(settings.output)
    text = read_text(settings.text, at_least=settings.shape.context + 1)
    torch_runs.find_device(settings.device)
    jax_run.find_device(settings.device)
    return text


def train_all(settings: Settings, parameters: Parameters, text: np.ndarray, console: Console) -> list[Run]:
    """Train all runs one after the other, from the same parameters and batches, with progress bars."""
    batches = Batches(text, batch_size=settings.batch_size, context=settings.shape.context, seed=settings.seed)
    compared = settings.dtype == "float64"  # all runs must agree
    names = [name for name, way in torch_runs.WAYS.items() if way.exact or not compared]
    trainings = {name: partial(torch_runs.train, name) for name in names}
    trainings |= {name: partial(jax_run.train, name) for name in jax_run.WAYS}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for name, train in trainings.items():
            state = "compiling" if name in jax_run.WAYS else "starting"
            task = progress.add_task(f"{name:{max(map(len, trainings))}}", total=settings.steps, state=state)
            throughput = Throughput(settings.tokens_per_step)

            def report(loss: float, task=task, throughput=throughput) -> None:  # type: ignore[no-untyped-def]
                state = f"loss {loss:6.4f}  {throughput.after_a_step():7,.0f} tokens/s"
                progress.update(task, advance=1, state=state)

            runs.append(train(settings, parameters, batches, report))
    return runs


class Throughput:
    """Tokens per second since the first step, which may have compiled something and is left out.

    Args:
        tokens_per_step: that one step learns from.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._begin = time.perf_counter()
        self._steps = -1

    def after_a_step(self) -> float:
        """Count a step; called after every step."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps == 0:
            rate = self._tokens_per_step / (now - self._begin)
            self._begin = now
            return rate
        return self._steps * self._tokens_per_step / (now - self._begin)


def demonstrate(settings: Settings, console: Console) -> bool:
    """Train, compare, print the table and then write the figure.

    Args:
        settings: of the demonstration.
        console: to print on.

    Returns:
        Whether the runs agree: always for float32, where rounding drives them apart; for float64, whether all parameters
        of all runs are within `AGREEMENT` of the first run's.

    Raises:
        InvalidArgumentError: see `check`; nothing has happened then.
        RefusedError: the figure could not be written; the table has been printed.
    """
    text = check(settings)
    started = time.perf_counter()
    parameters = initial_parameters(settings.shape, seed=settings.seed, dtype=settings.dtype)
    size, count = nbytes(parameters), sum(value.size for value in parameters.values())
    model = f"{count / 1e6:.2f} million parameters, {settings.shape.layers} layers, {settings.dtype}, AdamW"
    source = "the source of Python's standard library" if settings.text is None else str(settings.text)
    console.print(f"{model}; {settings.steps} steps on {source}", markup=False, soft_wrap=True)
    runs = train_all(settings, parameters, text, console)
    tokens = settings.steps * settings.tokens_per_step
    console.print(
        closing_table(runs, tokens=tokens, model=f"{model}: {size / MIB:.2f} MiB of gradient in all", parameter_bytes=size)
    )
    agreed = settings.dtype != "float64" or verdict(runs, settings.steps, console)
    figure.draw(runs, model=model, gradient_bytes=size, output=settings.output)
    seconds = time.perf_counter() - started
    console.print(f"written: {settings.output} ({seconds:.0f} s in all)", markup=False, soft_wrap=True)
    return agreed


def verdict(runs: list[Run], steps: int, console: Console) -> bool:
    """Print whether all runs agree with the first within `AGREEMENT`, and return it."""
    largest = np.max([relative_difference(run.parameters, runs[0].parameters) for run in runs])  # a NaN stays
    agreed = bool(largest <= AGREEMENT)  # a NaN does not agree
    console.print(
        f"{'agreed' if agreed else 'NOT AGREED'}: after {steps} steps in float64 all parameters of all runs are "
        f"{'within' if agreed else 'not within'} {AGREEMENT:.0e} of the first run's (largest difference {largest:.1e}).",
        markup=False,
        soft_wrap=True,
    )
    return agreed
