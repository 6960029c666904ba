"""Stage 5: the workload of FORGE (arXiv 2606.22932): Llama-3.1-8B with random weights, bfloat16, batch 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.planner.llama import Llama
from penstock.planner.settings import LlamaShape

from .peers import candidates
from .setting import Setting
from .training import TINY, trained

LLAMA_8B = LlamaShape(layers=32, width=4096, heads=32, key_value_heads=8, hidden=14336, vocabulary=128256)

PUBLISHED = {
    "AdamW": (62.0, 167.0),
    "fused AdamW": (60.1, 134.0),
    "bitsandbytes 8-bit": (45.4, 316.0),
    "FORGE bf16": (48.4, 110.0),
    "FORGE int8": (35.3, 155.0),
}
"""Peak GiB and milliseconds of a step at 512 tokens on one H200, as FORGE's authors report them."""

COMPARED = ("torch AdamW(fused=True)", "penstock AdamW none", "penstock AdamW split", "bitsandbytes AdamW8bit")
LENGTHS = (512, 2048, 4096, 8192)


def llama_8b(setting: Setting) -> Iterator[dict[str, Any]]:
    """Train at 512 tokens beside FORGE's table, then at more: the curve that shows where release stops paying."""
    yield {"published_peak_gib_and_ms": PUBLISHED}
    shape = TINY if setting.dry else LLAMA_8B
    compared = [candidate for candidate in candidates(setting) if candidate.name in COMPARED]
    for length in setting.first(LENGTHS):
        for candidate in compared:
            for released in (False, True):
                if length > LENGTHS[0] and candidate.name not in COMPARED[:2]:
                    continue
                row = trained(
                    setting,
                    lambda: Llama(shape, dtype=torch.bfloat16, checkpointing=False),
                    1,
                    setting.few(length, 4),
                    candidate,
                    released,
                    20 if length == LENGTHS[0] else 5,
                )
                if "peak_allocated_bytes" in row:
                    row["peak_gib"] = row["peak_allocated_bytes"] / 2**30
                yield {"tokens": length, **row}
