"""In a process of Triton's interpreter the tests run the kernels, and the interpreter has to round as a GPU does."""

from __future__ import annotations

from penstock.parity.backends.triton_interpreter import correct_interpreter

correct_interpreter()
