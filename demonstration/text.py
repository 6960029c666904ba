"""The text, as bytes, and the batches, which depend on nothing but the text, the seed and the number of the step."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from ..core.errors import InvalidArgumentError

MAXIMAL_BYTES = 4 * 2**20


def standard_library_files() -> list[Path]:
    """Return the top-level modules of this Python's standard library, sorted by name."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read_text(path: Path | None, *, at_least: int, at_most: int = MAXIMAL_BYTES) -> np.ndarray:
    """Return the training text.

    Args:
        path: a file; None: the source of the standard library, its files one after the other.
        at_least: bytes that are needed.
        at_most: bytes that are used; the rest is left out.

    Returns:
        uint8, shape [bytes].

    Raises:
        InvalidArgumentError: there is no such file, it cannot be read, or it is too short.
    """
    files = standard_library_files() if path is None else [path]
    text = b""
    for file in files:
        try:
            with file.open("rb") as source:
                text += source.read(at_most - len(text))
        except OSError as error:
            reason = (error.strerror or "unknown error").lower()
            raise InvalidArgumentError(f"the text {str(file)!r} cannot be read: {reason}.") from error
        except ValueError as error:  # no name of a file at all
            raise InvalidArgumentError(f"the text {str(file)!r} cannot be read: {error}.") from error
        if len(text) >= at_most:
            break
    if len(text) < at_least:
        name = "the source of the standard library" if path is None else f"the text {str(path)!r}"
        raise InvalidArgumentError(f"{name} has {len(text)} bytes; one training sequence needs {at_least}.")
    return np.frombuffer(text, dtype=np.uint8)


class Batches:
    """Seeded batches of sequences; the batch of a step depends on the step's number only.

    Args:
        text: uint8, shape [bytes], more than `context` of them.
        batch_size: sequences in a batch.
        context: inputs in a sequence; the targets are the same bytes one place on.
        seed: of the choice of the sequences.
    """

    def __init__(self, text: np.ndarray, *, batch_size: int, context: int, seed: int) -> None:
        self._text = text
        self._batch_size = batch_size
        self._offsets = np.arange(context + 1)
        self._seed = seed

    def batch(self, step: int) -> np.ndarray:
        """The batch of step 0, 1, ...: int32, shape [batch_size, context + 1]."""
        generator = np.random.default_rng([self._seed, step])
        last = len(self._text) - len(self._offsets)
        starts = generator.integers(0, last, size=(self._batch_size, 1), endpoint=True)
        return self._text[starts + self._offsets].astype(np.int32)
