"""The processes are started once: that takes seconds, a test on them milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    running = Ranks(tmp_path_factory.mktemp("ranks"))
    yield running
    running.stop()
