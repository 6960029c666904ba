"""Stage 4: what release costs the host, models trained with and without it, and the optimizers of others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from penstock.planner.llama import Llama
from penstock.planner.settings import LlamaShape
from penstock.torch_frontend import StableAdamW, release_gradients

from .peers import Candidate, candidates, missing, moved_bytes
from .setting import BETAS, Setting

TINY = LlamaShape(layers=1, width=8, heads=1, hidden=8, vocabulary=16)
LLAMA_800M = LlamaShape(layers=13, width=2048, heads=16, hidden=5632)


class Gpt2(nn.Module):
    """The shapes of GPT-2 with 124 million parameters; the loss of int64 tokens, [batch, length + 1]."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, longest: int = 1024
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        settings: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **settings)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy; logits use the embedding's weights."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=x.device, dtype=x.dtype)
        x = self.layers(x, mask=mask, is_causal=True)
        return cross_entropy((x @ self.embedding.weight.T).flatten(0, 1).float(), targets.flatten())


def host(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time what release and step() add to a backward pass, for each gradient, on the host and until the device is done."""
    count, width = setting.few(148, 4), 16
    for dtype in (torch.float32, torch.bfloat16):
        figures = {}
        for way in ("backward", "released"):
            make = [torch.zeros(width * width, dtype=dtype, device=setting.device) for _ in range(count)]
            model = nn.ParameterList([nn.Parameter(x) for x in make])
            optimizer = StableAdamW(model.parameters(), lr=1e-3, betas=BETAS, backend="triton")
            if way == "released":
                release_gradients(model, optimizer)

            def step(model: Any = model, optimizer: Any = optimizer, released: bool = way == "released") -> None:
                torch.stack([parameter.sum() for parameter in model]).sum().backward()
                if released:
                    optimizer.step()
                optimizer.zero_grad()

            figures[way] = setting.wall_ms(step)
        both = figures["backward"], figures["released"]
        each = {
            f"{name}_us": 1e3 * (both[1][name + "_ms"] - both[0][name + "_ms"]) / count for name in ("host", "back_to_back")
        }
        yield {"dtype": str(dtype), "gradients": count, "for_each_gradient": each, **figures}


def models(setting: Setting) -> Iterator[dict[str, Any]]:
    """Train GPT-2 and a Llama of 800 million parameters, plain and released: time of a step, and peaks of memory."""
    made: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
        "GPT-2 124M": (Gpt2, 8, 1024),
        "Llama 800M": (lambda: Llama(LLAMA_800M, dtype=torch.bfloat16, checkpointing=False), 2, 2048),
    }
    if setting.dry:
        made = {"tiny": (lambda: Gpt2(1, 8, 2, TINY.vocabulary, 4), 1, 4)}
    for candidate, (name, (make, batch, length)) in in_order(candidates(setting), made.items()):
        for released in (False, True):
            yield {"model": name, **trained(setting, make, batch, length, candidate, released)}


def in_order(candidates: Sequence[Candidate], models: Iterable[Any]) -> list[tuple[Candidate, Any]]:
    """Return each model's pairs in turn, but those of optimizers that compile for each shape, a minute a model, at the end."""
    pairs = [(candidate, model) for model in models for candidate in candidates]
    return sorted(pairs, key=lambda pair: pair[0].compiles)


def trained(
    setting: Setting,
    make: Callable[[], nn.Module],
    batch: int,
    length: int,
    candidate: Candidate,
    released: bool,
    repetitions: int = 20,
) -> dict[str, Any]:
    """Return the median milliseconds of a step and the peaks of memory, or why there are none."""
    row: dict[str, Any] = {"optimizer": candidate.name, "released": released}
    if (why := missing(candidate)) is not None:
        return row | {"missing": why}
    setting.reset_peak()
    try:
        return row | _trained(setting, make, batch, length, candidate, released, repetitions)
    except Exception as error:  # a peer that cannot, or a model that does not fit
        return row | {"failed": setting.failure(error)} | ({"holds": False} if candidate.name.startswith("penstock") else {})


def _trained(
    setting: Setting,
    make: Callable[[], nn.Module],
    batch: int,
    length: int,
    candidate: Candidate,
    released: bool,
    repetitions: int,
) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = make().to(torch.bfloat16)
    optimizer = candidate.release(model) if released else candidate.make(model.parameters())
    generator = torch.Generator(setting.device).manual_seed(0)
    vocabulary = TINY.vocabulary if setting.dry else LLAMA_800M.vocabulary
    tokens = torch.randint(0, vocabulary, (batch, length + 1), device=setting.device, generator=generator)
    taken, losses = [], []
    for _ in range(setting.few(3, 0) + setting.few(repetitions)):
        setting.synchronize()
        started = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        setting.synchronize()
        taken.append(1e3 * (time.perf_counter() - started))
        losses.append(float(loss.detach()))
    return {"step_ms": statistics.median(taken[-repetitions:]), "first_and_last_loss": losses[:: max(1, len(losses) - 1)]} | (
        setting.peak()
    )


def optimizers(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time a step of every optimizer alone, each over the time of a copy of the bytes that it has to move itself."""
    for candidate, model in in_order(candidates(setting), ("124M", "1B")):
        row: dict[str, Any] = {"model": model, "optimizer": candidate.name}
        if (why := missing(candidate)) is not None:
            yield row | {"missing": why}
            continue
        optimizer = None
        try:
            optimizer = candidate.make(setting.parameters(setting.shapes(model), torch.bfloat16))
            row["device_ms"] = setting.device_ms(optimizer.step, 10)
            row |= setting.wall_ms(optimizer.step)
            row["own_bytes"] = moved_bytes(optimizer)
            row["ratio_to_own_bytes"] = row["device_ms"] / (1e3 * row["own_bytes"] / setting.bandwidth)
        except Exception as error:  # a peer that cannot
            row["failed"] = setting.failure(error)
        optimizer = None
        setting.clean_up()
        yield row
