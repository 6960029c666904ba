"""``penstock plan``: the memory of a training step of a large model, without the device and without the memory."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from .. import __version__
from ..core.errors import PenstockError
from . import aligned, refuse, require


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="the memory of a training step, without the device",
        description="Take one training step of a Llama-like model on fake tensors, in every mode, and print the most bytes "
        "that are alive. The defaults are Llama-7B's shape in bfloat16, and the optimizer's own. With --micro-batches "
        "the modes that divide a step are planned, too. Exit status: 0, or 2 on bad usage.",
    )
    sizes = {
        "layers": (32, "blocks"),
        "width": (4096, "of the residual stream"),
        "heads": (32, "of attention"),
        "key-value-heads": (None, "of keys and values; default: as many as heads"),
        "hidden": (11008, "width of the feed-forward part"),
        "vocabulary": (32000, "tokens"),
        "batch": (1, "sequences in a step"),
        "sequence": (2048, "tokens in a sequence"),
        "micro-batches": (1, "parts of the batch, in the modes plain, hold, state and blocks"),
    }
    for name, (default, text) in sizes.items():
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text + shown)
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters (default bfloat16)")
    parser.add_argument(
        "--optimizer",
        default="StableAdamW",
        help="one of penstock.torch_frontend's (default StableAdamW); A+B: A for the matrices of hidden layers and B for all "
        "else (Muon is Muon+AdamW)",
    )
    parser.add_argument("--precision", default="exact", help="exact (default), compact or smallest: chooses the next two")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print bytes a parameter and GiB by model size, rule and precision, and nothing else",
    )
    parser.add_argument(
        "--compensation",
        default="auto",
        help="auto (default: split for bfloat16), auto8, none, kahan, split, split8 or stochastic",
    )
    parser.add_argument("--state-dtype", help="of the moments, or 8bit; default: the optimizer's choice for the dtype")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument(
        "--mode", action="append", metavar="NAME", help="torch, plain, release, guard, hold, state or blocks; may be repeated"
    )
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write every figure there as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Plan, print and write; 0, or 2 on bad usage."""
    if arguments.table:
        from ..planner import sizes

        print(aligned(sizes.table(), left=(0,)), end="\n\n")
        print(*sizes.NOTES, sep="\n")
        return 0
    try:
        require("torch", extra="torch")
        from ..planner.settings import LlamaShape, Training, modes

        shape = LlamaShape(
            layers=arguments.layers,
            width=arguments.width,
            heads=arguments.heads,
            key_value_heads=arguments.key_value_heads,
            hidden=arguments.hidden,
            vocabulary=arguments.vocabulary,
        )
        training = Training(
            batch=arguments.batch,
            sequence=arguments.sequence,
            micro_batches=arguments.micro_batches,
            dtype=arguments.dtype,
            optimizer=arguments.optimizer,
            precision=arguments.precision,
            compensation=arguments.compensation,
            state_dtype=arguments.state_dtype,
            checkpointing=not arguments.no_checkpointing,
        )
        chosen = modes(arguments.mode, training)
        if arguments.output is not None and not arguments.output.absolute().parent.is_dir():
            return refuse("plan", f"--output {str(arguments.output)!r}: its directory does not exist.")

        from ..planner import report
        from ..planner.plan import plan

        plans = []
        for mode in chosen:
            if sys.stderr.isatty():
                print(f"planning {mode.name}", file=sys.stderr)
            plans.append(plan(shape, training, mode))
        print(report.title(training, plans), end="\n\n")
        print(aligned(report.table(plans), left=report.LEFT), end="\n\n")
        print(*report.summary(shape, training, plans), sep="\n")
        if arguments.output is not None:
            from ..parity import report as files

            command = ["penstock", *sys.argv[1:]]
            content = report.document(shape, training, plans, version=__version__, command=command, versions=files.versions())
            print(f"written: {files.write_whole(arguments.output, content)}")
        return 0
    except PenstockError as error:
        return refuse("plan", str(error))
