"""The registry of backends. Importing it imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.errors import InvalidArgumentError, RefusedError
from .calls import check_description, reason
from .interpreted_triton import TritonBackend
from .jax_transforms import JaxBackend
from .jax_walk import WalkBackend
from .optax_adapter import optax_transform
from .peers import PEERS, QUICK_OPTAX
from .protocol import Backend, Held, Run
from .specification import NumpyBackend
from .torch_adapter import torch_optimizer
from .torch_optimizers import TorchBackend, UsualCompiled

_BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        NumpyBackend(),
        TorchBackend("eager"),
        TorchBackend("compiled"),
        TritonBackend(),
        JaxBackend(),
        WalkBackend(),
        *PEERS,
    )
}


NOT_QUICK = {"compiled": "compiling takes seconds a case; leave out --quick, or name it with --backend compiled"}
"""Backends that a quick run leaves out unless they are asked for, and why."""

USUAL: dict[str, Backend] = {"walk": WalkBackend("usual"), "compiled": UsualCompiled()}
QUICK: dict[str, Backend] = {"walk": WalkBackend("quick"), "optax": QUICK_OPTAX}
"""Backends of which a run, or a quick run, takes a quicker variant, unless they are asked for."""


def register(backend: Backend) -> None:
    """Add your own optimizer to the suite; all later runs include it, and ``--backend`` accepts its name.

        register(torch_optimizer("mine", {"adamw": lambda params, h: MyAdamW(params, lr=h.learning_rate)}))
        rows = penstock.parity.run(["mine"])
        assert all(row.within for row in rows)

    Args:
        backend: made by `torch_optimizer` or `optax_transform`; or anything else that is a `Backend`.

    Raises:
        InvalidArgumentError: another backend has this name, or it is none.
    """
    check_description(backend)
    if backend.name in _BACKENDS:
        raise InvalidArgumentError(
            f"name={backend.name!r} is taken by another backend; unregister it first, or choose another."
        )
    _BACKENDS[backend.name] = backend


def unregister(name: str) -> None:
    """Remove a backend from the suite.

    Raises:
        InvalidArgumentError: there is none of this name.
    """
    if name not in _BACKENDS:
        raise InvalidArgumentError(f"name={name!r} is not known; it must be one of {', '.join(_BACKENDS)}.")
    del _BACKENDS[name]


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, available or not."""
    return tuple(_BACKENDS)


def choose(names: Iterable[str] | None, *, quick: bool = False) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends of these names; for None, the available ones, and why the others are not available.

    Args:
        names: as ``--backend`` takes them. With None, the Triton kernels are left out where there is no GPU for them.
        quick: with names None, leave out those of `NOT_QUICK`, and take those of `QUICK` in place of `USUAL`.

    Raises:
        InvalidArgumentError: an unknown name, or a backend that cannot say whether it is available.
        RefusedError: a backend that was asked for is not available; the text says why.
    """
    if names is None:
        left_out = {name: _left_out(backend, quick) for name, backend in _BACKENDS.items()}
        quicker = QUICK if quick else USUAL
        return (
            [quicker.get(name, _BACKENDS[name]) for name, why in left_out.items() if why is None],
            {name: why for name, why in left_out.items() if why is not None},
        )
    if isinstance(names, str):
        raise InvalidArgumentError(f"backends={names!r} must be a list of names, such as [{names!r}].")
    chosen = []
    for name in dict.fromkeys(names):
        if name not in _BACKENDS:
            raise InvalidArgumentError(f"backend={name!r} is not known; it must be one of {', '.join(_BACKENDS)}.")
        why = reason(_BACKENDS[name], "unavailable")
        if why is not None:
            raise RefusedError(f"backend={name!r} cannot run here: {why}")
        chosen.append(_BACKENDS[name])
    return chosen, {}


def _left_out(backend: Backend, quick: bool) -> str | None:
    """Return why a backend does not run unless it is named."""
    if quick and backend.name in NOT_QUICK:
        return NOT_QUICK[backend.name]
    return reason(backend, "unavailable") or (backend.slow() if isinstance(backend, TritonBackend) else None)


__all__ = ["Backend", "Held", "Run", "backend_names", "choose", "optax_transform", "register", "torch_optimizer", "unregister"]
