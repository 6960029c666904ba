r"""One safetensors file, written whole or not at all, and read with nothing taken on trust.

    8 bytes    n, little-endian
    n bytes    JSON: every tensor's dtype, shape and place, and under "__metadata__"
                   "penstock"  the document: what `core.portable_file` says of the arrays, their SHA-256 digests, the version
                   "digest"    SHA-256 of this JSON without this entry
    the rest   the arrays one after the other, little-endian, the widest dtype first, so that each is aligned

The format is that of https://github.com/huggingface/safetensors, and its library reads these files. They are written here
because equal states are to make equal bytes (its metadata has no order) and a file that shrinks while it is read is to be an
error (a memory map kills the process).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
import secrets
import stat
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .errors import InvalidArgument, Refused
from .portable_state import listed, numpy_dtype

VERSION = 1
"""Of the document and of how the arrays lie in the file."""

HEADER_LIMIT = 100_000_000
"""Bytes of JSON at most, as in the safetensors library."""

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int16": "I16"}
"""The names of the dtypes in the file."""

REWRITTEN = "its header is damaged, or another program has written it again"

Path = str | os.PathLike[str]


MOST_AXES = 64
LONGEST_AXIS = 2**63 - 1


def shown(value: Any) -> str:
    """What a file says, as it stands in an error: a name may be as long as the header."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def write(path: Path, arrays: Mapping[str, np.ndarray], document: Mapping[str, Any]) -> None:
    """Write arrays and a document; what was at `path` before is replaced at the very end, in one step.

    Args:
        path: of the file; a link is followed.
        arrays: by name, in dtypes of `DTYPES`.
        document: what JSON can say; "version" and "digests" are added to it.

    Raises:
        InvalidArgument: a name that is no Unicode text.
        Refused: the file could not be written, or not be read again. What was there is as it was.
    """
    ordered = {name: arrays[name] for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))}
    header: dict[str, Any] = {"__metadata__": {}}
    digests, end = {}, 0
    for name, array in ordered.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
        digests[name] = hashlib.sha256(_bytes(array)).hexdigest()
    try:
        header["__metadata__"]["penstock"] = _document_text({**document, "version": VERSION, "digests": digests})
        header["__metadata__"]["digest"] = _header_digest(header)
        text = _header_bytes(header)
    except UnicodeEncodeError:
        odd = [name for name in arrays if name.encode(errors="replace").decode() != name]
        raise InvalidArgument(f"{listed(odd)} cannot be written: a name must be Unicode text.") from None
    if len(text) > HEADER_LIMIT:
        raise Refused(f"{os.fspath(path)!r} could not be written: the names and shapes need more than {HEADER_LIMIT} bytes.")
    try:
        target = pathlib.Path(path).resolve()
        if target.exists() and not target.is_file():
            raise Refused(f"{os.fspath(path)!r} could not be written: it is there, and not a regular file.")
        _replace(target, itertools.chain([len(text).to_bytes(8, "little"), text], map(_bytes, ordered.values())))
    except Refused:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte in the path; RuntimeError: a loop of links
        reason = getattr(error, "strerror", None) or str(error)
        raise Refused(f"{os.fspath(path)!r} could not be written: {reason}; what was there is as it was.") from error


