"""The run in JAX: one jitted step that donates its state, layers unrolled, so that XLA frees each gradient at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from ..core.errors import InvalidArgumentError
from ..jax_frontend import init_train_state, make_train_step, stable_adamw
from .initialisation import Parameters
from .jax_model import make_loss
from .results import Report, Run
from .settings import Settings
from .text import Batches

NAME = "JAX, donated training step"


def find_device(name: str) -> Any:
    """JAX's first device of the platform that has this name in PyTorch or in JAX; "cuda:1" is the second one.

    Raises:
        InvalidArgumentError: there is no such device here.
    """
    platform, colon, index = name.partition(":")
    try:
        if not platform or (colon and not index.isdecimal()):
            raise ValueError(name)
        return jax.devices(platform)[int(index or 0)]
    except (RuntimeError, IndexError, ValueError) as error:
        raise InvalidArgumentError(f"JAX finds no device {name!r} here.") from error


@contextmanager
def configured(settings: Settings) -> Iterator[None]:
    """Configure JAX for the device and precision of the settings in this context.

    float64 has to be allowed before the first array is made. Products are computed in full: on accelerators JAX would
    otherwise round the factors of float32 products, and PyTorch does not.
    """
    with ExitStack() as stack:
        if settings.dtype == "float64":
            config: Any = jax.config
            stack.callback(config.update, "jax_enable_x64", config.jax_enable_x64)
            config.update("jax_enable_x64", True)
        stack.enter_context(jax.default_device(find_device(settings.device)))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def train(settings: Settings, parameters: Parameters, batches: Batches, report: Report) -> Run:
    """Train one run; arguments as in `torch_runs.train`. The seconds leave out compilation."""
    with configured(settings):
        tx = stable_adamw(settings.learning_rate)
        state = init_train_state(tx, {name: jax.numpy.asarray(value) for name, value in parameters.items()})
        step = make_train_step(make_loss(settings.shape), tx).lower(state, batches.batch(0)).compile()
        analysis = step.memory_analysis()
        losses = []
        start = time.perf_counter()
        for number in range(settings.steps):
            state, metrics = step(state, batches.batch(number))
            losses.append(float(metrics["loss"]))
            report(losses[-1])
        seconds = time.perf_counter() - start
        final = {name: np.array(value) for name, value in state.params.items()}
    return Run(NAME, losses, final, seconds, temporary_bytes=getattr(analysis, "temp_size_in_bytes", None))
