"""Actions of all processes of a run: all of them succeed, or none."""

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
    """Return the result of `action`; every process must call this, and an error of one is raised on all.

    Args:
        action: must not communicate.
        same: the part of the result that must be equal on all processes.

    Raises:
        RefusedError: another process failed, or has another result.
    """
    if jax.process_count() == 1:
        return action()
    try:
        result = action()
        digest = hashlib.sha256(repr(same(result)).encode()).digest()
    except Exception as error:
        _gather(str(error) or type(error).__name__, bytes(32))
        raise
    for number, (text, other) in enumerate(_gather("", digest)):
        if text:
            raise RefusedError(f"process {number} failed: {text}")
        if other != digest:
            raise RefusedError(
                f"process {number} has another state or file than this one, or was called with other arguments; give every "
                "process the same call, and a file that all of them see."
            )
    return result


def _gather(text: str, digest: bytes) -> list[tuple[str, bytes]]:
    """Return the (text, digest) of every process, in order."""
    from jax.experimental import multihost_utils

    message = digest + text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
    gathered = np.asarray(multihost_utils.process_allgather(np.frombuffer(message, np.uint8)))
    rows = [row.tobytes() for row in gathered.reshape(jax.process_count(), -1)]
    return [(row[len(digest) :].rstrip(b"\0").decode(errors="ignore"), row[: len(digest)]) for row in rows]
