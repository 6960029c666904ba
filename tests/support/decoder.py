"""A small decoder with everything that blocks are called with: keyword arguments, masks, pairs of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

BATCH, LENGTH, WIDTH, HEADS = 7, 5, 16, 4


class Block(nn.Module):
    """Attention and a feed-forward part, with a mask for each sample and rotary factors for all of them."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.dropped = dropped

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, factors: tuple[Tensor, Tensor] | None = None, scale: float = 1.0
    ) -> Tensor:
        heads = self.query_key_value(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        if factors is not None:
            query, key = query * factors[0], key + factors[1]
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.output(attended.transpose(1, 2).flatten(-2))
        return x + scale * dropout(self.narrow(torch.tanh(self.wide(x))), self.dropped, self.training)


class Decoder(nn.Module):
    """Embedding, blocks, head; `call` says how a block is called."""

    def __init__(self, count: int = 3, call: Callable[..., Tensor] = lambda block, x: block(x), dropped: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropped) for _ in range(count))
        self.head = nn.Linear(WIDTH, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.layers:
            x = self.call(block, x)
        return self.head(x)


def decoder(
    count: int = 3,
    call: Callable[..., Tensor] = lambda block, x: block(x),
    *,
    dropped: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Decoder:
    """Seeded."""
    torch.manual_seed(0)
    return Decoder(count, call, dropped).to(dtype)


def batch(size: int = BATCH, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """[size, length, width]."""
    return torch.randn(size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """0-d."""
    return model(x).pow(2).mean()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Of every parameter, by name; the model has none afterwards."""
    loss_of(model, x).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def assert_equal_gradients(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    """Within float64 rounding of sums that are taken in another order."""
    assert one.keys() == other.keys()
    for name, expected in other.items():
        found = one[name]
        assert (found is None) == (expected is None), name
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")
