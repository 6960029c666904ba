"""What an optimizer was registered for, and the cases that it refuses therefore; shared by the adapters."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...core.compensation import possible
from ...core.dtypes import PARAMETER_DTYPES
from ...core.errors import InvalidArgumentError
from ..cases import Case
from ..rules import RULES


class Declaration:
    """The part of a `Backend` that follows from the arguments of its registration.

    Args:
        name, abilities, peer: as in `Backend`.
        rules: the names of the rules that it obeys.
        compensations: by dtype of parameters, the compensation with which it updates them.
        requires: the modules without which it is not available.
    """

    def __init__(
        self,
        name: str,
        rules: Collection[str],
        compensations: Mapping[str, str],
        requires: Collection[str],
        abilities: Collection[str],
        peer: bool,
    ) -> None:
        self.name, self.abilities, self.peer = name, abilities, peer
        self._rules, self._compensations, self._requires = tuple(rules), dict(compensations), tuple(requires)

    def unavailable(self) -> str | None:
        for module in self._requires:
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken installation raises anything
                return f"{module} cannot be imported: {error}"
        return None

    def refuses(self, case: Case) -> str | None:
        rule, dtype = case.problem.rule.name, case.problem.dtype
        if rule not in self._rules:
            return f"it was registered for {', '.join(self._rules)} only"
        if dtype not in self._compensations:
            return f"it was registered for {', '.join(self._compensations)} only"
        if case.storage.compensation != self._compensations[dtype]:
            return f"it updates {dtype} parameters with compensation {self._compensations[dtype]!r} only"
        if case.storage.state_dtype is not None:
            return "the dtypes of its moments are its own choice"
        return None


def check(name: str, make: Mapping[str, Any], dtypes: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """Check and return the compensation for every dtype.

    Raises:
        InvalidArgumentError: a rule, a dtype or a compensation is not known, or there is none.
    """
    if not isinstance(make, Mapping):
        raise InvalidArgumentError(f"make of {name!r} must be a mapping of rules to functions, such as {{'adamw': ...}}.")
    if isinstance(dtypes, str):
        raise InvalidArgumentError(f"dtypes of {name!r} must be a list, such as [{dtypes!r}].")
    compensations = dict(dtypes) if isinstance(dtypes, Mapping) else dict.fromkeys(dtypes, "none")
    for argument, given, known in (("make", make, RULES), ("dtypes", compensations, PARAMETER_DTYPES)):
        unknown = sorted(set(given) - set(known))
        if unknown or not given:
            wrong = f"{unknown[0]!r} is not known" if unknown else "nothing is named"
            raise InvalidArgumentError(f"{argument} of {name!r}: {wrong}; choose of {', '.join(known)}.")
    for dtype, compensation in compensations.items():
        if compensation not in possible(dtype):
            raise InvalidArgumentError(
                f"dtypes of {name!r}: {dtype} has no compensation {compensation!r}; choose of {', '.join(possible(dtype))}."
            )
    return compensations
