"""What a gradient goes through before the optimizer uses it, unscaling and clipping, and the norm that is shown of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...core.errors import Refused
from ..clipping import clip_by_norm_, clip_coefficient
from ..communication.shards import local
from .measurement import Measurement
from .published_norm import PublishedNorm


class Scaler(Protocol):
    """What release needs of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """What losses are multiplied by now."""
        ...


class Conditioning:
    """Unscaling and clipping of one step, and its norm.

    Attributes:
        last_norm: see `Release`.
        needs_whole: the whole gradient must be known before the first update.

    Args:
        max_norm: of the whole gradient (clipping="exact") or of each one ("per_tensor"); None: no clipping.
        scaler: that losses are scaled by, if any.
        order: the parameters in the optimizer's order; norms are summed in it.
        publishes: show the norm to trainers.
    """

    def __init__(
        self,
        *,
        max_norm: float | None,
        clipping: str,
        scaler: Scaler | None,
        order: Callable[[], list[Tensor]],
        publishes: bool,
    ) -> None:
        self.last_norm: Tensor | None = None
        self.max_norm = max_norm if clipping == "exact" else None
        self.max_norm_of_each = max_norm if clipping == "per_tensor" else None
        self.scaler = scaler
        self.publishes = publishes
        self.needs_whole = self.max_norm is not None or scaler is not None
        self._order = order
        self._published = PublishedNorm()
        self._measured = Measurement()
        self._decided_norm: Tensor | None = None  # of the gradients that two passes have used in this step
        self._decided_scale: float | None = None
        self._factors: tuple[Tensor | float, ...] | None = None

    @property
    def decided(self) -> bool:
        """Whether what gradients are multiplied by is known, from a look at the whole gradient."""
        return self._factors is not None

    def require_decided(self, parameter: Tensor, describe: Callable[[Tensor], str]) -> None:
        """Raise `Refused` if a gradient is about to be used without a look at the whole that it needs."""
        if not self.needs_whole or self.decided:
            return
        if self.scaler is not None:
            raise Refused(
                f"{describe(parameter)}: with a scaler, the first update needs to know that the whole gradient is finite. Call "
                "scaler.scale(release.guard(loss)).backward(), with all of the loss in guard(), or use accumulation='hold'."
            )
        raise Refused(
            f"{describe(parameter)}: max_norm={self.max_norm} needs the norm of the whole gradient before the first update. "
            "Call release.guard(loss).backward(), with all of the loss in guard(), or use accumulation='hold', or "
            "clipping='per_tensor'."
        )

    def scale(self) -> float:
        """What the loss, and so every gradient, is multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Make of gradients, in place, what the optimizer is to see."""
        for gradient in map(local, gradients):
            for factor in self._factors or ():
                gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)
        if self.max_norm_of_each is not None:
            clip_by_norm_(gradients, self.max_norm_of_each)

    # -- the norm -------------------------------------------------------------------------------------------------------

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        """A gradient that is used without a look at the whole: the norm adds up."""
        if self.publishes and not self.decided:
            self._measured.take(parameter, gradient)

    def conclude(self) -> None:
        """`last_norm` of what was taken in this step."""
        if self._measured.parameters:
            norm = self._measured.norm(self._order())
            before = self._decided_norm
            self.last_norm = norm if before is None else torch.hypot(norm, before.to(norm.device))

    def publish(self) -> None:
        """Show the norm of what was taken in this step."""
        self.conclude()
        if self.publishes and self._measured.parameters and self.last_norm is not None:
            self._published.publish(self.last_norm, self._measured.parameters)

    @contextlib.contextmanager
    def decide(self, measured: Measurement) -> Iterator[bool]:
        """Gradients in this context are those that were measured, as they came from a scaled loss.

        They are unscaled and clipped; False if they must not be used, as they are not finite. Afterwards the norm is shown.
        """
        scale = self._decided_scale = self.scale()
        scaled_norm = measured.norm(self._order())
        self.last_norm = self._decided_norm = scaled_norm / scale
        finite = measured.finite
        if finite:
            # Rounded to the gradient's dtype once, as GradScaler has it: the numbers are the same bit for bit.
            self._factors = () if self.scaler is None else (1.0 / scale,)
            with self._clipped():
                yield True
        else:
            yield False
        if self.publishes:
            self._published.publish(scaled_norm if finite else torch.full_like(scaled_norm, torch.inf), measured.parameters)

    @contextlib.contextmanager
    def decide_waiting(self, gradients: dict[Tensor, Tensor]) -> Iterator[None]:
        """As `decide`, of gradients that step() is about to use: unscaled already, and judged."""
        for parameter, gradient in gradients.items():
            self.take(parameter, gradient)
        if not gradients:
            yield
            return
        self.conclude()
        with self._clipped():
            yield

    @contextlib.contextmanager
    def _clipped(self) -> Iterator[None]:
        if self.max_norm is not None and self.last_norm is not None:
            self._factors = (*(self._factors or ()), clip_coefficient(self.last_norm, self.max_norm))
        try:
            yield
        finally:
            self._factors = None

    # -- boundaries -----------------------------------------------------------------------------------------------------

    def check(self, describe: Callable[[Tensor], str]) -> None:
        """Raise `Refused` if the gradients were rescaled, undeclared, after they had been used."""
        changed = self._published.rescaled(scale=self.scale, max_norm=self.max_norm)
        if changed is not None:
            holder, before, now = changed
            raise Refused(
                "the gradients were rescaled between backward() and optimizer.step(), when they had been used already: "
                f"{describe(holder)} carries their norm, which went from {before:.6g} to {now:.6g}. Declare it: clipping as "
                "release_gradients(max_norm=...) with release.guard(loss), loss scaling as scaler=..., and scale the loss "
                "instead of its gradients; optimizer.zero_grad() closes this step."
            )

    def check_waiting(self, parameters: Iterable[Tensor], describe: Callable[[Tensor], str]) -> None:
        """Raise `Refused` if gradients wait that the norm of this step should have been of as well."""
        late = next(iter(parameters), None)
        if late is not None and self.max_norm is not None and self._decided_norm is not None:
            raise Refused(
                f"{describe(late)}: a gradient lies in `.grad`, set by hand or left by release.paused(), which the norm that "
                "the others were clipped by does not include. Let it come from the loss that release.guard() is given, or use "
                "accumulation='hold'; optimizer.zero_grad() discards it."
            )

    @property
    def overflow_published(self) -> bool:
        """The gradient was not finite, and step() was not called since. May wait for the device."""
        return self._published.infinite

    @property
    def overflow_to_be_judged(self) -> bool:
        """... nor was the scaler's update(), which changes its scale after an overflow."""
        return self.overflow_published and self._decided_scale == self.scale()

    def make_way(self) -> None:
        """Gradients come that are not released."""
        self._published.make_way()

    def withdraw(self) -> None:
        """Show no norm."""
        self._published.withdraw()

    def close(self) -> None:
        """The step is over."""
        self._published.withdraw()
        self._measured = Measurement()
        self._decided_norm = self._decided_scale = None
