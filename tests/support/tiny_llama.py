"""What the tests of the integrations share: a randomly initialised Llama, its data, and how two runs are compared."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SEQUENCE = 16
VOCABULARY = 64


def tiny_llama(**settings: object) -> nn.Module:
    """Two layers; the same weights each time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        initializer_range=0.2,  # gradients whose norm is well above 1, so that clipping to 1 acts
        use_cache=False,
        **settings,
    )
    return transformers.LlamaForCausalLM(config)


def sequences(count: int = 48, seed: int = 1) -> list[dict[str, Tensor]]:
    """Samples with the keys that the model's forward takes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def assert_same_losses(released: Sequence[float], plain: Sequence[float], tolerance: float = 1e-4) -> None:
    """Within `tolerance`, relative; and the run is one in which something happens."""
    assert len(released) == len(plain) > 2
    assert released == pytest.approx(plain, rel=tolerance, abs=0.0)
    assert max(plain) - min(plain) > 1e-2


def assert_same_norms(released: Sequence[float], plain: Sequence[float], tolerance: float = 1e-4) -> None:
    """Within `tolerance`, relative; where it is not finite, an infinity here and a NaN there say the same."""
    one, other = ([norm if math.isfinite(norm) else math.inf for norm in norms] for norms in (released, plain))
    assert one == pytest.approx(other, rel=tolerance, abs=0.0)


def gradient_bytes(model: nn.Module) -> int:
    """Of all gradients together."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def largest_gradient(model: nn.Module) -> int:
    """In bytes."""
    return max(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def fp16_on_cpu(accelerator: Any, scale: float = 2.0**10) -> None:
    """Give an Accelerator for "fp16" what it makes on a GPU only: autocast, and a GradScaler. Call it before prepare()."""
    assert accelerator.mixed_precision == "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
