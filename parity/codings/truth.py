"""What one update makes of the numbers that a backend holds: in float64, with what every number may be off by.

An update starts from what is stored, which is the same for the backend and for the truth, so that no error comes in. Its
arithmetic runs on `parity.tracked` arrays, which say how far the float32 numbers may be off before they are stored; what they
are stored as is monotone (`definitions`). Errors do not add up from update to update, and nothing here is a matter of chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.hyperparameters import is_zero
from ...core.rules import Entered, Fields
from ..bounds import ARITHMETIC, underflow, unit_roundoff
from ..matrices import orthogonalised
from ..noise import Input
from ..rules import corrections
from ..tracked import Namespace, Tracked
from .cases import CodingCase
from .definitions import Ends, decoded, decoding_error, number, stored_field, stored_parameter, words
from .protocol import HeldField, HeldTensor

COMPUTE = "float32"


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of one tensor. key: of its random bits. flushes, from_stored: as the backend says."""

    case: CodingCase
    step: int
    key: int
    gradients: Sequence[np.ndarray]
    flushes: bool
    from_stored: bool

    def of(self, before: HeldTensor) -> dict[str, Ends]:
        """Return what is stored after it, by quantity, all decoded."""
        case, xp = self.case, Namespace(COMPUTE)
        scalars = corrections(case.rule, case.hyperparameters, self.step, COMPUTE)
        fields: Any = tuple(self._read(xp, before.fields[field.name]) for field in case.rule.fields)
        parameter = xp.tracked(number(before.parameter, before.compensation, case.storage.compensation))
        if case.storage.compensation == "kahan":
            parameter = parameter.rounded()  # the sum of both
        stored: dict[str, Ends] = {}
        entered: Entered | None = None
        for micro_batch, gradient in enumerate(self.gradients):
            given = xp.tracked(gradient.astype(np.float64))
            if case.rule.l2 and micro_batch == 0 and not is_zero(case.hyperparameters.weight_decay):
                given = given + xp.stored(case.hyperparameters.weight_decay) * parameter
            entered, first = Entered(fields, given), micro_batch == 0
            fields = case.rule.accumulate(case.hyperparameters, scalars, fields, given, xp, first=first)
            if micro_batch < len(self.gradients) - 1 or self.from_stored:
                stored = self._stored(fields, micro_batch)
                fields = tuple(
                    xp.given(ends.value, Input(linear=ends.error + decoding_error(dtype) * np.abs(ends.value)))
                    for ends, dtype in zip(stored.values(), self._stored_dtypes, strict=True)
                )
        added = self._added(xp, scalars, parameter, fields, None if len(self.gradients) > 1 else entered)
        after: Any = fields
        if case.rule.after_step is not None:
            after, added = case.rule.after_step(scalars, fields, added)
        if not self.from_stored:
            stored = self._stored(after, len(self.gradients) - 1)
        new, bits = parameter + added, self._bits(0, 0)
        return stored | {
            "parameter": stored_parameter(new.value, self._error(new), case.dtype, case.storage.compensation, bits)
        }

    def _read(self, xp: Namespace, field: HeldField) -> Tracked:
        value = decoded(*field)
        return xp.given(value, Input(linear=decoding_error(field.array.dtype.name) * np.abs(value)))

    @property
    def _stored_dtypes(self) -> list[str]:
        """The dtypes of the fields' arrays, which are codes of 8 bits where the field is coded."""
        codes = ("uint8" if field.of_squares else "int8" for field in self.case.rule.fields)
        return [code if dtype == "8bit" else dtype for code, dtype in zip(codes, self.case.field_dtypes, strict=True)]

    def _added(self, xp: Namespace, scalars: Any, parameter: Tracked, fields: Fields, entered: Entered | None) -> Tracked:
        """What the step adds, -lr*(direction + decay*p); quotients and roots of some devices are off by more than a unit."""
        case, given = self.case, self.case.hyperparameters
        with np.errstate(over="ignore"):  # of a selection's other side
            direction = case.rule.direction(given, scalars, fields, entered, xp)
        if case.rule.of_matrix is not None:
            direction = orthogonalised(xp, given, direction)
        if not case.rule.l2:
            direction = direction + xp.stored(given.decay_rate) * parameter
        return -(xp.stored(given.learning_rate) * direction.rounded(ARITHMETIC))

    def _stored(self, fields: Sequence[Tracked], micro_batch: int) -> dict[str, Ends]:
        case, found = self.case, {}
        for count, (field, dtype, new) in enumerate(zip(case.rule.fields, case.field_dtypes, fields, strict=True), 1):
            bits = self._bits(count, micro_batch) if count in case.random else None
            found[field.name] = stored_field(new.value, self._error(new), dtype, field.of_squares, bits)
        return found

    def _bits(self, field: int, micro_batch: int) -> np.ndarray:
        return words(self.key, self.step, field, micro_batch, self.gradients[0].shape)

    def _error(self, new: Tracked) -> np.ndarray:
        """The most that a number may be off by before it is stored."""
        ulp = unit_roundoff(COMPUTE) * np.abs(new.value)
        return new.most + ulp + underflow(COMPUTE, flushes=self.flushes) * len(self.gradients)


def after_update(
    case: CodingCase,
    step: int,
    before: Mapping[str, HeldTensor],
    gradients: Sequence[Mapping[str, np.ndarray]],
    keys: Mapping[str, int],
    *,
    flushes: bool,
    from_stored: bool,
) -> dict[str, dict[str, Ends]]:
    """Return what is stored after an update, by tensor and quantity. Arguments as in `Update`."""
    return {
        name: Update(case, step, keys[name], [given[name] for given in gradients], flushes, from_stored).of(tensor)
        for name, tensor in before.items()
    }
