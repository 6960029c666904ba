"""Bytes a parameter, and of whole models, by rule and precision: parameters, optimizer state and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..core.precision import PRECISIONS
from .settings import LlamaShape, Training

GIB = 2**30
SHAPES = {
    "1B": LlamaShape(layers=16, width=2048, heads=32, key_value_heads=8, hidden=8192, vocabulary=32000),
    "3B": LlamaShape(layers=28, width=3072, heads=24, key_value_heads=8, hidden=8192, vocabulary=128256),
    "7B": LlamaShape(),
    "8B": LlamaShape(layers=32, width=4096, heads=32, key_value_heads=8, hidden=14336, vocabulary=128256),
}
RULES = ("StableAdamW", "AdamW", "Lion", "Muon+AdamW")
_GRADIENT = 2.0


class Row(NamedTuple):
    """Bytes for each bfloat16 parameter: kept from step to step, and of its gradient."""

    name: str
    kept: float
    gradient: float
    kept_of_rest: float | None = None  # where embeddings, heads and norms have another rule than the other matrices


PEERS = (
    Row("torch AdamW", 6.0, _GRADIENT),
    Row("torch AdamW in hooks", 6.0, 0.0),
    Row("optimi AdamW, Kahan", 8.0, _GRADIENT),
    Row("optimi AdamW, Kahan, released", 8.0, 0.0),
    Row("FlashOptim AdamW", 5.125, _GRADIENT),
    Row("FlashOptim AdamW, released", 5.125, 0.0),
)
"""By their own definitions: moments in bfloat16 (torch, optimi); 24 bits of a parameter and 8-bit moments with float16 scales
of 32 elements (FlashOptim, https://arxiv.org/abs/2602.23349)."""

NOTES = (
    "bfloat16 parameters, all of them matrices; an embedding and a head apart. Kept: parameter, lost bits, optimizer state.",
    "Muon+AdamW keeps the first number for matrices of hidden layers, the second for the embedding, the head and norms.",
    "A released gradient is about one layer's, counted as 0. Activations and temporaries come on top: penstock plan.",
    "torch's AdamW in bfloat16 loses small steps, and its second moment does not decay with its default betas.",
)


def rows() -> Iterator[Row]:
    """Yield the peers, then every rule with every precision, with and without release."""
    yield from PEERS
    for rule in RULES:
        for precision in PRECISIONS:
            training = Training(optimizer=rule, precision=precision)
            rest = training.kept_bytes_of_rest if len(training.rules) > 1 else None
            yield Row(f"{rule}, {precision}", training.kept_bytes, _GRADIENT, rest)
            yield Row(f"{rule}, {precision}, released", training.kept_bytes, 0.0, rest)


def table() -> list[list[str]]:
    """Return the headings, and a line for each row: bytes a parameter, and GiB of each size."""
    headings = ["optimizer", "kept", "gradient", *SHAPES]
    lines = []
    for row in rows():
        kept = f"{row.kept:.2f}" + ("" if row.kept_of_rest is None else f", {row.kept_of_rest:.2f}")
        sizes = (_bytes(row, shape) / GIB for shape in SHAPES.values())
        lines.append([row.name, kept, f"{row.gradient:g}", *(f"{size:.1f}" for size in sizes)])
    return [headings, *lines]


def _bytes(row: Row, shape: LlamaShape) -> float:
    rest = row.kept if row.kept_of_rest is None else row.kept_of_rest
    hidden = shape.hidden_matrices
    return hidden * row.kept + (shape.parameters - hidden) * rest + shape.parameters * row.gradient
