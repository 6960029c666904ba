"""The interface of a backend: `Backend` and `Run`.

A backend says what it can run and starts runs; a run takes gradients and shows what it holds. Write the two for an
optimizer of your own, hand an instance to `penstock.parity.register`, and it is judged as penstock's own are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..cases import Case

ABILITIES = ("schedules", "groups", "decoupled decay", "changing betas")
"""What a backend may be able to do besides plain updates; see `Backend`."""


class Held:
    """What a run holds for one tensor: numpy arrays of the tensor's shape, in the dtypes in which they are stored.

    They are copies, or what no later step writes to.

        Held(parameter, compensation, exp_avg=m, exp_avg_sq=v)

    Args:
        parameter: in the case's dtype (bfloat16 is `ml_dtypes.bfloat16`).
        compensation: int16 (split) or the parameter's dtype (kahan); None without.
        fields: by name what else the rule keeps (`case.problem.rule.fields`), debiased where the field has a beta. None, or
            left out, where it is not kept in this form: it is not compared then.
    """

    def __init__(self, parameter: np.ndarray, compensation: np.ndarray | None = None, **fields: np.ndarray | None) -> None:
        self.parameter, self.compensation = parameter, compensation
        vars(self).update(fields)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A field."""
            ...

    def get(self, name: str) -> np.ndarray | None:
        """Return the parameter, the compensation or a field, by name; None where there is none."""
        return vars(self).get(name)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what there is, by name."""
        return {name: array for name, array in vars(self).items() if array is not None}


def converted(arrays: Mapping[str, Any], convert: Callable[[Any], np.ndarray]) -> Held:
    """Convert a framework's arrays to numpy.

    Args:
        arrays: by field of `Held`; None where there is none.
        convert: from such an array to numpy's.
    """
    made: dict[str, Any] = {field: None if array is None else convert(array) for field, array in arrays.items()}
    return Held(**made)


class Run(Protocol):
    """A run of one case on one backend, from its initial parameters."""

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        """Update every tensor once. The gradients, by tensor name and in the case's dtype, must not be changed."""
        ...

    def held(self) -> Mapping[str, Held]:
        """Return the parameters and states, by tensor name."""
        ...


class Backend(Protocol):
    """An implementation of the rules.

    name: as ``--backend`` takes it.

    An attribute `abilities`, if there is one, names what it can do beyond constant hyperparameters that are the same for
    all tensors; cases that need more are refused for it (`lacks`):

        "schedules"         its runs follow `case.problem.hyperparameters_at(step)` from update to update
        "groups"            its runs follow it from tensor to tensor
        "changing betas"    its schedules may change betas, too
        "decoupled decay"   its runs know fully decoupled decay: `decouple_lr` and `max_lr`

    An attribute `peer`, if there is one and it is true, says that the backend is there for comparison: its errors are
    reported, but its broken bounds do not count (`is_peer`).

    An attribute `flushes_subnormals`, if there is one and it is true, says that numbers below the smallest normal one may be
    zero for its device; it is granted that much error near zero (`flushes`).

    What `unavailable` and `refuses` raise ends the suite; what a run raises, or returns wrongly, is a failed row.
    """

    @property
    def name(self) -> str:
        """Its name for ``--backend``."""
        ...

    def unavailable(self) -> str | None:
        """Return why it cannot run here, or None if it can. The framework must not be imported before this call."""
        ...

    def refuses(self, case: Case) -> str | None:
        """Return why it does not run this case, or None if it does."""
        ...

    def start(self, case: Case) -> Run:
        """A new run at `case.problem.initial_parameters()`, with `case.problem.hyperparameters`."""
        ...


def lacks(backend: Backend, needs: Collection[str]) -> str | None:
    """Return why a backend cannot run a case that needs these abilities, or None if it can."""
    missing = sorted(set(needs) - set(getattr(backend, "abilities", ())))
    return f"it has no {' and no '.join(missing)} (`Backend.abilities`)" if missing else None


def flushes(backend: Backend) -> bool:
    """Whether a backend's device may flush subnormal numbers to zero."""
    return bool(getattr(backend, "flushes_subnormals", False))


def is_peer(backend: Backend) -> bool:
    """Whether a backend is compared but not judged."""
    return bool(getattr(backend, "peer", False))
