"""The autocast and RNG state of a computation, saved so that it can be repeated in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

_RngState = tuple[Tensor, Sequence[int], Sequence[Tensor]]
"""Of the CPU; numbers of devices; of these devices."""


def _has_rng_states(device: torch.device) -> bool:
    """Whether torch's checkpoint functions can save RNG states of this device. Those of MPS it leaves out, too."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device.type), "device")


class SavedContext:
    """The autocast state at construction, and the RNG state before each of several computations.

    Args:
        tensors: the computations run on their devices: CPUs, and accelerators of at most one type.
        preserve_rng_state: save and restore the RNG state of the CPU and of these devices.
    """

    def __init__(self, tensors: Sequence[Tensor], preserve_rng_state: bool) -> None:
        self._preserve = preserve_rng_state
        self._states: list[_RngState] = []
        devices = sorted({str(tensor.device) for tensor in tensors if _has_rng_states(tensor.device)})
        self._on_devices = [torch.empty(0, device=device) for device in devices]  # torch's functions take tensors, not devices
        self._accelerator = self._on_devices[0].device.type if devices else None
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

    def autocast(self) -> contextlib.ExitStack:
        """Return a context with the saved autocast state."""
        stack = contextlib.ExitStack()
        for arguments in self._autocast:
            if arguments["enabled"] or torch.is_autocast_enabled(arguments["device_type"]):
                stack.enter_context(torch.autocast(**arguments))
        return stack

    def save_rng_state(self) -> None:
        """Save the current RNG state for the next computation."""
        if self._preserve:
            self._states.append(self._rng_state())

    def _rng_state(self) -> _RngState:
        indices, states = get_device_states(*self._on_devices) if self._on_devices else ((), ())
        return torch.get_rng_state(), indices, states

    def _set_rng_state(self, state: _RngState) -> None:
        cpu, indices, states = state
        torch.set_rng_state(cpu)
        if self._accelerator is not None:
            set_device_states(indices, states, device_type=self._accelerator)

    def restore_rng_state(self, number: int) -> None:
        """Restore the RNG state saved for the computation of this number, counted from 0."""
        if self._preserve:
            self._set_rng_state(self._states[number])

    def rng_state_has_changed(self, number: int) -> bool:
        """Whether random numbers were drawn since the RNG state of this number was saved."""
        if not self._preserve:
            return False
        state, _, states = self._states[number]
        now, _, states_now = self._rng_state()
        return not all(map(torch.equal, (state, *states), (now, *states_now)))

    @contextlib.contextmanager
    def fork_rng(self) -> Iterator[None]:
        """Restore the current RNG state at the end of the context."""
        before = self._rng_state() if self._preserve else None
        try:
            yield
        finally:
            if before is not None:
                self._set_rng_state(before)
