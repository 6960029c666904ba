"""The interface of a backend whose codings are compared; a backend without it takes no part in the section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from .cases import CodingCase


class HeldField(NamedTuple):
    """A field as it is stored: the array itself, or codes with their scales."""

    array: np.ndarray
    scale: np.ndarray | None = None


class HeldTensor(NamedTuple):
    """What a run holds for one tensor, in numpy: copies. fields: by name."""

    parameter: np.ndarray
    compensation: np.ndarray | None
    fields: Mapping[str, HeldField]


class CodingRun(Protocol):
    """One case on one backend, from `CodingCase.initial_parameters` on."""

    def update(self, gradients: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Make one update of all tensors, with the gradients of its micro-batches."""
        ...

    def held(self) -> Mapping[str, HeldTensor]:
        """Return what is stored after an update, by tensor name."""
        ...

    def keys(self) -> Mapping[str, int]:
        """Return the keys that the tensors' random bits should have, by `definitions.key_of`."""
        ...

    def steps_from_stored(self) -> bool:
        """Whether the step of several micro-batches reads the fields as they are stored after the last, not before."""
        ...


@runtime_checkable
class RunsCodings(Protocol):
    """A backend that runs the cases of the section."""

    def refuses_codings(self, case: CodingCase) -> str | None:
        """Return why it does not run this case, or None if it does."""
        ...

    def start_codings(self, case: CodingCase) -> CodingRun:
        """A new run."""
        ...
