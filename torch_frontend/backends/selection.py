"""Which backend an optimizer gets: what was asked for, or what suits its parameters; never something else in silence."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ...core.errors import InvalidArgument, Refused
from .backend import Backend
from .compiled import CompiledBackend, why_not
from .eager import EagerBackend

BACKENDS = ("auto", "triton", "compiled", "eager")

WORTH_COMPILING = 2**24
"""Elements from which on "auto" compiles: a smaller model's script is done before the compiler has repaid its start."""


def select_backend(name: str, parameters: Iterable[Tensor]) -> Backend:
    """The backend of that name; "auto" takes one that starts at once.

    Raises:
        InvalidArgument: no such name.
        Refused: that backend cannot run here; the text says why.
    """
    if name not in BACKENDS:
        raise InvalidArgument(f"backend={name!r} is not known; it must be one of {', '.join(BACKENDS)}.")
    if name == "triton":
        raise Refused("backend='triton': the Triton kernels are not built yet; use backend='compiled', 'eager' or 'auto'.")
    given = list(parameters)
    if name == "eager" or (name == "auto" and not _worth_compiling(given)):
        return EagerBackend()
    devices = {parameter.device.type for parameter in given}
    reasons = [reason for device in sorted(devices) if (reason := why_not(device)) is not None]
    if not reasons:
        return CompiledBackend()
    if name == "auto":
        return EagerBackend()
    raise Refused(
        f"backend='compiled': torch.compile does not work here ({reasons[0]}). Install a C++ compiler (or name one in CXX), "
        "or use backend='eager' or 'auto'."
    )


def _worth_compiling(parameters: list[Tensor]) -> bool:
    """Whether the steps saved repay the compiler's seconds: on a CPU, from some 16 million elements on."""
    return all(p.device.type == "cpu" for p in parameters) and sum(p.numel() for p in parameters) >= WORTH_COMPILING
