"""Portable states with random numbers, and their files taken apart and put together again by the format's description."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.array_ops import numpy_dtype
from penstock.core.compensation import WITH_RANDOM_BITS, compensation_dtype
from penstock.core.portable.state import ParameterState, PortableGroup, PortableState

KINDS = [
    ("float64", "none"),
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "kahan"),
    ("bfloat16", "split"),
    ("float16", "none"),
    ("float16", "kahan"),
    ("bfloat16", "stochastic"),
    ("float16", "stochastic"),
    ("bfloat16", "split8"),
]
"""Every dtype with every compensation that it can have."""


def parameter(
    shape: tuple[int, ...] = (2, 3),
    kind: tuple[str, str] = ("float32", "none"),
    *,
    step: int = 3,
    seed: int = 0,
    second: str = "float32",
    held: bool = True,
) -> ParameterState:
    """One parameter with random numbers."""
    generator = np.random.default_rng(seed)
    dtype, compensated = kind

    def normal(dtype: str) -> np.ndarray:
        return np.asarray(generator.normal(size=shape)).astype(numpy_dtype(dtype))

    kept = compensation_dtype(compensated, dtype)
    k = None if kept is None else np.asarray(generator.integers(-99, 99, size=shape)).astype(numpy_dtype(kept))
    return ParameterState(
        dtype,
        shape,
        compensated,
        step,
        {"exp_avg": normal(dtype), "exp_avg_sq": np.abs(normal(second))},
        k,
        normal(dtype) if held else None,
        (1000 + seed,) if compensated in WITH_RANDOM_BITS else (),
    )


def changed(one: ParameterState, **changes: Any) -> ParameterState:
    """The parameter with other values; those of its rule's fields by their names."""
    fields = {name: changes.pop(name, array) for name, array in one.fields.items()}
    return dataclasses.replace(one, **{"fields": fields, **changes})


def state(parameters: dict[str, ParameterState] | None = None, rule: str = "adamw") -> PortableState:
    """A state of these, or of three small ones, in one group."""
    if parameters is None:
        parameters = {
            "w": parameter((2, 3), ("bfloat16", "split"), seed=1),
            "layers.b": parameter((), ("float16", "kahan"), seed=2),
            "empty": parameter((0, 3), ("float64", "none"), seed=3, held=False),
        }
    values = {"learning_rate": 1e-3, "beta1": 0.9, "decouple_lr": False, "max_lr": None}
    return PortableState((PortableGroup(rule, values, tuple(parameters)),), parameters)


def contents(state: PortableState) -> Any:
    """Everything in a state, comparable, arrays by their bits; the order of a group's parameters means nothing."""
    rows = {
        name: (
            (one.dtype, one.shape, one.compensated, one.step, one.random_keys),
            [(field, array.dtype.name, array.shape, array.tobytes()) for field, array in one.arrays().items()],
        )
        for name, one in state.parameters.items()
    }
    return [(group.rule, dict(group.hyperparameters), sorted(group.parameters)) for group in state.groups], rows


def taken_apart(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The table of arrays, the document and the arrays' bytes of a file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:end])
    return table, json.loads(table.pop("__metadata__")["penstock"])["document"], content[end:]


def text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def signed(document: Any) -> str:
    """The text of the metadata, with a right digest."""

    def sorted_text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True)

    digest = hashlib.sha256(sorted_text(document).encode()).hexdigest()
    return sorted_text({"digest": digest, "document": document})


def with_header(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, filled up with spaces, whatever it says."""
    header = header.encode() if isinstance(header, str) else header
    header += b" " * (-len(header) % 8)
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def put_together(path: Path, table: dict[str, Any], document: Any, data: bytes, *, digests: bool = True) -> None:
    """A file with a right digest of its document, and right ones of its arrays unless they are the fault."""
    if digests:
        begin = {name: row["data_offsets"] for name, row in table.items()}
        document["digests"] = {name: hashlib.sha256(data[slice(*place)]).hexdigest() for name, place in begin.items()}
    path.write_bytes(with_header(text({"__metadata__": {"penstock": signed(document)}, **table}), data))
