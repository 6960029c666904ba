"""The settings of the demonstration, independent of the frameworks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..core.errors import InvalidArgumentError

DTYPES = ("float32", "float64")
DEFAULT_STEPS = {"float32": 120, "float64": 100}
AGREEMENT = 1e-9  # what the float64 runs must agree to, relative, after their steps


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder-only, pre-norm transformer over bytes.

    vocabulary: number of distinct tokens. width: of the residual stream; must be a multiple of heads. layers: blocks of
    attention and feed-forward. heads: of attention. context: tokens in one sequence.
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 8
    heads: int = 4
    context: int = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a demonstration.

    Args:
        steps: updates in each run, > 0.
        dtype: of parameters, states and arithmetic: "float32" or "float64".
        device: "cpu", or "cuda" (also "gpu", "cuda:0"): PyTorch's device; JAX runs on the platform of that kind.
        text: file to train on; None: the source of this Python's standard library.
        output: file of the figure.
        batch_size: sequences in a batch. learning_rate: constant. seed: of the initialisation and of the batches.
        shape: of the model.

    Raises:
        InvalidArgumentError: steps not positive, or an unknown dtype.
    """

    steps: int = DEFAULT_STEPS["float32"]
    dtype: str = "float32"
    device: str = "cpu"
    text: Path | None = None
    output: Path = Path("demo.png")
    batch_size: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    shape: ModelShape = ModelShape()

    def __post_init__(self) -> None:
        if self.steps <= 0:
            raise InvalidArgumentError(f"steps must be a positive whole number, not {self.steps}.")
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(f"dtype must be {' or '.join(DTYPES)}, not {self.dtype!r}.")

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in one update."""
        return self.batch_size * self.shape.context
