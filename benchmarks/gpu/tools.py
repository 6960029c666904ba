"""Programs that watch a process: they are run for a bounded time and ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import NamedTuple


class Ended(NamedTuple):
    """The exit status, None if time ran out, and the output: that of stderr follows that of stdout."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The end of all output, for a row."""
        return ("" if self.status is not None else "(its time ran out) ") + (self.stdout + self.stderr)[-1500:]


def run_tool(command: Sequence[str], seconds: float, **environment: str) -> Ended:
    """Run a command with `environment` in addition to the variables of this process.

    A tool's child, which runs the kernels, outlives it if only the tool is killed, and keeps the device and the pipes.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        process_group=0,  # its own, so that its children can be ended with it
    )
    try:
        return Ended(*_output_of(process, seconds))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _output_of(process: subprocess.Popen[str], seconds: float) -> tuple[int | None, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=seconds)
        return process.returncode, stdout, stderr
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, *process.communicate()
