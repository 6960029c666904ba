"""Selection of an optimizer's backend: the requested one, or an error; "auto" chooses by the parameters' devices."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ...core.errors import InvalidArgumentError, RefusedError
from ...core.rules import Rule
from .backend import Backend
from .compiled import CompiledBackend
from .compiler import why_not
from .eager import EagerBackend
from .triton import availability as triton

BACKENDS = ("auto", "triton", "compiled", "eager")


def select_backend(name: str, parameters: Iterable[Tensor], rules: Iterable[Rule], in_rows: Iterable[Tensor] = ()) -> Backend:
    """Return the backend of this name. "auto": Triton's kernels on CUDA devices, elsewhere "eager", which compiles nothing.

    Args:
        name: "auto", "triton", "compiled" or "eager".
        parameters, rules: that it is to update, and how.
        in_rows: those of the parameters whose random bits, or codes of states, are those of their rows.

    Raises:
        InvalidArgumentError: the name is not known.
        RefusedError: the backend cannot run here; the message says why.
    """
    if name not in BACKENDS:
        raise InvalidArgumentError(f"backend={name!r} is not known; it must be one of {', '.join(BACKENDS)}.")
    given = list(parameters)
    if name == "triton" or (name == "auto" and _on_cuda(given)):
        reasons = (*(triton.why_not(given, rule) for rule in rules), *map(triton.why_not_in_rows, in_rows))
        reason = next((why for why in reasons if why is not None), None)
        if name == "triton" and reason is not None:
            raise RefusedError(f"backend='triton': {reason}")
        name = "triton" if reason is None else "eager"
    if name == "triton":
        from .triton.backend import TritonBackend  # Triton itself is imported here at the earliest

        return TritonBackend()
    if name == "eager" or name == "auto":
        return EagerBackend()
    devices = {parameter.device.type for parameter in given}
    found = [reason for device in sorted(devices) if (reason := why_not(device)) is not None]
    if not found:
        return CompiledBackend()
    raise RefusedError(
        f"backend='compiled': torch.compile does not work here ({found[0]}). Install a C++ compiler (or name one in CXX), "
        "or use backend='eager'."
    )


def _on_cuda(parameters: list[Tensor]) -> bool:
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)
