"""Which settings a step has used: a change between their use and optimizer.step() comes too late."""

from __future__ import annotations

from typing import Any

from ...core.errors import RefusedError
from ..groups import Group, changed_settings, fingerprint, rule_of

USED_BY_STEP = ("lr", "weight_decay", "decouple_lr", "max_lr")
"""The settings that only the step uses; the others are used when a micro-batch goes into a rule's fields."""


class UsedSettings:
    """The settings that a step has used: a change between their use and optimizer.step() comes too late."""

    def __init__(self) -> None:
        self._seen: list[tuple[Any, ...]] | None = None
        self._stepped = False

    def remember(self, groups: list[Group], *, stepped: bool) -> None:
        """Record that the present settings are used; `stepped`: including lr and decay."""
        self._stepped |= stepped
        if self._seen is None:
            self._seen = [fingerprint(group) for group in groups]

    def check(self, groups: list[Group]) -> None:
        """Raise `RefusedError` if a setting that was used has changed since."""
        for number, (before, group) in enumerate(zip(self._seen or [], groups, strict=False)):
            changed = changed_settings(before, group)
            if not self._stepped:  # only micro-batches went into the moments so far
                l2 = rule_of(groups[number]).l2  # weight_decay is part of the gradient
                changed = [name for name in changed if name not in USED_BY_STEP or (l2 and name == "weight_decay")]
            if changed and not self._stepped:
                raise RefusedError(
                    f"{', '.join(changed)} of parameter group {number} changed after micro-batches had gone into the moments "
                    "and before optimizer.step(): the new value came too late for this step. Set it back, and change it (and "
                    "call scheduler.step()) after optimizer.step()."
                )
            if changed:
                raise RefusedError(
                    f"{', '.join(changed)} of parameter group {number} changed after the backward pass had updated the "
                    "parameters and before optimizer.step(): the new value came too late for this step. Change it (and call "
                    "scheduler.step()) after optimizer.step(); optimizer.zero_grad() closes this one."
                )
