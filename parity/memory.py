r"""The section "memory": the peak of gradient memory under each policy of release.

In PyTorch every storage of a gradient is watched (`planner.live_gradients`), and the peak is compared with what a ledger of
arriving and freed gradients says, to the byte, and so is the release's own ledger. For a model of n equal layers, b bytes each:

    release, state, clip, scale    b             one gradient is alive
    hold, pause                    n*b + b       all of them, and the one that comes and is added (in no release's ledger)

In JAX nobody can look into a compiled program, but XLA says how many bytes it needs. For the walk over n layers, b bytes of
parameters each, what is neither state (donated: it is updated in place) nor saved inputs of layers is at most

    4b    slices of one layer: parameters, two moments, gradient
    3b    the new parameters and moments, before they are written where the old ones were
    1b    under clipping, with a loss scale or with micro-batches: the gradient once more, as it is scaled or summed up

and a few activations of one layer, whatever n is; all gradients would be n*b.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..core.release import Ledger
from .backends.calls import FAILURES, reason
from .backends.protocol import Backend
from .bounds import Bound
from .compare import Finding, Refusal, Row, against, failed
from .progress import Progress, each

LAYERS, WIDTH, MICRO_BATCHES, STEPS = 12, 32, 4, 2
ONE = WIDTH * WIDTH * 4
"""Bytes of one layer's gradient in the torch model."""

SLICES = 4 + 3
"""Layers' worth of bytes that the walk may need, without the gradient's second copy; the module says why."""

ACTIVATIONS = 8
"""Of one layer: its input and output, what is between them, and their cotangents."""


@dataclasses.dataclass(frozen=True)
class MemoryCase:
    """One policy.

    accumulation, max_norm: of `release_gradients`. micro_batches: backward passes in a step. adds_up: their gradients wait
    for each other. paused: all but the last pass. scales: by a loss scale.
    """

    policy: str
    accumulation: str | None = None
    max_norm: float | None = None
    micro_batches: int = 1
    adds_up: bool = False
    paused: bool = False
    scales: bool = False

    @property
    def name(self) -> str:
        """memory/policy."""
        return f"memory/{self.policy}"


CASES = (
    MemoryCase("release"),
    MemoryCase("hold", "hold", micro_batches=MICRO_BATCHES, adds_up=True),
    MemoryCase("state", "state", micro_batches=MICRO_BATCHES),
    MemoryCase("clip", max_norm=1.0),
    MemoryCase("scale", scales=True),
    MemoryCase("pause", micro_batches=2, adds_up=True, paused=True),
)

Measured = list[tuple[str, int, int, int, dict[str, Any]]]
"""Of each quantity: its name, the bytes found, the bytes there should be, how many more are allowed, and data for figures."""


@runtime_checkable
class ShowsMemory(Protocol):
    """A backend whose gradient memory can be measured."""

    def refuses_memory(self, case: MemoryCase) -> str | None:
        """Return why it does not run this case, or None if it does."""
        ...

    def measure_memory(self, case: MemoryCase) -> Measured:
        """Run or compile it, and return the bytes."""
        ...


