"""Two processes for the trainers, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    running = Ranks(tmp_path_factory.mktemp("ranks"), imports=["tests.torch_frontend.integrations.test_trainers_over_ranks"])
    yield running
    running.stop()
