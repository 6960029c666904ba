"""The planned model, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from .settings import LlamaShape


class Block(nn.Module):
    """x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, shape: LlamaShape, settings: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.width // shape.heads
        self.attention_norm, self.feed_forward_norm = (nn.RMSNorm(shape.width, **settings) for _ in range(2))
        linear = {"bias": False, **settings}
        self.query = nn.Linear(shape.width, shape.width, **linear)
        self.key = nn.Linear(shape.width, self.kv_heads * self.size, **linear)
        self.value = nn.Linear(shape.width, self.kv_heads * self.size, **linear)
        self.output = nn.Linear(shape.width, shape.width, **linear)
        self.gate = nn.Linear(shape.width, shape.hidden, **linear)
        self.up = nn.Linear(shape.width, shape.hidden, **linear)
        self.down = nn.Linear(shape.hidden, shape.width, **linear)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`x`: [batch, sequence, width]; `rotation`: cosines and sines, each [sequence, width/heads]."""
        normal = self.attention_norm(x)
        query = rotated(self.query(normal).unflatten(-1, (self.heads, self.size)).transpose(1, 2), rotation)
        key = rotated(self.key(normal).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2), rotation)
        value = self.value(normal).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + self.output(attended.transpose(1, 2).flatten(-2))
        normal = self.feed_forward_norm(x)
        return x + self.down(silu(self.gate(normal)) * self.up(normal))


class Head(nn.Module):
    """The last norm, the logits, and each token's loss: per sample, so that it can be divided into micro-batches as well."""

    def __init__(self, shape: LlamaShape, settings: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width, **settings)
        self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False, **settings)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross entropies in float32, [batch, sequence]; `x`: [batch, sequence, width]; `targets`: [batch, sequence]."""
        logits = self.logits(self.norm(x)).flatten(0, 1).float()
        return cross_entropy(logits, targets.flatten(), reduction="none").unflatten(0, targets.shape)


class Llama(nn.Module):
    """A decoder. `checkpointing` keeps only each block's input for backward."""

    def __init__(self, shape: LlamaShape, *, dtype: torch.dtype, checkpointing: bool) -> None:
        super().__init__()
        settings: dict[str, Any] = {"dtype": dtype}
        self.size, self.checkpointing = shape.width // shape.heads, checkpointing
        self.embedding = nn.Embedding(shape.vocabulary, shape.width, dtype=dtype)
        self.layers = nn.ModuleList(Block(shape, settings) for _ in range(shape.layers))
        self.head = Head(shape, settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, 0-d, mean cross entropy in float32, for int64 tokens, [batch, sequence + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        rotation = angles(inputs.shape[1], self.size, x)
        for block in self.layers:
            x = checkpoint(block, x, rotation, use_reentrant=False) if self.checkpointing else block(x, rotation)
        return self.head(x, targets).mean()


def angles(sequence: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    angle = torch.outer(torch.arange(sequence, device=like.device), frequencies).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: x cos + (-second half, first half) sin."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]
