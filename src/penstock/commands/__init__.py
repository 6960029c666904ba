"""The commands: they parse arguments, call the other packages, and print."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ..core.errors import MissingDependencyError


def refuse(command: str, sentence: str) -> int:
    """Print on standard error why a command cannot do what was asked, and return its exit status, 2."""
    print(f"penstock {command}: {sentence}", file=sys.stderr)
    return 2


def require(*modules: str) -> None:
    """Raise unless the packages of a command are installed.

    Raises:
        MissingDependencyError: some are not.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"this command needs {' and '.join(missing)}; install with: pip install 'penstock[parity]'"
        )
