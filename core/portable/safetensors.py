r"""One safetensors file, which is written atomically and checked against its own digests when it is read.

The format is the safetensors library's (https://github.com/huggingface/safetensors), which writes and reads the bytes. Here is
what it does not do: a digest of every array, a document that says what the arrays are, and the replacement in one step. The
file's metadata has one entry, since the library gives several no order:

    "penstock"  JSON {"digest": SHA-256 of the document's text, "document": the version, the arrays' digests, and all else}
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..array_ops import numpy_dtype
from ..atomic_write import replacing
from ..errors import InvalidArgumentError, RefusedError
from .state import listed

VERSION = 3
"""Of the document, and of what arrays are called and stand for. In version 1 all groups had one rule, which stood beside them;
up to version 2 signed 8-bit codes stood for other numbers."""

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES = {**_FLOATS, "I64": "int64", "I16": "int16", "I8": "int8", "U8": "uint8"}
"""The dtypes that a file may have, by their names in it."""

Path = str | os.PathLike[str]


def shown(value: Any) -> str:
    """Return text from a file, shortened for an error."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_path(path: Any) -> None:
    """Raise `InvalidArgumentError` for anything but a path, such as the number of an open file."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidArgumentError(f"path={shown(path)} is not a path; give a str, or a pathlib.Path.")


def write(path: Path, arrays: Mapping[str, np.ndarray], document: Mapping[str, Any]) -> None:
    """Write arrays and a document; an existing file is replaced at the end, in one step.

    Args:
        path: of the file; a link is followed.
        arrays: by name, in dtypes of `DTYPES`.
        document: what JSON can say; "version" and "digests" are added to it.

    Raises:
        InvalidArgumentError: a name that is not Unicode text, or `path` is not a path.
        RefusedError: the file could not be written, or not be read again. What was there is as it was.
    """
    from safetensors import SafetensorError

    check_path(path)
    ordered = {name: _little(array) for name, array in arrays.items()}
    digests = {name: _digest(array) for name, array in ordered.items()}
    try:
        text = _signed({**document, "version": VERSION, "digests": digests})
    except UnicodeEncodeError:
        odd = [name for name in arrays if name.encode(errors="replace").decode() != name]
        raise InvalidArgumentError(f"{listed(odd)} cannot be written: a name must be Unicode text.") from None
    try:
        target = pathlib.Path(path).resolve()
        if target.exists() and not target.is_file():
            raise RefusedError(f"{os.fspath(path)!r} could not be written: it is there, and not a regular file.")
        _replace(target, ordered, text)
    except RefusedError:
        raise
    # ValueError: a null byte in the path; RuntimeError: a loop of links.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RefusedError(f"{os.fspath(path)!r} could not be written: {reason}; what was there is as it was.") from error


def _replace(target: pathlib.Path, arrays: Mapping[str, np.ndarray], text: str) -> None:
    """Write a new file, check that it can be read, and replace `target` with it."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with replacing(target) as temporary:
        save_file(dict(arrays), temporary, metadata={"penstock": text})
        with safe_open(temporary, framework="np"):  # before 0.7 the library writes longer headers than it reads
            pass


def _little(array: np.ndarray) -> np.ndarray:
    """Return the array contiguous and little-endian; it is copied only if it is not."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _digest(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes in the file."""
    return hashlib.sha256(_little(array).reshape(-1).view(np.uint8).data).hexdigest()


def _signed(document: Mapping[str, Any]) -> str:
    """Return the canonical JSON text of a document with its digest."""

    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, sort_keys=True)

    return text({"digest": hashlib.sha256(text(document).encode()).hexdigest(), "document": document})


class Entry(NamedTuple):
    """One array of a file: its dtype by numpy's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Reader:
    """Reads a file of `write`; a context manager. Arrays are read by `read` only.

    What the header claims is compared with the bytes that the file has before memory is taken for it.

    Args:
        path: of the file.

    Raises:
        InvalidArgumentError: it cannot be read, or is not whole and undamaged; the text says how.
    """

    document: dict[str, Any]
    entries: dict[str, Entry]
    size: int  # bytes

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        check_path(path)
        self.name = repr(os.fspath(path))
        try:
            # Looked at first: opening a named pipe would wait for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError("it is not a regular file")
            with open(path, "rb") as file:  # the library calls whatever cannot be opened missing
                self.size = os.fstat(file.fileno()).st_size
            self._file = safe_open(path, framework="np")
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"{self.name} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        except SafetensorError as error:
            self.refuse(f"the safetensors library says {shown(str(error))}; give a file that export_state wrote")
        self._read_document()
        self._read_entries()

    def __enter__(self) -> Reader:
        self._file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.__exit__(kind, error, traceback)

    def refuse(self, reason: str) -> NoReturn:
        """Raise `InvalidArgumentError` for a damaged file."""
        raise InvalidArgumentError(f"{self.name} is not a portable state that can be read: {reason}.")

    def read(self, name: str) -> np.ndarray:
        """Return one array after comparing it with its digest."""
        from safetensors import SafetensorError

        numpy_dtype(self.entries[name].dtype)  # bfloat16 is known to numpy from here on
        try:
            array = self._file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:  # ValueError: a shape that no numpy array can have
            self.refuse(f"{shown(name)} cannot be read, {shown(str(error))}")
        if _digest(array) != self.document["digests"][name]:
            self.refuse(f"the bytes of {shown(name)} are damaged")
        return array

    def _read_document(self) -> None:
        text = (self._file.metadata() or {}).get("penstock")
        if text is None:
            self.refuse("it is a safetensors file, but not one that export_state or penstock convert wrote")
        try:
            self.document = json.loads(text)["document"]
            version = self.document["version"]
            same = text == _signed(self.document)
        # No JSON, a number without end, or NaN; brackets without end; other kinds; other entries.
        except (ValueError, RecursionError, TypeError, KeyError):
            self.refuse("its document is damaged")
        if type(version) is not int or not 1 <= version <= VERSION:
            self.refuse(
                f"it has version {shown(version)}, and this penstock reads versions 1 to {VERSION}; use one that reads it"
            )
        if not same:
            self.refuse("its document is damaged")

    def _read_entries(self) -> None:
        self.entries = {}
        for name in self._file.keys():  # noqa: SIM118  (it is not a mapping)
            rows = self._file.get_slice(name)
            if rows.get_dtype() not in DTYPES:
                self.refuse(f"{shown(name)} has dtype {shown(rows.get_dtype())}; known are {', '.join(DTYPES)}")
            self.entries[name] = Entry(DTYPES[rows.get_dtype()], tuple(rows.get_shape()))
        digests = self.document.get("digests")
        if not isinstance(digests, dict) or set(digests) != set(self.entries):
            self.refuse("its arrays and the list of their digests do not have the same names")
