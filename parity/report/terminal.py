"""The report in the terminal: a table a section, and sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from ..compare import Row
from ..rules import NOT_COVERED
from ..suite import Result, SectionResult
from .document import collapse, verdicts


def tables(result: Result) -> Iterator[Table]:
    """The tables of every section: the updates case by case; the others collapsed to one line a kind of case; the peers."""
    for found in result.sections:
        own = [row for row in found.rows if row.backend not in result.peers]
        if found.section.name == "updates":
            if own:
                yield errors(own)
        elif any(row.judged for row in own):
            yield kinds(found.section.title, own)
        informative = [row for row in found.rows if row.data is not None and "differing" in row.data]
        if informative:
            yield differences(found.section.title, informative)
        if any(row.judged and row.backend in result.peers for row in found.rows):
            yield peers(found, result)


def errors(rows: Sequence[Row]) -> Table:
    """One line a case and number of steps: every backend's error of the parameter, its bound, the verdict.

    A cell is the relative error and the units in the last place; the bound's units are those of the backend that comes
    nearest to them. The verdict counts the moments, too.
    """
    backends = list(dict.fromkeys(row.backend for row in rows))
    made = Table(title="relative error of parameter + compensation against float64 | units in the last place")
    made.add_column("case", no_wrap=True)
    made.add_column("steps", justify="right")
    for name in (*backends, "bound"):
        made.add_column(escape(name), justify="right", no_wrap=True)
    made.add_column("verdict")
    ordered = sorted(rows, key=lambda row: row.steps)
    by_case: dict[str, list[Row]] = {}
    for name in dict.fromkeys(row.case for row in rows):
        by_case[name] = []
    for row in ordered:
        by_case[row.case].append(row)
    for name, of_case in by_case.items():
        for steps, group in itertools.groupby(of_case, key=lambda row: row.steps):
            members = list(group)
            parameters = {row.backend: row for row in members if row.quantity == "parameter"}
            known = [row for row in parameters.values() if row.failure is None]  # the others have no bound
            nearest = max(known, key=_closeness, default=None)
            made.add_row(
                escape(name) if steps == of_case[0].steps else "",
                str(steps),
                *(_errors(parameters.get(backend)) for backend in backends),
                "-" if nearest is None else _cell(nearest.relative_bound, nearest.units_bound),
                _verdict(members),
            )
    return made


def kinds(title: str, rows: Sequence[Row]) -> Table:
    """One line a kind of case (the second part of its name): for every backend, comparisons and the largest error / bound."""
    backends = list(dict.fromkeys(row.backend for row in rows))
    made = Table(title=f"{escape(title)}\ncomparisons | largest error in parts of its bound")
    made.add_column("cases", no_wrap=True)
    for name in backends:
        made.add_column(escape(name), justify="right", no_wrap=True)
    made.add_column("verdict")
    for kind in dict.fromkeys(kind_of(row.case) for row in rows):
        members = [row for row in rows if kind_of(row.case) == kind]
        by_backend = [[row for row in members if row.backend == name] for name in backends]
        made.add_row(escape(kind), *(_largest(found) for found in by_backend), _verdict(members))
    return made


def differences(title: str, rows: Sequence[Row]) -> Table:
    """How many elements differ in their bits, by pair of backends and by case; what there are more of goes down."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        assert row.data is not None
        pair, place = f"{row.data['other']} - {row.backend}", f"{row.case.partition('/')[2]}, {row.steps}"
        cells.setdefault((pair, place), []).append(f"{row.units:.0f}")
    pairs, places = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    quantities = ", ".join(dict.fromkeys(row.quantity for row in rows))
    made = Table(title=f"{escape(title)}\nelements that differ: {quantities}")
    pairs_go_down = len(pairs) > len(places)
    made.add_column("backends" if pairs_go_down else "case, steps", no_wrap=True)
    for name in places if pairs_go_down else pairs:
        made.add_column(escape(name.replace("/", "\n").replace(", ", "\n")), justify="right")
    for line in pairs if pairs_go_down else places:
        keys = [(line, place) for place in places] if pairs_go_down else [(pair, line) for pair in pairs]
        made.add_row(escape(line), *(" ".join(cells.get(key, ["-"])) for key in keys))
    return made


