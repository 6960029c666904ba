"""What the processes of one run do together: all of them succeed, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from ...core.errors import RefusedError

Result = TypeVar("Result")

_LONGEST = 1000  # bytes of an error's text


def together(action: Callable[[], Result], *, same: Callable[[Result], Any] = lambda _: None) -> Result:
    """The result of `action`; where there are several processes, an error of one is raised on all, which all must call this.

    Args:
        action: must not communicate.
        same: what of the result must be equal on all processes.

    Raises:
        RefusedError: another process failed, or has another result.
    """
    if jax.process_count() == 1:
        return action()
    try:
        result = action()
        told = hashlib.sha256(repr(same(result)).encode()).digest()
    except Exception as error:
        _tell_all(str(error) or type(error).__name__, bytes(32))
        raise
    for number, (text, other) in enumerate(_tell_all("", told)):
        if text:
            raise RefusedError(f"process {number} failed: {text}")
        if other != told:
            raise RefusedError(
                f"process {number} has another state or file than this one, or was called with other arguments; give every "
                "process the same call, and a file that all of them see."
            )
    return result


def _tell_all(text: str, told: bytes) -> list[tuple[str, bytes]]:
    """What each process says, in order."""
    from jax.experimental import multihost_utils

    said = told + text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
    gathered = np.asarray(multihost_utils.process_allgather(np.frombuffer(said, np.uint8)))
    rows = [row.tobytes() for row in gathered.reshape(jax.process_count(), -1)]
    return [(row[len(told) :].rstrip(b"\0").decode(errors="ignore"), row[: len(told)]) for row in rows]
