"""The gradient's norm where trainers look for it, although the gradients are gone.

After backward one released parameter, the smallest, has a tiny real `.grad`: [norm, 0, ...]. Unmodified code that unscales,
clips, logs or counts gradients then sees the right norm and finiteness. It is no gradient: it is withdrawn before step()
looks at gradients and before a real gradient of that parameter comes, and whoever rescaled it without having been declared
has rescaled gradients that were used already, which step() refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..clipping import NORM_EPS
from ..communication.shards import is_sharded, local, placements

ROUNDINGS = 8
"""Roundings of the holder's dtype that a declared rescaling may differ by: unscaling, a norm, a division, a product."""


class PublishedNorm:
    """At most one value, on one parameter. It goes with this object."""

    def __init__(self) -> None:
        self._holder: Tensor | None = None
        self._value: Tensor | None = None  # the tensor in .grad
        self._original: Tensor | None = None  # 0-d, what it was
        self._version = 0
        self._seen_unscaled = False  # once, by its value
        self._take_back: Callable[[], Any] = lambda: None

    def publish(self, norm: Tensor, parameters: Iterable[Tensor]) -> None:
        """Put a norm, infinite where the gradient is not finite, on the smallest of the parameters of the widest dtype."""
        self.withdraw()
        free = [parameter for parameter in parameters if parameter.grad is None and parameter.numel() > 0]
        if not free:
            return
        holder = min(free, key=lambda parameter: (-parameter.element_size(), parameter.numel()))
        largest = torch.finfo(holder.dtype).max
        norm = torch.where(torch.isfinite(norm), norm.clamp(max=largest), float("inf"))
        value = torch.zeros_like(holder, requires_grad=False, memory_format=torch.contiguous_format)
        self._original = norm.to(device=holder.device, dtype=holder.dtype)
        local(value).view(-1)[:1] = self._original if _is_first(value) else 0
        holder.grad = value
        self._holder, self._value, self._version = holder, value, value._version
        reference: weakref.ref[PublishedNorm] = weakref.ref(self)
        hook = holder.register_hook(lambda gradient: _withdraw(reference))  # runs before the gradient is added
        self._take_back = finalizer = weakref.finalize(self, _take_back, holder, value, hook)
        finalizer.atexit = False

    def withdraw(self) -> None:
        """Take it away, if it is there."""
        self._take_back()
        self._holder = self._value = self._original = None

    def make_way(self) -> None:
        """Gradients come that nobody announces: a sharded parameter runs no hook before they are added."""
        if is_sharded(self._holder):
            self.withdraw()

    @property
    def infinite(self) -> bool:
        """Whether an infinite norm is there. Waits for the device."""
        here = self._holder is not None and self._holder.grad is self._value
        return here and self._original is not None and float(self._original) == float("inf")

    def rescaled(self, *, scale: Callable[[], float], max_norm: float | None) -> tuple[Tensor, float, float] | None:
        """The parameter, what it carried and what it carries now, if somebody rescaled that.

        Dividing it by `scale()`, clipping it to `max_norm` (again and again, too), or both in this order, is declared, and
        counts as nothing.

        On an accelerator it waits for the device in the first step, as GradScaler does not let a tensor count that it was
        written to, and later only if the value was.
        """
        if self._holder is None or self._value is None or self._holder.grad is not self._value or not _is_first(self._value):
            return None
        if self._seen_unscaled and self._value.device.type != "cpu" and self._value._version == self._version:
            return None
        flat = local(self._value).view(-1)
        before, now = float(self._original), float(flat[0])  # type: ignore[arg-type]
        if before == float("inf"):
            return None
        declared = [(norm, norm) for norm in (before, before / scale())]
        if max_norm is not None:
            declared += [_clipped(norm, max_norm) for norm, _ in declared]
        tolerance = ROUNDINGS * torch.finfo(self._value.dtype).eps
        within = any(lowest * (1 - tolerance) <= now <= highest * (1 + tolerance) for lowest, highest in declared)
        if within and not bool(flat[1:].any()):
            self._seen_unscaled = True
            return None
        return self._holder, before, now


def _clipped(norm: float, max_norm: float) -> tuple[float, float]:
    """What `torch.nn.utils.clip_grad_norm_` makes of a norm: if it is called for ever, and if it is called once."""
    once = norm * min(1.0, max_norm / (norm + NORM_EPS))
    return min(once, max(0.0, max_norm - NORM_EPS)), once


def _withdraw(reference: weakref.ref[PublishedNorm]) -> None:
    published = reference()
    if published is not None:
        published.withdraw()


def _take_back(holder: Tensor, value: Tensor, hook: Any) -> None:
    if holder.grad is value:
        holder.grad = None
    hook.remove()


def _is_first(value: Tensor) -> bool:
    """Whether the first element is here, or a replica of it."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return True
    coordinates = zip(mesh.get_coordinate() or (), placements(value) or (), strict=False)
    return not any(coordinate for coordinate, placement in coordinates if not placement.is_replicate())
