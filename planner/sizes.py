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
RULES = ("StableAdamW", "AdamW", "Lion")
_GRADIENT = 2.0


class Row(NamedTuple):
    """Bytes for each bfloat16 parameter: kept from step to step, and of its gradient."""

    name: str
    kept: float
    gradient: float


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
    "A released gradient is about one layer's, counted as 0. Activations and temporaries come on top: penstock plan.",
    "torch's AdamW in bfloat16 loses small steps, and its second moment does not decay with its default betas.",
)


def rows() -> Iterator[Row]:
    """Yield the peers, then every rule with every precision, with and without release."""
    yield from PEERS
    for rule in RULES:
        for precision in PRECISIONS:
            kept = Training(optimizer=rule, precision=precision).kept_bytes
            yield Row(f"{rule}, {precision}", kept, _GRADIENT)
            yield Row(f"{rule}, {precision}, released", kept, 0.0)


def table() -> list[list[str]]:
    """Return the headings, and a line for each row: bytes a parameter, and GiB of each size."""
    headings = ["optimizer", "kept", "gradient", *SHAPES]
    lines = []
    for row in rows():
        sizes = (shape.parameters * (row.kept + row.gradient) / GIB for shape in SHAPES.values())
        lines.append([row.name, f"{row.kept:.2f}", f"{row.gradient:g}", *(f"{size:.1f}" for size in sizes)])
    return [headings, *lines]
