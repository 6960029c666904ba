"""The parity suite: checks every backend against the specification, and any other optimizer that is registered.

`run` runs cases on backends and compares them with the float64 reference, against the bounds that `parity.bounds`
derives; `register` adds an optimizer of your own. The command ``penstock parity`` prints and writes what `run` finds.
Importing this package imports no framework.
"""

from .backends import Backend, Held, Run, optax_transform, register, torch_optimizer, unregister
from .cases import Case, Problem, Storage
from .compare import Row
from .suite import run

__all__ = [
    "Backend",
    "Case",
    "Held",
    "Problem",
    "Row",
    "Run",
    "Storage",
    "optax_transform",
    "register",
    "run",
    "torch_optimizer",
    "unregister",
]
