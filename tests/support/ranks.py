"""Two processes that live as long as the tests: a test hands them a function, and every rank runs it."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tests.support import fsdp2_on_cpus

from penstock.parity.backends.triton_interpreter import correct_interpreter
from penstock.torch_frontend.communication import protocol

WORLD = 2
BUCKET_BYTES = 240
"""Of the layers of `models.Net`, which then take three buckets: of small tensors of several layers, and a large one alone."""

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)
CALL_TIMEOUT = 120.0


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


class Ranks:
    """Processes over gloo. If one fails or hangs, all are started again."""

    def __init__(self, directory: Path, world: int = WORLD, imports: Sequence[str] = ()) -> None:
        """`imports`: modules of the functions to run, imported once for all processes if none was started before."""
        self._directory, self._world, self._starts = directory, world, 0
        self._imports = [__name__, "tests.support.rank_models", *imports]
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank; what each returned. The function must be importable."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            while len(answers) < self._world:
                ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], CALL_TIMEOUT)
                if not ready:
                    raise RankError(
                        f"{function.__name__}: ranks {sorted(set(range(self._world)) - set(answers))} never returned"
                    )
                for pipe in ready:
                    rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
        except BaseException:
            self.stop()
            raise
        failed = [f"rank {rank}: {answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]
        if failed:
            self.stop()  # one that waited for another has a broken connection
            raise RankError("\n".join(failed))
        return [answers[rank][1] for rank in range(self._world)]

    def _start(self) -> None:
        self._starts += 1
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._imports)
        meeting = self._directory / f"meeting_{self._starts}"
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # where the server looks for modules
            for rank in range(self._world):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, rank, self._world, str(meeting)), daemon=True)
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


@contextlib.contextmanager
def bucket_bytes(limit: int) -> Iterator[None]:
    """Other buckets in this context, on this rank; 0: each gradient alone."""
    before, protocol.BUCKET_BYTES = protocol.BUCKET_BYTES, limit
    try:
        yield
    finally:
        protocol.BUCKET_BYTES = before


def _serve(pipe: Connection, rank: int, world: int, meeting: str) -> None:
    warnings.simplefilter("error")
    # Of torch 2.6 itself, in its checkpoints and in its tensor parallelism:
    warnings.filterwarnings("ignore", "DTensor random operators may not", UserWarning, "torch.distributed.tensor")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, "torch.distributed.checkpoint")
    fsdp2_on_cpus.provide()
    correct_interpreter()
    protocol.BUCKET_BYTES = BUCKET_BYTES
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
