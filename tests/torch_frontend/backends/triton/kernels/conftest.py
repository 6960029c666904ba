"""These tests run the kernels in two ways: in Triton's interpreter, in a process that has it from its start; otherwise compiled
for sm_90, by `tests.support.ptx`, warp by warp in a random order, with an error for what nothing orders.

`make test` runs all in the interpreter (`test_backend.py` starts that process), and those marked `compiled` in the other way as
well; `make test-all` runs all in both. By hand:

    TRITON_INTERPRET=1 python -m pytest -p no:xdist FILE
    python -m pytest -m "" FILE
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.torch_frontend.backends.triton.availability import interpreted

IN_OTHER_PROCESSES, OF_THE_INTERPRETER = "test_over_ranks.py", "test_tickets.py"

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not interpreted():
    collect_ignore_glob = [IN_OTHER_PROCESSES, OF_THE_INTERPRETER]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most compiled kernels to `make test-all`."""
    for item in items:
        if not interpreted() and Path(__file__).parent in item.path.parents and not item.get_closest_marker("compiled"):
            item.add_marker("exhaustive")


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """numpy, which computes what the kernels say, warns of infinities and NaN; a device does not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        if not interpreted():
            from tests.support.ptx.launching import on_machine

            stack.enter_context(on_machine())
        yield
