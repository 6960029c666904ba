"""Every check and measurement that needs a GPU: python -m benchmarks.gpu --stage N [N ...] --out DIR [--dry]

DIR/stage-N.json is written after each row, with versions, device and command, so that an interrupted run leaves the figures
before it. The stages run in a process of their own: if it hangs or crashes, the section is marked as failed, and a new
process goes on with the next one. `--dry` runs the same lines on small tensors on the CPU, with the kernels in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.support import parser_of, write_result

FAILED = 3
"""Exit status of a process that has come to the end, when a section failed or a law is broken. Others mean: go on."""

PROCESSES = 8
"""Largest number of processes of a run; each but the first continues after a hang or a crash."""

SHOWN = 300
"""Characters of a row on stdout: of a machine that is elsewhere, sometimes only the end of the output comes back."""

COMPILED_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For JAX in a dry run, whose programs run once."""


def main(arguments: list[str] | None = None) -> int:
    """Run stages; return 1 if a section failed or a law of the kernels is broken."""
    parser = parser_of(__doc__)
    parser.add_argument("--stage", type=int, nargs="+", required=True, metavar="N", choices=range(1, 8), help="1 to 7")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, in Triton's interpreter")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        return work(given.stage, given.out, dry=given.dry)
    for number in given.stage:
        path_of(given.out, number).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments), "--worker"]
    for _ in range(PROCESSES):
        status = subprocess.run(command, check=False).returncode
        if status in (0, 2, FAILED):
            return 1 if status == FAILED else status
    return 1


def path_of(out: Path, stage: int) -> Path:
    """Return the file of a stage's results."""
    return out / f"stage-{stage}.json"


def work(numbers: list[int], out: Path, *, dry: bool) -> int:
    """Run stages in this process, which it prepares."""
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        os.environ.setdefault("XLA_FLAGS", COMPILED_FAST)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the memory that PyTorch needs
    import torch

    if not dry and not torch.cuda.is_available():
        print("there is no CUDA device; use --dry to run the same lines small on the CPU", file=sys.stderr)
        return 2
    from penstock.parity.backends.triton_interpreter import correct_interpreter

    from .setting import Setting
    from .stages import STAGES

    correct_interpreter()
    return run_stages({number: STAGES[number] for number in numbers}, out, Setting(dry))


def run_stages(stages: dict[int, Any], out: Path, setting: Any) -> int:
    """Run what earlier processes of this run have not begun."""
    broken = False
    for number, stage in stages.items():
        result = Result(path_of(out, number), setting)
        for name, section in stage.sections.items():
            if name not in result.sections:
                run_section(result, name, section, setting, stage.seconds)
                setting.clean_up()
            elif not result.sections[name]["finished"]:  # by the process before this one
                result.finish(name, failed="the process hung or crashed here")
        found = result.broken()
        broken |= bool(found)
        print(f"stage {number}: {', '.join(found) + ' failed' if found else 'no section failed'}: {result.path}", flush=True)
        if found and stage.stops:
            break
    return FAILED if broken else 0


class Result:
    """The results of a stage, in its file."""

    def __init__(self, path: Path, setting: Any) -> None:
        known = json.loads(path.read_text()) if path.exists() else {}
        self.path = path
        self.sections: dict[str, Any] = known.get("sections", {})
        self._common = {"device": setting.description(), "dry": setting.dry}

    @property
    def seconds(self) -> float:
        """The seconds that all sections have taken."""
        return sum(section["seconds"] for section in self.sections.values())

    def write(self) -> None:
        """Write the file."""
        write_result(self.path, {**self._common, "sections": self.sections})

    def finish(self, name: str, **reason: str) -> None:
        """Mark a section as finished; give `failed` or `left_out` if it did not come to its own end."""
        self.sections[name] |= {"finished": True, **reason}
        self.write()

    def broken(self) -> list[str]:
        """Return the names of sections that failed, or have a broken law."""
        laws = {name: all(row.get("holds", True) for row in section["rows"]) for name, section in self.sections.items()}
        return [name for name, section in self.sections.items() if "failed" in section or not laws[name]]


def run_section(result: Result, name: str, section: Any, setting: Any, seconds: float) -> None:
    """Collect a section's rows until its stage's time is over; the process ends if no row comes for too long."""
    print(f"{name} ...", flush=True)
    before, started = result.seconds, time.monotonic()
    rows: list[Any] = []
    mine = result.sections[name] = {"finished": False, "seconds": 0.0, "rows": rows}
    result.write()
    reason: dict[str, str] = {}
    try:
        faulthandler.dump_traceback_later(section.stuck, exit=True)
        for row in section.run(setting):
            rows.append(row)
            mine["seconds"] = round(time.monotonic() - started, 1)
            result.write()
            print(f"  {json.dumps(row)[:SHOWN]}", flush=True)
            if before + time.monotonic() - started > seconds:
                reason = {"left_out": f"the rest: the stage's {seconds} s are over"}
                break
            faulthandler.dump_traceback_later(section.stuck, exit=True)
        setting.synchronize()
    except Exception as error:
        traceback.print_exc()
        reason = {"failed": f"{type(error).__name__}: {error}"}
    faulthandler.cancel_dump_traceback_later()
    mine["seconds"] = round(time.monotonic() - started, 1)
    result.finish(name, **reason)
    print(f"{name}: {mine['seconds']} s", flush=True)
    if reason.get("failed") and "CUDA" in reason["failed"]:
        sys.exit(4)  # after such an error nothing works in this process


if __name__ == "__main__":
    sys.exit(main())
