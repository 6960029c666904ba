"""What a computation depends on besides its arguments, and must find again when it is repeated: autocast, random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Surroundings:
    """Autocast as it is now, and the random state before each of several computations.

    Args:
        tensors: on whose devices it happens; one type of accelerator at most.
        preserve_rng_state: remember and restore the random state, of the CPU and of these devices.
    """

    def __init__(self, tensors: Sequence[Tensor], preserve_rng_state: bool) -> None:
        self._preserve = preserve_rng_state
        self._states: list[tuple[Tensor, Sequence[int], Sequence[Tensor]]] = []
        devices = sorted({str(tensor.device) for tensor in tensors if tensor.device.type not in ("cpu", "meta")})
        self._witnesses = [torch.empty(0, device=device) for device in devices]
        self._accelerator = self._witnesses[0].device.type if devices else None
        self._autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in ("cpu", self._accelerator)
            if kind is not None and torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast as it was."""
        with contextlib.ExitStack() as stack:
            for arguments in self._autocast:
                stack.enter_context(torch.autocast(**arguments))
            yield

    def remember_random_state(self) -> None:
        """As it is now, for the next computation."""
        if self._preserve:
            self._states.append((torch.get_rng_state(), *get_device_states(*self._witnesses)))

    def restore_random_state(self, number: int) -> None:
        """As it was before the computation of that number, counted from 0."""
        if self._preserve:
            state, indices, states = self._states[number]
            torch.set_rng_state(state)
            if self._accelerator is not None:
                set_device_states(indices, states, device_type=self._accelerator)

    @contextlib.contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """What is drawn in this context leaves the random state as it was."""
        if not self._preserve:
            yield
            return
        indices = [witness.get_device() for witness in self._witnesses]
        with torch.random.fork_rng(indices, device_type=self._accelerator or "cuda"):
            yield
