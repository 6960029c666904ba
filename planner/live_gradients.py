"""Measures the bytes of parameter gradients that are alive in a backward pass, independently of the release's ledger."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_frontend.autograd.graph import reachable


class Arrival(NamedTuple):
    """The time at which the gradient of one parameter existed.

    parameter: its name. seconds: since the timeline was started. live_bytes: of gradient alive, the arriving one included.
    """

    parameter: str
    seconds: float
    live_bytes: int


class LiveGradientMeter:
    """Counts the distinct storages of parameter gradients that are alive while backward passes run.

        live = sum of the bytes of every storage that some gradient was ever seen in, and that still exists

    Each gradient is seen when backward hands it to its parameter, before it is added to `.grad`, and again after that;
    gradients that are in `.grad` already are seen too. Only weak references are kept, so the meter prolongs no gradient's
    life, and a gradient that anybody else keeps counts for as long as they keep it, as whatever view. Gradients of
    activations are not counted. Use it as a context manager; the hooks are gone afterwards.

    Args:
        named_parameters: pairs of a name and a leaf tensor, dense; those without requires_grad are passed over.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.timeline: list[Arrival] = []
        self.peak = 0
        self._parameters = {name: tensor for name, tensor in named_parameters if tensor.requires_grad}
        self._storages: dict[StorageWeakRef, int] = {}
        self._handles: list = []
        self._start = time.perf_counter()

    def __enter__(self) -> LiveGradientMeter:
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_hook(self._arriving(name)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
        self.start_timeline()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def start_timeline(self) -> None:
        """Forget the arrivals so far, for instance before the next backward pass; the peak stays."""
        self.timeline = []
        self._start = time.perf_counter()
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                self._see(parameter.grad)
        self.peak = max(self.peak, self.live())

    def live(self) -> int:
        """Return the bytes of gradient alive, of those seen so far."""
        self._storages = {storage: size for storage, size in self._storages.items() if not storage.expired()}
        return sum(self._storages.values())

    def watch(self, loss: Tensor) -> None:
        """Record all gradients that one node of the graph of `loss` computes together, when the first exists.

        Without this they are seen one by one, as autograd delivers them. The hooks go with the graph.

        Args:
            loss: of the coming backward, not wrapped by anything that hides its graph.
        """
        known = set(self._parameters.values())
        for node in reachable([loss.grad_fn]):
            given = [getattr(following, "variable", None) in known for following, _ in node.next_functions]
            if sum(given) > 1:
                node.register_hook(self._handed_out(given))

    def _handed_out(self, given: list[bool]):  # type: ignore[no-untyped-def]
        def hook(gradients: tuple[Tensor | None, ...], _: object) -> None:
            for gradient, its in zip(gradients, given, strict=True):
                if its and gradient is not None:
                    self._see(gradient)
            self.peak = max(self.peak, self.live())

        return hook

    def _see(self, gradient: Tensor) -> None:
        storage = gradient.untyped_storage()
        if storage.nbytes():  # what a released gradient leaves in `.grad` has none
            self._storages.setdefault(StorageWeakRef(storage), storage.nbytes())

    def _arriving(self, name: str):  # type: ignore[no-untyped-def]
        def hook(gradient: Tensor) -> None:
            self._see(gradient)
            live = self.live()
            self.peak = max(self.peak, live)
            self.timeline.append(Arrival(name, time.perf_counter() - self._start, live))

        return hook

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        self._see(parameter.grad)
        live = self.live()
        self.peak = max(self.peak, live)
        if self.timeline:  # a copy made while accumulating belongs to the arrival that made it
            last = self.timeline[-1]
            self.timeline[-1] = last._replace(live_bytes=max(last.live_bytes, live))
