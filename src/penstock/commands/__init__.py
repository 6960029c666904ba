"""The commands: thin. They parse, call and print; what they call lives in the other packages."""

from __future__ import annotations

import sys


def refuse(command: str, sentence: str) -> int:
    """Print on standard error why a command cannot do what was asked, and return its exit status, 2."""
    print(f"penstock {command}: {sentence}", file=sys.stderr)
    return 2
