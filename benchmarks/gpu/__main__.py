"""Every check and measurement that needs a GPU, in under eight minutes: python -m benchmarks.gpu --out DIR [--dry] [...]

DIR/gpu.json is written after each section, with versions, device and command, so that an interrupted run leaves the figures
of the sections before. `--dry` runs the same code on small tensors on the CPU, with the kernels in Triton's interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.support import parser_of, write_result

STUCK_SECONDS = 420
"""Largest time of a section; after it the process ends with a traceback, and the results of earlier sections stay."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; return 1 if one of them failed or a law of the kernels is broken."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, in Triton's interpreter")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--full-parity", action="store_true", help="every case, up to 2000 steps; takes longer than the rest")
    given = parser.parse_args(arguments)
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the memory that PyTorch needs
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products

    import torch

    from penstock.parity.backends.triton_interpreter import correct_interpreter

    from . import sections

    correct_interpreter()

    if not given.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; use --dry to run the same code small on the CPU")
    found = sections.SECTIONS
    for name in given.sections or ():
        if name not in found:
            parser.error(f"--sections {name}: not known; it must be one of {', '.join(found)}")
    setting = sections.Setting(dry=given.dry, full_parity=given.full_parity)
    result: dict[str, Any] = {"device": setting.description(), "dry": given.dry, "sections": {}, "seconds": {}, "failed": {}}
    for name in given.sections or found:
        started = time.perf_counter()
        print(f"{name} ...", flush=True)
        if name not in ("jax", "parity"):  # a deadlock of the kernels must not lose the results of earlier sections
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        try:
            result["sections"][name] = found[name](setting)
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        result["seconds"][name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {result['seconds'][name]} s", flush=True)
        write_result(given.out / "gpu.json", result)
        setting.clean_up()
    broken = [name for name, figures in result["sections"].items() if not figures.get("holds", True)]
    for name in broken:
        print(f"{name}: a law is broken, see {given.out / 'gpu.json'}")
    return 1 if result["failed"] or broken else 0


if __name__ == "__main__":
    sys.exit(main())