def peers(found: SectionResult, result: Result) -> Table:
    """One line a peer: how many comparisons, how many beyond the bounds, and how far."""
    made = Table(title=f"peers, for comparison only: {found.section.name}")
    for column in ("peer", "comparisons", "within", "beyond", "largest error / bound"):
        made.add_column(column, justify="left" if column == "peer" else "right")
    for line in verdicts(found, result):
        if line["peer"]:
            far = "-" if line["largest_ratio"] is None else f"{line['largest_ratio']:.3g}"
            made.add_row(
                escape(line["backend"]), str(line["judged"]), str(line["judged"] - line["beyond"]), str(line["beyond"]), far
            )
    return made


def summary(result: Result) -> list[str]:
    """Return sentences: each broken bound, what was not run by reason, and the number of bounds that hold, also by backend."""
    sentences = [complaint(row) for row in result.broken]
    for found in result.sections:
        for line in collapse(found.refusals):
            if line["backend"] not in result.peers:
                cases = f"{line['cases']} cases of {found.section.name}, such as {line['first']}"
                sentences.append(f"{line['backend']} did not run {cases}: {line['reason'].rstrip('.')}.")
    by_reason: dict[str, list[str]] = {}
    for name, why in NOT_COVERED.items():
        by_reason.setdefault(why, []).append(name)
    sentences += [f"Not covered by this suite: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    open_signs = [row for row in result.rows if row.data is not None and "undecided" in row.data]
    if open_signs:
        most = max(open_signs, key=lambda row: (row.data or {})["undecided"])
        sentences.append(
            f"The bounds leave signs or selections of {len({row.case for row in open_signs})} cases undecided, and count what "
            f"these may change: at most {(most.data or {})['undecided']} elements and steps ({most.case}, {most.steps} steps)."
        )
    judged = [row for row in result.rows if row.judged and row.backend not in result.peers]
    broken = len(result.broken)
    counts = f"{len(judged) - broken} of {len(judged)} comparisons are within their bounds, {broken} are not."
    by_backend: dict[str, list[Row]] = {}
    for row in judged:
        by_backend.setdefault(row.backend, []).append(row)
    if len(by_backend) > 1:
        shares = (f"{name} {sum(row.within for row in rows)} of {len(rows)}" for name, rows in by_backend.items())
        counts += f" By backend: {', '.join(shares)}."
    sentences.append(counts if judged else "Nothing was compared with a bound: this is for information.")
    return sentences


def complaint(row: Row) -> str:
    """Return a sentence on a row that breaks its bound."""
    place = f"{row.case} on {row.backend} after {row.steps} steps"
    if row.failure is not None:
        return f"{place}: it failed at {row.failure}"
    return (
        f"{place}: {row.quantity} has relative error {row.relative_error:.2e} (bound {row.relative_bound:.2e}) and at its "
        f"worst element {row.units:.3g} units in the last place (bound {row.units_bound:.3g})"
    )


def kind_of(case: str) -> str:
    """The part of a case's name that says its kind: the one after the section's."""
    parts = case.split("/")
    return parts[1] if len(parts) > 1 else case


def _largest(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.judged]
    if not judged:
        return "-"
    largest = max(row.ratio for row in judged)
    cell = f"{len(judged)} | {largest:.2g}"
    return cell if all(row.within for row in judged) else f"[bold red]{cell}[/]"


def _verdict(rows: Sequence[Row]) -> str:
    return "within" if all(row.within for row in rows) else "[bold red]BROKEN[/]"


def _closeness(row: Row) -> float:
    """Sort key: error / bound; a NaN comes first."""
    return -math.inf if math.isnan(row.element_ratio) else row.element_ratio


def _errors(row: Row | None) -> str:
    if row is None:
        return "-"
    cell = "raised" if row.failure is not None else _cell(row.relative_error, row.units)
    return cell if row.within else f"[bold red]{cell}[/]"


def _cell(relative: float, units: float) -> str:
    return f"{relative:.1e} | {units:.2g}" if units < 100 else f"{relative:.1e} | {units:.0f}"
