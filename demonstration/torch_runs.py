"""The three runs in PyTorch, which differ only in the lifetime of gradients."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ..core.errors import InvalidArgumentError
from ..planner.live_gradients import LiveGradientMeter
from ..torch_frontend import AdamW, release_gradients
from ..torch_frontend.releasable import ReleasableOptimizer
from .initialisation import Parameters
from .results import Report, Run
from .settings import Settings
from .text import Batches
from .torch_model import Transformer

ZEROED = "PyTorch, zero_grad(set_to_none=False)"
DROPPED = "PyTorch, zero_grad(set_to_none=True)"
RELEASED = "PyTorch, gradient release"
CODED = "PyTorch, release, 8-bit moments"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    set_to_none: of zero_grad(). released: under gradient release. optimizer: takes the parameters, and lr. exact: the numbers
    are those of the others; what is not is left out where runs must agree.
    """

    set_to_none: bool = True
    released: bool = False
    optimizer: Callable[..., ReleasableOptimizer] = AdamW
    exact: bool = True


WAYS = {
    ZEROED: Way(set_to_none=False),
    DROPPED: Way(),
    RELEASED: Way(released=True),
    CODED: Way(released=True, optimizer=functools.partial(AdamW, state_dtype="8bit"), exact=False),
}
"""By the name of the run. Another run is another row."""


def find_device(name: str) -> torch.device:
    """PyTorch's device of this name, "gpu" standing for "cuda".

    Raises:
        InvalidArgumentError: there is no such device here.
    """
    wanted = name.replace("gpu", "cuda", 1) if name.startswith("gpu") else name
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise InvalidArgumentError(f"PyTorch finds no device {name!r} here.") from error
    if device.type == "meta":
        raise InvalidArgumentError("PyTorch cannot train on the device 'meta', which holds no numbers.")
    return device


def train(name: str, settings: Settings, parameters: Parameters, batches: Batches, report: Report) -> Run:
    """Train one run.

    Args:
        name: one of `WAYS`.
        settings: of the demonstration.
        parameters: to start from; left as they are.
        batches: what to train on.
        report: called after every step with its loss.
    """
    way, device = WAYS[name], find_device(settings.device)
    model = Transformer(parameters, settings.shape).to(device)
    optimizer = way.optimizer(model.parameters(), lr=settings.learning_rate)
    losses: list[float] = []
    timeline: list[int] = []
    with ExitStack() as stack:
        meter = stack.enter_context(LiveGradientMeter(model.named_parameters()))
        if way.released:
            stack.enter_context(release_gradients(model, optimizer))
        start = time.perf_counter()
        for step in range(settings.steps):
            meter.start_timeline()
            loss = model.loss(torch.from_numpy(batches.batch(step)).to(device, torch.int64))
            loss.backward()  # with release, the parameters are updated here
            timeline = [*(arrival.live_bytes for arrival in meter.timeline), meter.live()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=way.set_to_none)
            losses.append(loss.item())
            report(losses[-1])
        seconds = time.perf_counter() - start
    tensors = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    return Run(
        name,
        losses,
        model.to_numpy(),
        seconds,
        peak_gradient_bytes=meter.peak,
        timeline=timeline,
        state_bytes=sum(tensor.nbytes for tensor in tensors),
    )
