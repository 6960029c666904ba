"""The document: all results as plain values. It is the JSON file, and the page is made from it."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..compare import Refusal
from ..rules import NOT_COVERED
from ..suite import Result, SectionResult

SCHEMA = 2
PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "optax", "triton", "torch-optimi")


def document(result: Result, *, version: str, command: Sequence[str], not_available: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the JSON file.

    Args:
        result: of the run.
        version: penstock's.
        command: the words that were typed.
        not_available: the backends that did not run, and why.
    """
    return {
        "schema": SCHEMA,
        "penstock": version,
        "command": list(command),
        "versions": versions(),
        "device": _device(),
        "seconds": round(result.seconds, 3),
        "backends": [{"name": name, "peer": name in result.peers} for name in result.backends],
        "not_available": dict(not_available),
        "not_covered": dict(NOT_COVERED),
        "broken": len(result.broken),
        "sections": [_section(found, result) for found in result.sections],
    }


def _section(found: SectionResult, result: Result) -> dict[str, Any]:
    return {
        "name": found.section.name,
        "title": found.section.title,
        "seconds": {name: round(value, 3) for name, value in found.seconds.items()},
        "verdicts": verdicts(found, result),
        "refused": collapse(found.refusals),
        "rows": [_rounded(row.as_json()) for row in found.rows],
    }


def verdicts(found: SectionResult, result: Result) -> list[dict[str, Any]]:
    """Return for each backend of a section the number of comparisons, and of those that break their bounds.

    `largest_ratio` is the largest |error| / bound over all elements; null where there is none (NaN, or it raised).
    `peer` says whose broken bounds do not count.
    """
    made = []
    for name in dict.fromkeys(row.backend for row in found.rows):
        rows = [row for row in found.rows if row.backend == name]
        judged = [row for row in rows if row.judged]
        made.append(
            {
                "backend": name,
                "peer": name in result.peers,
                "comparisons": len(rows),
                "judged": len(judged),
                "beyond": sum(not row.within for row in judged),
                "largest_ratio": _finite(max((row.ratio for row in judged), default=0.0)),
            }
        )
    return made


def collapse(refusals: Iterable[Refusal]) -> list[dict[str, Any]]:
    """Refusals by backend and reason, with the number of cases and the first of them."""
    refusals = list(refusals)
    counts = Counter((refusal.backend, refusal.reason) for refusal in refusals)
    first: dict[tuple[str, str], str] = {}
    for refusal in refusals:
        first.setdefault((refusal.backend, refusal.reason), refusal.case)
    return [
        {"backend": backend, "reason": reason, "cases": count, "first": first[backend, reason]}
        for (backend, reason), count in counts.items()
    ]


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages that figures depend on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _device() -> dict[str, Any]:
    """Return a description of the machine and of the frameworks' devices."""
    device: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None:
        device["torch"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if jax is not None:
        device["jax"] = str(jax.devices()[0])
    return device


def _rounded(row: dict[str, object]) -> dict[str, object]:
    """Round to six digits, which makes the file a third as large."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
