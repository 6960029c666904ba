"""These tests run the kernels in Triton's interpreter, which a process has from its start or not at all.

`tests/torch_frontend/backends/triton/test_backend.py` starts such processes; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/torch_frontend/backends/triton/interpreter
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.torch_frontend.backends.triton.availability import interpreted

collect_ignore_glob = [] if interpreted() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _numbers_as_on_a_device() -> Iterator[None]:
    """numpy, which computes what the kernels say, warns of infinities and NaN; a device does not."""
    with np.errstate(all="ignore"):
        yield
