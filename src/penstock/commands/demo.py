"""``penstock demo``: one small language model, trained in PyTorch and in JAX, with and without gradient release."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

from ..core.errors import PenstockError
from ..demonstration.settings import DEFAULT_STEPS, DTYPES, ModelShape, Settings
from . import refuse, require

NEEDED = ("torch", "jax", "optax", "rich", "matplotlib")


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "demo",
        help="train one small language model in PyTorch and in JAX, with and without gradient release",
        description="Train a byte-level transformer on real text, from one initialisation and on the same batches: in PyTorch "
        "with zero_grad(set_to_none=False), with set_to_none=True and with gradient release, and in JAX. Print how far the "
        "runs are apart and how much gradient was alive, and draw both. Exit status: 0, 1 when --dtype float64 finds that "
        "the runs do not agree, 2 on bad usage or when the figure cannot be written.",
    )
    steps = ", ".join(f"{count} in {dtype}" for dtype, count in DEFAULT_STEPS.items())
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="train on this file, not on Python's own source")
    parser.add_argument("--steps", type=int, metavar="N", help=f"updates in each run (default: {steps})")
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda, for both frameworks")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo.png"), metavar="FILE", help="the figure")
    parser.add_argument("--dtype", default="float32", help=f"{' or '.join(DTYPES)}, which also checks that the runs agree")


def run(arguments: argparse.Namespace, *, shape: ModelShape | None = None) -> int:
    """Run the demonstration; 0, 1 when float64 runs do not agree, 2 on bad usage or without a figure.

    Args:
        arguments: parsed.
        shape: of another model than the default one.
    """
    try:
        require(*NEEDED)
        settings = Settings(
            steps=DEFAULT_STEPS.get(arguments.dtype, 1) if arguments.steps is None else arguments.steps,
            dtype=arguments.dtype,
            device=arguments.device,
            text=arguments.text,
            output=arguments.output,
        )
        if shape is not None:
            settings = dataclasses.replace(settings, shape=shape)
        # Threads that wait busily for each other cost many times the work itself as soon as another process wants the
        # cores. OpenMP reads this once, when PyTorch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Both frameworks live in this process: JAX must not take most of an accelerator's memory in advance.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        from rich.console import Console

        from ..demonstration.demonstrate import WIDTH, demonstrate

        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        return 0 if demonstrate(settings, console) else 1
    except PenstockError as error:
        return refuse("demo", str(error))
