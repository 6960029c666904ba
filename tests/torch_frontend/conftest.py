"""What all of these tests share. In a process of Triton's interpreter kernels are run, and must round as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks import Ranks

from penstock.parity.backends.triton_interpreter import correct_interpreter

correct_interpreter()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes, started once by the first test that uses them: that takes seconds, a test on them milliseconds."""
    running = Ranks(tmp_path_factory.mktemp("ranks"))
    yield running
    running.stop()
