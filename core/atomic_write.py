"""Atomic replacement of a file: it is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the path of an empty file, which replaces `target` when the context ends.

    The new file has reached the disk before it replaces the old one. If the context raises, `target` stays as it was.

    Args:
        target: in an existing folder.

    Raises:
        OSError: the file could not be written; `target` is as it was.
    """
    beside = tempfile.TemporaryDirectory(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent, ignore_cleanup_errors=True)
    with beside as folder:
        temporary = pathlib.Path(folder, "file")
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)  # the usual one; some libraries make another file, for its owner only
        yield temporary
        with temporary.open("r+b") as file:
            temporary.chmod(mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    # Without this a power cut could bring the old file back. Not every file system can; the file is whole either way.
    with contextlib.suppress(OSError):
        parent = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
