"""The runs in JAX: jitted steps that donate their state, of a model with stacked layers: a scan, and the walk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from ..core.errors import InvalidArgumentError
from ..jax_frontend import adamw, init_train_state, make_release_step, make_train_step
from .initialisation import Parameters
from .jax_model import layer_stack, stacked
from .results import Report, Run
from .settings import ModelShape, Settings
from .text import Batches

SCAN, WALK = "JAX, scan that recomputes layers", "JAX, walk (gradient release)"

Ways = dict[str, Callable[[ModelShape, Any], Any]]
WAYS: Ways = {
    SCAN: lambda shape, tx: make_train_step(layer_stack(shape, rematerialised=True), tx),  # as the walk does, too
    WALK: lambda shape, tx: make_release_step(layer_stack(shape), tx),
}
"""By the name of the run: shape and transform -> step. Another run is another row."""
WEIGHT_DECAY = 1e-2  # torch's default; Optax's is 1e-4


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


def train(name: str, settings: Settings, parameters: Parameters, batches: Batches, report: Report) -> Run:
    """Train one run; arguments as in `torch_runs.train`. The seconds leave out compilation."""
    with configured(settings):
        tx = adamw(settings.learning_rate, weight_decay=WEIGHT_DECAY)
        params = stacked({name: jax.numpy.asarray(value) for name, value in parameters.items()}, settings.shape)
        state = init_train_state(tx, params, layered=name == WALK)
        step = WAYS[name](settings.shape, tx).lower(state, batches.batch(0)).compile()
        peak = _peak(step.memory_analysis())
        losses = []
        start = time.perf_counter()
        for number in range(settings.steps):
            state, metrics = step(state, batches.batch(number))
            losses.append(float(metrics["loss"]))
            report(losses[-1])
        seconds = time.perf_counter() - start
        final = _unstacked(jax.tree.map(np.array, state.params))
        of_state = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    return Run(name, losses, final, seconds, peak_step_bytes=peak, state_bytes=of_state)


def _peak(analysis: Any) -> int | None:
    """Return the most bytes that a compiled program holds, or None if XLA does not tell."""
    try:
        outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + outputs)
    except AttributeError:
        return None


def _unstacked(params: dict[str, Any]) -> Parameters:
    """Return parameters by the names of the initialisation."""
    layers = params["layers"]
    count = len(next(iter(layers.values())))
    of_layers = {f"layers.{number}.{name}": value[number] for number in range(count) for name, value in layers.items()}
    return {**params["outer"], **of_layers}
