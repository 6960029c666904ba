"""The process of `interpreted_triton`: python -m penstock.parity.backends.triton_worker, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, BinaryIO

import numpy as np

from .torch_optimizers import TorchBackend
from .triton_interpreter import correct_interpreter


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more: (failure, answer), one of them None."""
    run: Any = None
    while True:
        try:
            name, *arguments = pickle.load(requests)
        except EOFError:
            return
        failure, answer = None, None
        try:
            with np.errstate(all="ignore"):  # numpy computes what the kernels say, and a device does not warn
                if name == "start":
                    run = TorchBackend("triton").start(*arguments)
                else:
                    answer = getattr(run, name)(*arguments)
        except Exception as error:
            failure = error
        pickle.dump((failure, answer), answers)
        answers.flush()


if __name__ == "__main__":
    correct_interpreter()
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed must not come between the answers
    serve(sys.stdin.buffer, pipe)
