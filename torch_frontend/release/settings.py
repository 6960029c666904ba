"""Hyperparameters must stay from their first use in a step until optimizer.step() closes it."""

from __future__ import annotations

from typing import Any

from ...core.errors import Refused
from ..groups import changed_settings, fingerprint
from ..optimizers import ReleasableOptimizer

USED_BY_MOMENTS = ("betas", "eps", "maximize")
"""What a micro-batch that goes into the moments has used already; lr and decay are used by the step."""


class Settings:
    """Remembers the groups' settings at their first use, and refuses a step in which they changed since."""

    def __init__(self, optimizer: ReleasableOptimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[tuple[Any, ...]] | None = None
        self._stepped = False

    def require_valid(self) -> None:
        """Raise `InvalidArgument` before their first use in a step if they are out of range."""
        if self._seen is None:
            self._optimizer.check_settings()

    def remember(self, stepped: bool) -> None:
        """They are used now; `stepped`: lr, too."""
        self._stepped |= stepped
        if self._seen is None:
            self._optimizer.check_settings()
            self._seen = [fingerprint(group) for group in self._optimizer.param_groups]

    def check(self) -> None:
        """Raise `Refused` if a setting changed after its use in this step."""
        for number, (before, group) in enumerate(zip(self._seen or [], self._optimizer.param_groups, strict=False)):
            changed = changed_settings(before, group)
            if not self._stepped:  # micro-batches in the moments: the step itself is still to come
                changed = [name for name in changed if name in USED_BY_MOMENTS]
            if changed:
                raise Refused(
                    f"{', '.join(changed)} of parameter group {number} changed after the backward pass had updated the "
                    "parameters and before optimizer.step(): the new value came too late for this step. Change it (and call "
                    "scheduler.step()) after optimizer.step(); optimizer.zero_grad() closes this one."
                )

    def forget(self) -> None:
        """The step is closed."""
        self._seen, self._stepped = None, False
