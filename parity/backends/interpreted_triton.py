"""The backend "triton": on a GPU as any other; without one in Triton's interpreter, in a process of its own.

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
    from ..events import EventCase, EventRun
    from ..memory import Measured, MemoryCase
    from ..trajectories import Trajectory, TrajectoryRun

INTERPRETED_EVENTS = "without a CUDA device it runs plain updates only, in a process of its own"
"""Why the interpreter runs no event sequences."""

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
    """A run in the worker. It is the only one there: a new one takes its place."""

    def __init__(self, case: Case) -> None:
        worker().call("start", case)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        worker().call("step", dict(gradients))

    def held(self) -> Mapping[str, Held]:
        return worker().call("held")


class TritonBackend:
    """The backend "triton", in the interpreter where there is no GPU."""

    name = "triton"
    norm_eps = TorchBackend.norm_eps
    abilities = TorchBackend.abilities

    @property
    def flushes_subnormals(self) -> bool:
        """Whether the device that runs the kernels does; the interpreter does not."""
        here = self._here()
        return here is not None and here.flushes_subnormals

    def unavailable(self) -> str | None:
        try:
            from ...torch_frontend.backends.triton.availability import installed
        except (ImportError, PenstockError) as error:
            return str(error)
        return None if installed() else "Triton is not installed; install it with: pip install triton"

    def slow(self) -> str | None:
        """Why it runs only when it is named, or None where there is a GPU."""
        if self._here() is not None:
            return None
        return "there is no CUDA device, and Triton's interpreter takes minutes; name it with --backend triton --quick"

    def refuses(self, case: Case) -> str | None:
        return TorchBackend(self.name).refuses(case)

    def start(self, case: Case) -> Run:
        here = self._here()
        return InterpretedRun(case) if here is None else here.start(case)

    def refuses_events(self, case: EventCase) -> str | None:
        here = self._here()
        return INTERPRETED_EVENTS if here is None else here.refuses_events(case)

    def start_events(self, case: EventCase) -> EventRun:
        return self._in_this_process().start_events(case)

    def start_plain(self, case: EventCase) -> EventRun:
        return self._in_this_process().start_plain(case)

    def refuses_memory(self, case: MemoryCase) -> str | None:
        return INTERPRETED_EVENTS if self._here() is None else None

    def measure_memory(self, case: MemoryCase) -> Measured:
        return self._in_this_process().measure_memory(case)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        return "Triton's interpreter would take minutes a case" if self._here() is None else None

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        here = self._here()
        if here is None:
            raise RefusedError("backend='triton' trains the model only where there is a GPU, or inside its interpreter.")
        return here.start_trajectory(case)

    def _in_this_process(self) -> TorchBackend:
        here = self._here()
        if here is None:
            raise RefusedError(f"backend='triton' cannot run this: {INTERPRETED_EVENTS}.")
        return here

    def _here(self) -> TorchBackend | None:
        """The kernels in this process, if it can run them."""
        import torch

        from ...torch_frontend.backends.triton.availability import interpreted

        if interpreted():
            correct_interpreter()
            return TorchBackend(self.name)
        return TorchBackend(self.name, "cuda") if torch.cuda.is_available() else None