class Memory:
    """The section "memory" of the suite."""

    name = "memory"
    title = "Live gradient bytes: measured against the ledger in PyTorch, XLA's own account against a bound in JAX"

    def cases(self, *, quick: bool) -> list[MemoryCase]:
        return list(CASES)

    def run(
        self, backends: Sequence[Backend], cases: Sequence[MemoryCase], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        yield from each(cases, backends, progress, run_case)


def run_case(backend: Backend, case: MemoryCase) -> list[Finding]:
    """Run one policy on one backend. An error becomes a broken row."""
    if not isinstance(backend, ShowsMemory):
        return [Refusal(case.name, backend.name, "its gradients cannot be seen (`parity.memory.ShowsMemory`)")]
    why = reason(backend, "refuses_memory", case)
    if why is not None:
        return [Refusal(case.name, backend.name, why)]
    try:
        return [_row(case, backend.name, *each) for each in backend.measure_memory(case)]
    except FAILURES as error:
        return [failed(case.name, backend.name, 0, error, "bytes", at="measure_memory()")]


def _row(case: MemoryCase, backend: str, quantity: str, found: int, expected: int, allowed: int, data: dict[str, Any]) -> Row:
    bound = Bound(float(allowed), np.array([float(allowed)]))
    value, true = (np.array([float(nbytes)]) for nbytes in (found, expected))
    row = against(case.name, backend, STEPS, quantity, value, true, bound, np.ones_like)
    return dataclasses.replace(row, data={"policy": case.policy, "found": found, "expected": expected, **data})


# -- PyTorch ------------------------------------------------------------------------------------------------------------


def expected_peak(case: MemoryCase, *, arriving: bool) -> int:
    """Return the expected peak of `LAYERS` gradients of `ONE` bytes each.

    Args:
        arriving: a gradient that is added to one that waits counts until it is.
    """
    ledger = Ledger()
    for _ in range(STEPS):
        for number in range(case.micro_batches):
            for layer in range(LAYERS):
                if arriving:
                    ledger.arrive("arriving", ONE)
                    if not (case.adds_up and number > 0):
                        ledger.free("arriving")  # it becomes the one that waits
                ledger.arrive(layer, ONE)
                ledger.free("arriving")
                if not case.adds_up:
                    ledger.free(layer)
        for layer in range(LAYERS):
            ledger.free(layer)
    return ledger.peak


def torch_memory(case: MemoryCase, backend: str, device: str) -> Measured:
    """Two steps of equal layers under `release_gradients`."""
    import torch

    from .. import torch_frontend
    from ..planner.live_gradients import LiveGradientMeter

    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)
    model.to(device)
    optimizer = torch_frontend.StableAdamW(model.parameters(), lr=1e-3, backend=backend)
    scaler = torch.amp.GradScaler(device, init_scale=2.0, enabled=case.scales)
    with LiveGradientMeter(model.named_parameters()) as meter:
        release = torch_frontend.release_gradients(
            model, optimizer, max_norm=case.max_norm, accumulation=case.accumulation, scaler=scaler
        )
        for _ in range(STEPS):
            meter.start_timeline()
            for number in range(case.micro_batches):
                paused = case.paused and number < case.micro_batches - 1
                with release.paused() if paused else contextlib.nullcontext():
                    batch = torch.randn(4, WIDTH, generator=generator).to(device)
                    loss = model(batch).square().mean() / case.micro_batches
                    meter.watch(loss)
                    scaler.scale(release.guard(loss)).backward()
                    del loss
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        data = {
            "layers": LAYERS,
            "layer": ONE,
            "timeline": [[arrival.parameter, arrival.live_bytes] for arrival in meter.timeline],
        }
        left = meter.live()
    return [
        ("peak, measured", meter.peak, expected_peak(case, arriving=True), 0, data),
        ("peak, ledger", release.ledger.peak, expected_peak(case, arriving=False), 0, data),
        ("left, measured", left, 0, 0, data),
    ]


# -- JAX ----------------------------------------------------------------------------------------------------------------

WALKED_LAYERS, WALKED_WIDTH = 16, 64


def walk_refusal(case: MemoryCase) -> str | None:
    """Return why the walk does not run a policy, or None."""
    return "a step of JAX keeps no gradient for the next one, so that nothing can be paused" if case.paused else None


def walk_memory(case: MemoryCase) -> Measured:
    """XLA's memory analysis of a walk over equal layers. It is compiled for these shapes, and not run."""
    import jax
    import jax.numpy as jnp

    from .. import jax_frontend

    stack = jax_frontend.LayerStack(
        lambda outer, batch: batch,
        lambda params, x: x + jnp.tanh(x @ params["up"]) @ params["down"],
        lambda outer, x, batch: jnp.mean(jnp.square(x)),
    )
    matrix = jax.ShapeDtypeStruct((WALKED_LAYERS, WALKED_WIDTH, WALKED_WIDTH), "float32")
    tx = jax_frontend.stable_adamw(1e-3)
    scale = 2.0**10 if case.scales else None

    def start() -> Any:
        params = {"outer": {}, "layers": {name: jnp.zeros(matrix.shape, matrix.dtype) for name in ("up", "down")}}
        return jax_frontend.init_train_state(tx, params, loss_scale=scale)

    state = jax.eval_shape(start)
    step = jax_frontend.make_release_step(
        stack,
        tx,
        microbatches=case.micro_batches,
        max_norm=case.max_norm,
        accumulation=None if case.accumulation == "hold" else case.accumulation,
    )
    batch = jax.ShapeDtypeStruct((case.micro_batches, WALKED_WIDTH), "float32")
    analysis: Any = step.lower(state, batch).compile().memory_analysis()
    layer = _nbytes(state.params["layers"]) // WALKED_LAYERS
    slices = SLICES + (case.scales or case.max_norm is not None or case.micro_batches > 1)
    activations = (WALKED_LAYERS + ACTIVATIONS) * _nbytes(batch)  # the inputs of all layers are saved
    peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    beyond = peak - analysis.alias_size_in_bytes - _nbytes(state)
    data = {"layers": WALKED_LAYERS, "layer": layer, "temporaries": analysis.temp_size_in_bytes}
    return [
        ("temporary bytes, XLA", beyond, 0, slices * layer + activations, data),
        ("donated bytes, XLA", analysis.alias_size_in_bytes, _nbytes(state), 0, data),
    ]


def _nbytes(tree: Any) -> int:
    import jax

    return sum(int(np.prod(leaf.shape, dtype=int)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
