"""The cases on the backend "numpy": the update of `core`, and its random bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...core import random_bits
from ...core.array_ops import numpy_ops
from ...core.codings import EightBit
from ...core.update import Bits, TensorState, accumulate, init_state, update
from .cases import CodingCase
from .definitions import key_of
from .protocol import HeldField, HeldTensor


class NumpyCodings:
    """The last micro-batch makes the step together with the fields before they are stored."""

    def __init__(self, case: CodingCase) -> None:
        self.case, self.count = case, 0
        self.parameters = case.initial_parameters()
        self.states: dict[str, TensorState] = {
            name: init_state(numpy_ops, case.rule, parameter, case.field_dtypes, case.storage.compensation)
            for name, parameter in self.parameters.items()
        }

    def update(self, gradients: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.count += 1
        case = self.case
        for micro_batch, of_tensors in enumerate(gradients):
            for name, gradient in of_tensors.items():
                given, parameter, state = case.hyperparameters, self.parameters[name], self.states[name]
                corrections = case.rule.corrections(given, self.count, np)
                shared = (numpy_ops, case.rule, given, corrections, case.storage.compensation, parameter, gradient, state)
                first, bits = micro_batch == 0, self._bits(name, micro_batch)
                if micro_batch < len(gradients) - 1:
                    self.states[name] = accumulate(*shared, first=first, bits=bits)
                else:
                    self.parameters[name], self.states[name] = update(*shared, first=first, bits=bits)

    def held(self) -> dict[str, HeldTensor]:
        names = [field.name for field in self.case.rule.fields]
        return {
            name: HeldTensor(parameter, state.compensation, dict(zip(names, map(_field, state.fields), strict=True)))
            for (name, parameter), state in zip(self.parameters.items(), self.states.values(), strict=True)
        }

    def keys(self) -> dict[str, int]:
        return {name: key_of(name) for name in self.parameters}

    def steps_from_stored(self) -> bool:
        return False

    def _bits(self, name: str, micro_batch: int) -> Bits:
        shape, key = self.parameters[name].shape, random_bits.tensor_key(0, name)

        def bits(number: int) -> np.ndarray | None:
            if number not in self.case.random:
                return None
            when = random_bits.when(self.count, number, micro_batch if number else 0)
            found: np.ndarray = random_bits.bits_at(random_bits.place(key, when), np.arange(np.prod(shape)))
            return found.reshape(shape)

        return bits


def _field(stored: np.ndarray | EightBit) -> HeldField:
    return HeldField(*stored) if isinstance(stored, EightBit) else HeldField(stored)
