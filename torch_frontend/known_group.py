"""A parameter group as of its last reading: what has changed since is validated and taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .backends.numbers import GroupSettings
from .changing_betas import BETAS_OF_MOMENTS, default_betas_of_moments, follow_betas
from .checks import check_device
from .groups import Group, SeenTensor, fingerprint, hyperparameters, on_device, settings_of


class KnownGroup:
    """A parameter group as an optimizer has last read it."""

    def __init__(self, group: Group, settings: GroupSettings) -> None:
        default_betas_of_moments(group)
        self.group = group
        self.settings = settings
        debiased = any(field.beta for field in settings.rule.fields)
        self._betas = settings_of(settings.rule).index("betas") if debiased else None  # in a fingerprint
        self.ids = dict.fromkeys(map(id, group["params"]))
        self._order = list(self.ids)
        self._see(fingerprint(group))
        self._storage = _storage(group)
        self._followed: tuple[Any, Any] | None = None

    def _see(self, seen: tuple[Any, ...]) -> None:
        """Keep a fingerprint, and which of its betas each of the rule's fields is debiased by."""
        self._seen, rule = seen, self.settings.rule
        if self._betas is not None:
            betas = dict(zip((n for n in rule.own_hyperparameters if n.startswith("beta")), seen[self._betas], strict=True))
            self._betas_of_fields = tuple(None if field.beta is None else betas[field.beta] for field in rule.fields)

    def betas_have_changed(self) -> bool:
        """Whether the moments are debiased under other betas than the group's.

        Tensors on a device are not read. They count as changed when they are replaced or written to, and whenever a CUDA graph
        is captured, in whose replays they may be.
        """
        if self._betas is None:
            return False
        betas = self._seen[self._betas]
        if self._betas_of_fields == self.group[BETAS_OF_MOMENTS]:
            return False
        on_device = any(isinstance(beta, SeenTensor) for beta in betas)
        return not on_device or betas != self._followed or torch.cuda.is_current_stream_capturing()

    def follow_betas(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Express the group's moments, in the states of its parameters, under its betas."""
        follow_betas(self.group, self.settings.rule.decays(self.settings.hyperparameters), states)
        self._followed = self._seen[self._betas] if self._betas is not None else None

    def is_current(self, group: Group) -> bool:
        """Whether it is the same group with the same parameters and storage settings."""
        return self.group is group and self._order == list(map(id, group["params"])) and self._storage == _storage(group)

    def refresh(self, group: Group) -> None:
        """Take over settings that have changed.

        Raises:
            InvalidArgumentError: one is out of range, or on a device from which an update cannot read it; nothing was changed.
        """
        now = fingerprint(group)
        if now == self._seen:
            return
        current = hyperparameters(group)
        if on_device(current):
            for parameter in group["params"]:
                check_device(current, parameter)
        self.settings.change(current)
        self._see(now)


def _storage(group: Group) -> tuple[Any, ...]:
    """Return the settings that decide what is kept for a parameter, and where."""
    return group["rule"], group["compensation"], group["state_dtype"], group["capturable"]
