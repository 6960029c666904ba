"""The Llamas that several benchmarks train, of 290 million parameters in 182 tensors and of 110, and a tiny one for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.planner.llama import Llama
from penstock.planner.settings import LlamaShape

LLAMA_290M = LlamaShape(layers=20, width=1024, heads=16, hidden=2816)
LLAMA_110M = LlamaShape(layers=12, width=768, heads=12, hidden=2048)
TINY = LlamaShape(layers=2, width=32, heads=2, hidden=64, vocabulary=128)


def tied_llama(shape: LlamaShape, *, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> Llama:
    """Return a seeded model whose logits use the embedding's weights."""
    torch.manual_seed(0)
    model = Llama(shape, dtype=dtype, checkpointing=checkpointing)
    model.head.logits.weight = model.embedding.weight
    torch.nn.init.normal_(model.embedding.weight, std=0.02)
    return model


def tokens(shape: LlamaShape, sequence: int = 64, seed: int = 0) -> Tensor:
    """Return one row of seeded random tokens, [1, sequence + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocabulary, (1, sequence + 1), generator=generator)