def _replace(target: pathlib.Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts to a new file beside `target`, see that they have reached the disk, and rename it."""
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")  # opened plainly: it has the usual permissions
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    # Without this a power cut could bring the old file back. Not every file system can; the file is whole either way.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _bytes(array: np.ndarray) -> memoryview:
    """The array's bytes in order, little-endian; a copy only where it lies otherwise in memory."""
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    unsigned = native.reshape(-1).view(f"u{native.dtype.itemsize}")
    return unsigned.astype(unsigned.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def _document_text(document: Mapping[str, Any]) -> str:
    """The one JSON text of a document."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False, sort_keys=True)


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    """The one JSON text of a header, filled up with spaces to whole 8 bytes."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return text + b" " * (-len(text) % 8)


def _header_digest(header: Mapping[str, Any]) -> str:
    """The digest of a header, of everything but itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != "digest"}
    return hashlib.sha256(_header_bytes({**header, "__metadata__": metadata})).hexdigest()


class Entry(NamedTuple):
    """One array of a file: its dtype by numpy's name, its shape, and where it begins among the arrays, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class Reader:
    """A file of `write`, open; a context manager. What it says about itself has been compared with what is there.

    The memory taken is a multiple of the header's bytes and, in `read`, one array's: what it claims is compared with the
    bytes that the file has before any of it is allocated.

    Args:
        path: of the file.

    Raises:
        InvalidArgument: it cannot be read, or is not whole and undamaged; the text says how.
    """

    document: dict[str, Any]
    entries: dict[str, Entry]

    def __init__(self, path: Path) -> None:
        self.name = repr(os.fspath(path))
        try:
            # Looked at first: opening a named pipe would wait for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                self.refuse("it is not a regular file")
            self._file = open(path, "rb")  # noqa: SIM115  (closed by __exit__)
        except InvalidArgument:
            raise
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{self.name} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def refuse(self, reason: str) -> NoReturn:
        """Raise `InvalidArgument`: the file is not what it should be."""
        raise InvalidArgument(f"{self.name} is no portable state that can be read: {reason}.")

    def read(self, name: str) -> np.ndarray:
        """One array, compared with its digest."""
        entry = self.entries[name]
        dtype = numpy_dtype(entry.dtype)
        try:
            unsigned = np.empty(entry.shape, f"<u{dtype.itemsize}")
        except ValueError:
            self.refuse(f"{shown(name)} has shape {shown(entry.shape)}, more than an array can have")
        buffer = unsigned.reshape(-1).view(np.uint8).data
        self._read_into(buffer, self._begin + entry.start)
        if hashlib.sha256(buffer).hexdigest() != self.document["digests"][name]:
            self.refuse(f"the bytes of {shown(name)} are damaged")
        return unsigned.astype(unsigned.dtype.newbyteorder("="), copy=False).view(dtype)

    def _read_into(self, buffer: memoryview, start: int) -> None:
        try:
            self._file.seek(start)
            if self._file.readinto(buffer) != len(buffer):
                self.refuse("it ends too early")
        except OSError as error:
            self.refuse(error.strerror or str(error))

    def _read_header(self) -> None:
        self.size = os.fstat(self._file.fileno()).st_size
        length = bytearray(8)
        self._read_into(memoryview(length), 0)
        n = int.from_bytes(length, "little")
        self._begin = 8 + n
        if n > HEADER_LIMIT:
            self.refuse(f"its header would have {n} bytes; it is no safetensors file, or its beginning is damaged")
        if self._begin > self.size:
            self.refuse(f"it ends too early: it has {self.size} bytes, its header alone should end at {self._begin}")
        raw = bytearray(n)
        self._read_into(memoryview(raw), 8)
        header = self._parse(raw)
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or not isinstance(metadata.get("penstock"), str):
            self.refuse("it is a safetensors file, but not one that export_state or penstock convert wrote")
        self.document = self._parse(metadata["penstock"])
        version = self.document.get("version")
        if type(version) is not int or version != VERSION:
            self.refuse(f"it has version {shown(version)}, and this penstock reads version {VERSION}; use one that reads it")
        whole = {"__metadata__": metadata, **header}
        try:
            same = metadata.get("digest") == _header_digest(whole) and bytes(raw) == _header_bytes(whole)
            same = same and metadata["penstock"] == _document_text(self.document)
        except (ValueError, RecursionError):
            same = False
        if not same:
            self.refuse(REWRITTEN)
        self.entries = self._table(header)
        digests = self.document.get("digests")
        if not isinstance(digests, dict) or set(digests) != set(self.entries):
            self.refuse("its arrays and the list of their digests do not have the same names")

    def _parse(self, text: str | bytearray) -> dict[str, Any]:
        try:
            found = json.loads(text if isinstance(text, str) else text.decode())
        except (ValueError, RecursionError):  # no JSON, no UTF-8, a number without end; brackets without end
            found = None
        if not isinstance(found, dict):
            self.refuse("its header is no JSON object; it is no safetensors file, or damaged")
        return found

    def _table(self, header: Mapping[str, Any]) -> dict[str, Entry]:
        """Where the arrays are: one after the other, and nothing else."""
        names = {short: name for name, short in DTYPES.items()}
        entries, end = {}, 0
        for name, row in header.items():
            if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
                self.refuse(f"what its header says of {shown(name)} is not understood")
            dtype, shape = row["dtype"], row["shape"]
            if not isinstance(dtype, str) or dtype not in names:
                self.refuse(f"{shown(name)} has dtype {shown(dtype)}; known are {', '.join(names)}")
            axes = shape if isinstance(shape, list) and len(shape) <= MOST_AXES else [None]
            if not all(type(length) is int and 0 <= length <= LONGEST_AXIS for length in axes):
                self.refuse(f"{shown(name)} has shape {shown(shape)}")
            entries[name] = entry = Entry(names[dtype], tuple(shape), end)
            end += entry.nbytes
            if row["data_offsets"] != [entry.start, end]:
                self.refuse(f"the place of {shown(name)} is not what the shapes and dtypes before it make it")
        if self._begin + end != self.size:
            self.refuse(f"it has {self.size} bytes, and its header speaks of {self._begin + end}")
        return entries
