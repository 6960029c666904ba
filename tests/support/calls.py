"""Counts of the Python functions of this package that a call runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def calls_in(run: Callable[[], Any]) -> Counter[str]:
    """How often each function of this package is called, by its name."""
    counted: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "penstock" in frame.f_globals.get("__name__", ""):
            counted[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted
