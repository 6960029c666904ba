"""The section "codings": what rounds parameters and states, by chance or to nearest, against its definition in float64."""

from .cases import CodingCase
from .protocol import CodingRun, HeldField, HeldTensor, RunsCodings
from .section import Codings

__all__ = ["CodingCase", "CodingRun", "Codings", "HeldField", "HeldTensor", "RunsCodings"]
