"""``penstock convert``: what a file of training state holds; the same under other names, as another rule's, or with less."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

from ..core.errors import PenstockError
from . import aligned, refuse

if TYPE_CHECKING:
    from ..core.portable.file import Description
    from ..core.portable.names import Line


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "convert",
        help="show or change a file of training state",
        description="Read a file that export_state wrote. Without OUT, print what it holds (the arrays themselves are not "
        "read). With OUT, check every byte of it, change what is asked for, and write it there. Exit status: 0, or 2 if the "
        "file is damaged, the change is not possible, or OUT cannot be written; what was at OUT is then as it was.",
    )
    parser.add_argument("input", type=pathlib.Path, metavar="IN", help="the file")
    parser.add_argument("output", type=pathlib.Path, nargs="?", metavar="OUT", help="write it there; IN itself is possible")
    parser.add_argument("--names", type=pathlib.Path, metavar="TABLE.json", help="rename the parameters, as names= does")
    parser.add_argument("--inverse", action="store_true", help="use the table from right to left")
    parser.add_argument("--rule", metavar="NAME", help="declare the state of rules with the same fields to be this rule's")
    parser.add_argument(
        "--drop-compensation", action="store_true", help="forget the digits that low-precision parameters cannot hold"
    )
    parser.add_argument("--decode", action="store_true", help="write states of 8 bits as the float32 numbers that they are")
    parser.add_argument("--encode", action="store_true", help="write states of large matrices in 8 bits")
    parser.add_argument("--without-parameters", action="store_true", help="leave the parameters out")


def run(arguments: argparse.Namespace) -> int:
    """Show or convert; 0, or 2 if that cannot be done."""
    possible = ("names", "rule", "drop_compensation", "decode", "encode", "without_parameters")
    changes = [name for name in possible if getattr(arguments, name)]
    if arguments.inverse and arguments.names is None:
        return refuse("convert", "--inverse needs the table of --names.")
    if arguments.output is None and changes:
        return refuse("convert", f"--{changes[0].replace('_', '-')} changes the state; say with OUT where to write it.")
    if arguments.encode and arguments.decode:
        return refuse("convert", "--encode and --decode are opposites; leave one of them out.")
    try:
        return _show(arguments.input) if arguments.output is None else _convert(arguments)
    except PenstockError as error:
        return refuse("convert", str(error))


def _convert(arguments: argparse.Namespace) -> int:
    from ..core.portable import conversions
    from ..core.portable import file as portable_file
    from ..core.portable.names import inverted
    from ..core.portable.rename import rename
    from ..core.portable.state import names_of_rules

    table = [] if arguments.names is None else _table(arguments.names)
    state = portable_file.load(arguments.input)
    if arguments.decode:
        state = conversions.without_codes(state)
    state = rename(state, inverted(table) if arguments.inverse else table)
    if arguments.rule is not None:
        state = conversions.with_rule(state, arguments.rule)
    if arguments.encode:
        state = conversions.with_codes(state)
    if arguments.drop_compensation:
        state = conversions.without_compensation(state)
    if arguments.without_parameters:
        state = conversions.without_parameters(state)
    portable_file.save(arguments.output, state)
    print(f"written: {arguments.output} ({len(state.parameters)} parameters, {names_of_rules(state.groups)})")
    return 0


def _table(path: pathlib.Path) -> list[Line]:
    from ..core.errors import InvalidArgumentError
    from ..core.portable.names import parse_table

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(f"--names {str(path)!r} cannot be read: {reason}.") from error
    return parse_table(text)


def _show(path: pathlib.Path) -> int:
    from ..core.portable.file import describe
    from ..core.portable.state import names_of_rules

    description = describe(path)
    rows = _rows(description)
    print(aligned(rows, left=range(len(rows[0]) - 2)), end="\n\n")
    for number, group in enumerate(description.groups):
        values = ", ".join(f"{_printable(name)} {value}" for name, value in group.hyperparameters.items()) or "none known"
        print(f"group {number}, {group.rule}, {len(group.parameters)} parameters: {values}")
    held = all("parameter" in parameter.dtypes for parameter in description.parameters.values())
    print(
        f"{names_of_rules(description.groups)}, {len(description.parameters)} parameters, {'with' if held else 'without'} the "
        f"parameters themselves, {description.nbytes} bytes"
    )
    return 0


def _printable(name: str) -> str:
    """Escape control characters of a name from a file."""
    return name if name and name.isprintable() else repr(name)


def _rows(description: Description) -> list[list[str]]:
    """Return the headings, and a row for each parameter; the last two columns are numbers."""
    from ..core.portable.state import rules_of

    rules = rules_of(description.groups)
    groups = {name: number for number, group in enumerate(description.groups) for name in group.parameters}
    fields = list(dict.fromkeys(field.name for name in description.parameters for field in rules[name].fields))
    table = [["parameter", "shape", "dtype", *fields, "compensation", "step", "group"]]
    for name, parameter in description.parameters.items():
        dtypes = [parameter.dtypes.get(field, "-") for field in fields]
        lengths = " x ".join(map(str, parameter.shape)) or "scalar"
        numbers = (str(parameter.step), str(groups[name]))
        table.append([_printable(name), lengths, parameter.dtype, *dtypes, parameter.compensated, *numbers])
    return table
