"""The report: a table for the terminal, and a JSON file with every row."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ..core.errors import InvalidArgument, Refused
from .compare import Row

SCHEMA = 1
PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "optax")


def table(rows: Sequence[Row]) -> Table:
    """One line a case and number of steps: every backend's error of the parameter, its bound, the verdict.

    A cell is the relative error and the units in the last place; the bound's units are those of the backend that comes
    nearest to them. The verdict counts the moments, too.
    """
    backends = list(dict.fromkeys(row.backend for row in rows))
    made = Table(title="relative error of parameter + compensation against float64 | units in the last place")
    made.add_column("case", no_wrap=True)
    made.add_column("steps", justify="right")
    for name in (*backends, "bound"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("verdict")
    ordered = sorted(rows, key=lambda row: row.steps)
    by_case = {name: [row for row in ordered if row.case == name] for name in dict.fromkeys(row.case for row in rows)}
    for name, of_case in by_case.items():
        for steps, group in itertools.groupby(of_case, key=lambda row: row.steps):
            members = list(group)
            parameters = {row.backend: row for row in members if row.quantity == "parameter"}
            known = [row for row in parameters.values() if row.failure is None]  # the others have no bound
            nearest = max(known, key=_closeness, default=None)
            made.add_row(
                name if steps == of_case[0].steps else "",
                str(steps),
                *(_errors(parameters.get(backend)) for backend in backends),
                "-" if nearest is None else _cell(nearest.relative_bound, nearest.units_bound),
                "within" if all(row.within for row in members) else "[bold red]BROKEN[/]",
            )
    return made


def summary(rows: Sequence[Row]) -> list[str]:
    """What broke, a sentence each, and how many bounds hold."""
    broken = [row for row in rows if not row.within]
    sentences = [_complaint(row) for row in broken]
    sentences.append(f"{len(rows) - len(broken)} of {len(rows)} comparisons are within their bounds, {len(broken)} are not.")
    return sentences


def document(
    rows: Sequence[Row], *, version: str, command: Sequence[str], not_available: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """Everything that the JSON file says; `version` is penstock's."""
    return {
        "schema": SCHEMA,
        "penstock": version,
        "command": list(command),
        "versions": versions(),
        "device": _device(),
        "seconds": round(seconds, 3),
        "not_available": dict(not_available),
        "broken": sum(not row.within for row in rows),
        "rows": [row.as_json() for row in rows],
    }


def prepare(directory: pathlib.Path) -> None:
    """Make the directory and see that it can be written, before anything takes time.

    Raises:
        InvalidArgument: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"--report {str(directory)!r}: cannot write there: {reason}.") from error


def write_json(directory: pathlib.Path, content: Mapping[str, Any]) -> pathlib.Path:
    """Write parity.json into a directory, whole or not at all.

    Raises:
        Refused: it could not be written; an earlier one is still there.
    """
    return write_whole(directory / "parity.json", content)


def write_whole(target: pathlib.Path, content: Mapping[str, Any]) -> pathlib.Path:
    """Write a JSON file, whole or not at all; its directory must exist.

    Raises:
        Refused: it could not be written; an earlier one is still there.
    """
    temporary = target.with_name(f"{target.stem}.{uuid.uuid4().hex}.tmp")  # a plain file, so that it has the usual permissions
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        raise Refused(f"the report {str(target)!r} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _complaint(row: Row) -> str:
    place = f"{row.case} on {row.backend} after {row.steps} steps"
    if row.failure is not None:
        return f"{place}: it raised at {row.failure}"
    return (
        f"{place}: {row.quantity} has relative error {row.relative_error:.2e} (bound {row.relative_bound:.2e}) and at its "
        f"worst element {row.units:.3g} units in the last place (bound {row.units_bound:.3g})"
    )


def _closeness(row: Row) -> float:
    """How near a row comes to its bound; a NaN has no place in that order and goes first."""
    return -math.inf if math.isnan(row.element_ratio) else row.element_ratio


def _errors(row: Row | None) -> str:
    if row is None:
        return "-"
    cell = "raised" if row.failure is not None else _cell(row.relative_error, row.units)
    return cell if row.within else f"[bold red]{cell}[/]"


def _cell(relative: float, units: float) -> str:
    return f"{relative:.1e} | {units:.2g}" if units < 100 else f"{relative:.1e} | {units:.0f}"


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that figures depend on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _device() -> dict[str, Any]:
    """The machine, and what the frameworks that were used see of it."""
    device: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None:
        device["torch"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if jax is not None:
        device["jax"] = str(jax.devices()[0])
    return device
