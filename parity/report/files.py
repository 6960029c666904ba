"""Files of the report, which are written whole or not at all."""

from __future__ import annotations

import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.atomic_write import replacing
from ...core.errors import InvalidArgumentError, RefusedError
from .page import page


def prepare(directory: pathlib.Path) -> None:
    """Make the directory, and check that it is writable before the suite runs.

    Raises:
        InvalidArgumentError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(f"--report {str(directory)!r}: cannot write there: {reason}.") from error


def write_json(directory: pathlib.Path, content: Mapping[str, Any]) -> pathlib.Path:
    """Write parity.json into a directory, whole or not at all.

    Raises:
        RefusedError: it could not be written; an earlier one is still there.
    """
    return write_whole(directory / "parity.json", content)


def write_page(directory: pathlib.Path, content: Mapping[str, Any]) -> pathlib.Path:
    """Write parity.html into a directory, whole or not at all: the page of what the JSON file says.

    Raises:
        RefusedError: it could not be written; an earlier one is still there.
    """
    return _write(directory / "parity.html", [page(content)])


def write_whole(target: pathlib.Path, content: Mapping[str, Any]) -> pathlib.Path:
    """Write a JSON file, whole or not at all; its directory must exist.

    Raises:
        RefusedError: it could not be written; an earlier one is still there.
    """
    return _write(target, itertools.chain(_json(content), "\n"))


def _json(value: Any, indentation: str = "\n") -> Iterator[str]:
    """JSON, piece by piece: lists of objects have a line for each, and everything else that holds no such list is a line."""
    if not _holds_table(value):
        yield json.dumps(value, allow_nan=False)
        return
    is_object = isinstance(value, Mapping)
    within, separator = indentation + " ", ""
    yield "{" if is_object else "["
    for key, item in value.items() if is_object else ((None, item) for item in value):
        yield separator + within + (f"{json.dumps(key)}: " if is_object else "")
        yield from _json(item, within)
        separator = ","
    yield indentation + ("}" if is_object else "]")


def _holds_table(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_table, value.values()))
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _write(target: pathlib.Path, pieces: Iterable[str]) -> pathlib.Path:
    try:
        with replacing(target) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except (OSError, ValueError) as error:
        raise RefusedError(f"the report {str(target)!r} could not be written: {error}") from error
    return target
