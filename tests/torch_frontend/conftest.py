"""What all of these tests share. In a process of Triton's interpreter kernels are run, and must round as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.support.ranks import Ranks
from tests.support.torch_models import compiling_small_tensors

from penstock.core.combinations import Combination
from penstock.parity.backends.triton_interpreter import correct_interpreter

correct_interpreter()


@pytest.fixture(autouse=True)
def _the_compiled_backend_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests with a parameter "compiled", or a cell of the table with that backend."""
    given = getattr(getattr(request.node, "callspec", None), "params", {}).values()
    parts = [part for value in given for part in (value if isinstance(value, tuple) else (value,))]
    wanted = any(part == "compiled" for part in parts if isinstance(part, str))
    wanted |= any(part.backend == "compiled" for part in parts if isinstance(part, Combination))
    with compiling_small_tensors() if wanted else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes, started once by the first test that uses them: that takes seconds, a test on them milliseconds."""
    running = Ranks(tmp_path_factory.mktemp("ranks"))
    yield running
    running.stop()
