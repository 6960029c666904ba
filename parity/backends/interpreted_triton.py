"""The backend "triton": on a GPU, or without one in Triton's interpreter, in its own process.

A process is one of the interpreter from its start or not at all, and what it interprets cannot be compiled any more. So the
runs live in a worker, which is started at the first of them with TRITON_INTERPRET=1 and ends with this process; arrays go
back and forth over its pipes. The interpreter takes about 10 ms for a step of one small tensor: a quick run takes minutes.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import PenstockError, RefusedError
from ..cases import Case
from .protocol import Held, Run
from .torch_optimizers import TorchBackend
from .triton_interpreter import correct_interpreter

if TYPE_CHECKING:
    from ..codings import CodingCase
    from ..events import EventCase
    from ..markers import MarkerCase
    from ..memory import MemoryCase
    from ..trajectories import Trajectory

PLAIN_UPDATES_ONLY = "without a CUDA device it runs plain updates only, in a process of its own"
"""Why the worker runs no event sequences, models and the like."""

WORKER = f"{__package__}.triton_worker"


class Worker:
    """A process of the interpreter, and the calls into it."""

    def __init__(self) -> None:
        import_path = [*(path for path in sys.path if path), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, import_path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        atexit.register(self.close)

    def call(self, *request: Any) -> Any:
        """Send a request and wait for the answer; an exception there is raised here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            failure, answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            worker.cache_clear()
            raise RefusedError("the process of Triton's interpreter has ended; its last words are above.") from error
        if failure is not None:
            raise failure
        return answer

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(timeout=10)


@functools.cache
def worker() -> Worker:
    """The one worker of this process."""
    return Worker()


class InterpretedRun:
    """A run in the worker, which has only one: a new run replaces it."""

    def __init__(self, case: Case) -> None:
        worker().call("start", case)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        worker().call("step", dict(gradients))

    def held(self) -> Mapping[str, Held]:
        return worker().call("held")


class TritonBackend(TorchBackend):
    """The backend "triton": on a GPU, or in this process where that is one of the interpreter, or else in the worker."""

    def __init__(self) -> None:
        super().__init__("triton")

    @property
    def device(self) -> str:
        """Where the parameters are."""
        import torch

        from ...torch_frontend.backends.triton.availability import interpreted

        return "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"

    @property
    def in_worker(self) -> bool:
        """Whether the kernels need the worker."""
        from ...torch_frontend.backends.triton.availability import interpreted

        if interpreted():
            correct_interpreter()
        return self.device == "cpu" and not interpreted()

    def unavailable(self) -> str | None:
        try:
            from ...torch_frontend.backends.triton.availability import installed
        except (ImportError, PenstockError) as error:
            return str(error)
        return None if installed() else "Triton is not installed; install it with: pip install triton"

    def slow(self) -> str | None:
        """Why it runs only when it is named; None with a GPU."""
        if not self.in_worker:
            return None
        return "there is no CUDA device, and Triton's interpreter takes minutes; name it with --backend triton --quick"

    def start(self, case: Case) -> Run:
        return InterpretedRun(case) if self.in_worker else super().start(case)

    def refuses_codings(self, case: CodingCase) -> str | None:
        return PLAIN_UPDATES_ONLY if self.in_worker else super().refuses_codings(case)

    def refuses_events(self, case: EventCase) -> str | None:
        return PLAIN_UPDATES_ONLY if self.in_worker else super().refuses_events(case)

    def refuses_memory(self, case: MemoryCase) -> str | None:
        return PLAIN_UPDATES_ONLY if self.in_worker else super().refuses_memory(case)

    def refuses_markers(self, case: MarkerCase) -> str | None:
        return PLAIN_UPDATES_ONLY if self.in_worker else super().refuses_markers(case)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        return PLAIN_UPDATES_ONLY if self.in_worker else super().refuses_trajectory(case)
