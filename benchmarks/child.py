"""A benchmark's part in a process of its own: a fresh interpreter, whose last line of output is its result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_child(module: str, *arguments: str, **environment: str) -> Any:
    """What `python -m module arguments...` prints as its last line, parsed.

    The child imports from where this process does, and gets `environment` besides its variables.

    Raises:
        RuntimeError: the child failed; the message ends with what it wrote to stderr.
    """
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    command = [sys.executable, "-m", module, *arguments]
    variables = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
