"""The key of a compiled program: everything that Triton compiles in or specialises on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ....core.dtypes import PARAMETER_DTYPES, compute_dtype
from ...array_ops import DTYPES
from ..backend import TensorSlot
from . import corrections, kernels
from .coding import SECOND_MOMENT, multiple_of_rows
from .configuration import Configuration
from .launch import Program
from .numbers import CompiledIn
from .operands import Operands

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
COMPUTE_DTYPES = {DTYPES[name]: DTYPES[compute_dtype(name)] for name in PARAMETER_DTYPES}
"""The compute dtype for each dtype of a parameter."""

ONLY_WITH_RANDOM_BITS = {
    "update_group": ("update",),
    "update_tensor": ("m_scales", "v_scales", "columns", "index_high", "index_low", "key", "update", "microbatch"),
}
"""Parameters of the kernels that are arguments of a launch only where something is rounded stochastically, else None."""

Kind = tuple[str, tuple[tuple[str, Any], ...]]
"""The name of a kernel and its constants that say what to do: ("update_tensor", (("ACTION", "update"), ("FIRST", True)))."""


class Specialisation(NamedTuple):
    """The key of a program: launches of the same kind run the same program if and only if these are equal.

    device: the device that the program is loaded on.
    chosen: the configuration.
    clips, l2: of the rule.
    compensation: resolved, of `core.compensation`.
    random: the numbers of what is rounded stochastically, as in `TensorSlot`.
    rows: what the length of a row is a multiple of, as `kernels` takes it.
    fixed: the hyperparameters that are compiled in.
    dtypes: of g, m, v, p and k.
    alignment: bytes that all their addresses are multiples of.
    pointers: for each tensor among the arguments its dtype and whether it is aligned to 16 bytes; None if it is absent.
    """

    device: torch.device
    chosen: Configuration
    clips: bool
    l2: bool
    compensation: str
    random: tuple[int, ...]
    rows: int
    fixed: CompiledIn
    dtypes: tuple[torch.dtype, ...]
    alignment: int
    pointers: tuple[Any, ...]

    def program(self, kind: Kind) -> Program:
        """Return the program, not yet compiled."""
        kernel, settings = kind
        options = self._options() | dict(settings)
        if (kernel == "update_group" and not self.random) or ("ACTION", "accumulate") in settings:
            options.pop("maxnreg", None)  # without the limit the compiler uses fewer registers
        if not self.random:
            options |= dict.fromkeys(ONLY_WITH_RANDOM_BITS[kernel])
        return Program(getattr(kernels, kernel), options)

    def _options(self) -> dict[str, Any]:
        """Return the constants and Triton's compilation options, by name."""
        chosen, fixed = self.chosen, self.fixed
        cap = {"maxnreg": chosen.registers} if chosen.registers else {}
        return {
            **{name: TRITON_DTYPES[dtype] for name, dtype in zip("GMVPK", self.dtypes, strict=True)},
            **cap,
            "CLIP": self.clips,
            "ZERO1": fixed.zero1,
            "ZERO2": fixed.zero2,
            "L2": self.l2,
            "MAXIMIZE": fixed.maximize,
            "COMPENSATION": self.compensation,
            "STOCHASTIC": SECOND_MOMENT in self.random,
            "ROWS": self.rows,
            "ALIGNMENT": self.alignment,
            "COMPUTE": TRITON_DTYPES[COMPUTE_DTYPES[self.dtypes[3]]],
            "HINTS": chosen.hints,
            "TILES": chosen.tiles,
            "BLOCK": chosen.block,
            "TAIL": chosen.tail,
            "UNROLL": 1 if self.l2 else chosen.unroll,  # with L2 measuring reads p and k as well
            "STAGES": chosen.stages,
            "num_warps": chosen.warps,
            "enable_fp_fusion": False,  # so that the two kernels, of release and of step(), give the same bits
        }


class CorrectionsOf(NamedTuple):
    """The key of a program of `corrections.store_bias_corrections`.

    device, pointers: as in `Specialisation`.
    columns: of the table of tensors.
    compute: the compute dtype.
    """

    device: torch.device
    columns: int
    compute: torch.dtype
    pointers: tuple[Any, ...]

    def program(self, kind: Kind) -> Program:
        """Return the program, not yet compiled."""
        options = {"WIDTH": self.columns, "COMPUTE": TRITON_DTYPES[self.compute], "num_warps": 1, "enable_fp_fusion": False}
        return Program(getattr(corrections, kind[0]), options)


def specialisation(
    slot: TensorSlot,
    device: torch.device,
    chosen: Configuration,
    fixed: CompiledIn,
    given: Operands,
    alignment: int,
    arguments: Iterable[Tensor | None],
) -> Specialisation:
    """Return the specialisation of a launch.

    Args:
        slot, given: slot and operands of the first tensor.
        device: of the launch.
        chosen, fixed, alignment: as in `Specialisation`.
        arguments: the tensors among the arguments.
    """
    rule = slot.rule
    dtypes = tuple([tensor.dtype for tensor in given])
    coding = slot.compensation, slot.random, multiple_of_rows(slot) if slot.coded else 0
    return Specialisation(device, chosen, rule.clips_update, rule.l2, *coding, fixed, dtypes, alignment, seen(arguments))


def seen(arguments: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Return what Triton specialises on of tensors among the arguments."""
    return tuple([None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in arguments])


class ProgramCache:
    """The compiled programs of a backend."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, Specialisation | CorrectionsOf], Program] = {}

    def __call__(self, kind: Kind, wanted: Specialisation | CorrectionsOf) -> Program:
        """Return the program for this specialisation, which may not be loaded yet."""
        known = self._known.get((kind, wanted))
        if known is None:
            known = self._known[kind, wanted] = wanted.program(kind)
        return known
