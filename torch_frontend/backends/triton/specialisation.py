"""What selects the program of a launch: everything that Triton compiles in or specialises on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ....core.dtypes import PARAMETER_DTYPES, compute_dtype
from ...array_ops import DTYPES
from ..backend import TensorSlot
from . import kernels
from .configuration import Configuration
from .launch import Program
from .numbers import Fixed
from .operands import Operands

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
}
WIDE_DTYPES = {DTYPES[name]: DTYPES[compute_dtype(name)] for name in PARAMETER_DTYPES}
"""The compute dtype of each dtype of a parameter."""

Kind = tuple[str, tuple[tuple[str, Any], ...]]
"""The name of a kernel and what it is to do: ("update_tensor", (("ACTION", "update"), ("FIRST", True)))."""


class Specialisation(NamedTuple):
    """Two launches of a kind run the same program if these are equal, and else another one.

    device: that it is loaded on.
    chosen: sizes.
    clips, l2: of the rule.
    compensation: "none", "kahan" or "split".
    fixed: of the hyperparameters.
    dtypes, alignment: of g, m, v, p and k; bytes that all their addresses are multiples of.
    pointers: for each tensor among the arguments whether it is there, its dtype, and whether it is aligned.
    """

    device: torch.device
    chosen: Configuration
    clips: bool
    l2: bool
    compensation: str
    fixed: Fixed
    dtypes: tuple[torch.dtype, ...]
    alignment: int
    pointers: tuple[Any, ...]

    def options(self) -> dict[str, Any]:
        """What is compiled in, and how."""
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
            "ALIGNMENT": self.alignment,
            "WIDE": TRITON_DTYPES[WIDE_DTYPES[self.dtypes[3]]],
            "HINTS": chosen.hints,
            "TILES": chosen.tiles,
            "BLOCK": chosen.block,
            "TAIL": chosen.tail,
            "num_warps": chosen.warps,
            "enable_fp_fusion": False,  # so that release and step(), which are two kernels, give the same bits
        }


def specialisation(
    slot: TensorSlot,
    device: torch.device,
    chosen: Configuration,
    fixed: Fixed,
    given: Operands,
    alignment: int,
    arguments: Iterable[Tensor | None],
) -> Specialisation:
    """That of a launch which begins with this slot and these operands.

    Args:
        slot, given: of the first tensor.
        device: of the launch.
        chosen, fixed, alignment: as in `Specialisation`.
        arguments: the tensors among the arguments.
    """
    rule = slot.rule
    dtypes = tuple([tensor.dtype for tensor in given])
    return Specialisation(
        device, chosen, rule.clips_update, rule.l2, slot.compensation, fixed, dtypes, alignment, _seen(arguments)
    )


def _seen(arguments: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """What Triton looks at of tensors among the arguments."""
    return tuple([None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in arguments])


class Programs:
    """The programs of a backend."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, Specialisation], Program] = {}

    def __call__(self, kind: Kind, wanted: Specialisation) -> Program:
        """The one program for this; it may have to be loaded."""
        known = self._known.get((kind, wanted))
        if known is None:
            known = self._known[kind, wanted] = _program(kind, wanted)
        return known


def _program(kind: Kind, wanted: Specialisation) -> Program:
    kernel, settings = kind
    options = wanted.options() | dict(settings)
    if ("ACTION", "accumulate") in settings:  # left to the compiler it needs fewer registers than the cap
        options.pop("maxnreg", None)
    return Program(getattr(kernels, kernel), options)
