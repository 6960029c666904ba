"""What the markers of one release know: its declared arguments, the norms of its gradients, and what to refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import RefusedError
from ...core.release import AFTER_ANOTHER_BACKWARD
from ..clipping import NORM_EPS
from ..communication.shards import Shard, sum_over_shards

if TYPE_CHECKING:
    from .marker import ReleasedGradient

ROUNDINGS = 8
"""Roundings by which a factor may differ from the declared one: unscaling, a norm, a division, a product."""


class MarkerContext:
    """What the markers of one release know: its declared arguments, and the norms of its gradients.

    It holds no parameter, as Python's garbage collector cannot see a cycle through `.grad`.

    Attributes:
        describe: returns the name of a parameter in errors, by its id.
        accepts_more: further gradients of a parameter go into its moments; otherwise they are refused.
        knows_norms: the gradient that was used is the whole one, so that its norm is defined.
        strict: setting a used gradient to zero before step() is refused.
        max_norm: the declared global norm, if any.
        scaled: a GradScaler was declared.
        squares: by the parameter's id, the sum of the squares of its unscaled local gradient, 0-d.
        norm: of all gradients, unscaled and before clipping, where guard() has measured it.
        finite: whether the whole gradient was finite, as far as that is known.
        judged: guard() has looked at the whole gradient of this step.
        refused: an error has told the user that this step cannot go on.
        measure_queued: records the norms of gradients that are queued, and otherwise measured with their update.
        after_refusal: called after a refusal, to drop the other gradients of that backward.
    """

    def __init__(
        self,
        describe: Callable[[int], str],
        *,
        accepts_more: bool = False,
        knows_norms: bool = True,
        strict: bool = True,
        max_norm: float | None = None,
        scaled: bool = False,
    ) -> None:
        self.describe = describe
        self.accepts_more = accepts_more
        self.knows_norms = knows_norms
        self.strict = strict
        self.max_norm = max_norm
        self.scaled = scaled
        self.squares: dict[int, Tensor] = {}
        self.norm: Tensor | None = None
        self.finite = True
        self.measure_queued: Callable[[], None] = lambda: None
        self.after_refusal: Callable[[], None] = lambda: None
        self.judged = False
        self.refused = False

    def square(self, key: int) -> Tensor | None:
        """Return the sum of the squares of a gradient by the parameter's id; None where it is not known."""
        if key not in self.squares:
            self.measure_queued()
        return self.squares.get(key)

    def refuse(self, marker: ReleasedGradient, operation: str) -> RefusedError:
        """Return the error for an operation that would change a used gradient, or needs its elements."""
        self.refused = True
        return RefusedError(
            f"{self.describe(marker.key)}: its gradient was used and freed during backward(), and {operation} comes too late. "
            "Gradients that are clipped, scaled or changed after backward() must be declared: clipping as "
            "release_gradients(max_norm=...) with release.guard(loss), loss scaling as scaler=..., hooks on the parameters "
            "before release_gradients. A backward inside release.paused() leaves real gradients; optimizer.step() or "
            "optimizer.zero_grad() closes this step."
        )

    def second_gradient(self, marker: ReleasedGradient) -> RefusedError:
        """Return the error for a second gradient of a parameter that was updated in this step."""
        self.refused = True
        return RefusedError(
            f"{self.describe(marker.key)}: a second backward() before optimizer.step(): it was already updated in this step. "
            f"{AFTER_ANOTHER_BACKWARD}; or wrap a backward that is not meant to update it in release.paused(). If this was "
            "one backward, reentrant checkpointing has delivered the gradient in parts: use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )

    def refuse_unguarded(self, parameter: Tensor) -> None:
        """Raise `RefusedError` for a gradient whose update needs to know the whole one, outside of guard()."""
        if self.scaled:
            raise RefusedError(
                f"{self.describe(id(parameter))}: with a scaler, the first update needs to know that the whole gradient is "
                "finite. Call scaler.scale(release.guard(loss)).backward(), with all of the loss in guard(), or use "
                "accumulation='hold'."
            )
        raise RefusedError(
            f"{self.describe(id(parameter))}: max_norm={self.max_norm} needs the norm of the whole gradient before the first "
            "update. Call release.guard(loss).backward(), with all of the loss in guard(), or use accumulation='hold', or "
            "clipping='per_tensor'."
        )

    def global_norm(self, shards: Mapping[int, Shard | None]) -> Tensor | None:
        """Return the norm of the gradients so far, 0-d float64; None where it is not known. For shards it is a collective.

        Args:
            shards: by the parameter's id, how it is sharded.
        """
        if not self.knows_norms or not shards:
            return torch.zeros((), dtype=torch.float64, device="cpu") if self.knows_norms and self.judged else None
        found = [self.squares[key] for key in shards]
        device = found[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        totals = sum_over_shards(list(shards.values()), [square.to(device, dtype) for square in found])
        return torch.stack(totals).sum().sqrt()

    def check_factor(self, marker: ReleasedGradient, factor: float, operation: str) -> None:
        """Raise `RefusedError` unless the factor is one, or a declared unscaling or clip that was applied already."""
        if factor == 1.0 or self._clips_unused(factor):
            return
        norm = None if self.norm is None else float(self.norm)
        tolerance = ROUNDINGS * torch.finfo(torch.float32 if marker.dtype is torch.float64 else marker.dtype).eps
        if self.scaled and marker.scale != 1.0 and abs(factor * marker.scale - 1.0) <= tolerance:
            marker.scale = 1.0
            return
        if self.max_norm is not None and norm is not None:
            now = norm * marker.scale
            declared = min(1.0, self.max_norm / (now + NORM_EPS))
            if abs(factor - declared) <= tolerance * declared:
                return
        applied = "" if self.max_norm is None else f" (max_norm={self.max_norm:g} was declared, and is applied already)"
        raise self.refuse(marker, f"{operation} by {factor:.6g}{applied}")

    def _clips_unused(self, factor: float) -> bool:
        """Whether the factor comes from a norm that is not finite, where no gradient was used."""
        return not self.finite and not (math.isfinite(factor) and factor != 0)
