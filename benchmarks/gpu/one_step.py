"""A few steps of one optimizer, for tools that watch a process: python -m benchmarks.gpu.one_step [--small] [...]."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.support import parser_of
from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton.configuration import TABLE

from .setting import BETAS, SHAPES, STORAGES, Setting, update_alone

SMALL = [1, 8193, 100_003]
"""Sizes for a tool that makes every access a thousand times slower."""


def main() -> None:
    """Take a step, and update the first tensors one at a time."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", choices=SHAPES, default="124M")
    parser.add_argument("--storage", choices=[storage.name for storage in STORAGES], default="split")
    parser.add_argument("--programs", type=int, help="programs on a multiprocessor")
    given = parser.parse_args()
    (storage,) = (storage for storage in STORAGES if storage.name == given.storage)
    if given.programs:
        TABLE["cuda", None] = dataclasses.replace(TABLE["cuda", None], programs=given.programs)
    parameters = Setting(dry=False).parameters(
        SMALL if given.small else SHAPES[given.model], storage.dtype, coded=storage.coded
    )
    optimizer = StableAdamW(parameters, lr=1e-3, betas=BETAS, **storage.options, backend="triton")
    optimizer.step()
    for p in parameters[:3]:
        update_alone(optimizer, p)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
