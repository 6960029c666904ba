"""torch.compile and guard: a compiled backward runs twice, with cold and warm caches, or is refused before anything changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.torch_models import layers, snapshot, unchanged
from torch import Tensor, nn

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, release_gradients


@pytest.fixture(autouse=True)
def _as_torch_sets_it() -> Iterator[None]:
    import torch._functorch.config as settings

    before = settings.donated_buffer
    torch.compiler.reset()
    settings.donated_buffer = True
    yield
    settings.donated_buffer = before
    torch.compiler.reset()


def loss_of(model: nn.Module, rows: int) -> Tensor:
    return model(torch.ones(rows, 8)).tanh().pow(2).mean()


def test_a_compiled_model_is_clipped_as_a_plain_one() -> None:
    """Batches of different sizes, so that graphs are compiled again on the way."""
    plain, model = layers(), layers()
    reference, optimizer = (AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    release = release_gradients(model, optimizer, max_norm=0.01)
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (4, 5, 4, 6):
        loss_of(plain, rows).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        reference.step()
        reference.zero_grad()
        release.guard(loss_of(compiled, rows)).backward()
        torch.testing.assert_close(release.last_norm.float(), norm)
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_model_that_was_compiled_before_is_refused_before_anything_changes() -> None:
    model = layers()
    compiled = torch.compile(model, backend="aot_eager")
    loss_of(compiled, 4).backward()
    model.zero_grad()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer, max_norm=1.0)
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"compiled, and has run, before.*torch.compiler.reset\(\)"):
        release.guard(loss_of(compiled, 4)).backward()
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    torch.compiler.reset()
    release.guard(loss_of(compiled, 4)).backward()
    optimizer.step()


def test_a_compiled_function_retains_the_gradient_that_it_returns() -> None:
    """As without release: traced, it would be the gradient of a tensor inside the graph."""
    model = layers()
    release = release_gradients(model, AdamW(model.parameters(), lr=1e-2), max_norm=0.01)

    def hidden_and_loss(batch: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model(batch)
        hidden.retain_grad()
        return hidden, hidden.sum()

    hidden, loss = torch.compile(hidden_and_loss, backend="eager")(torch.ones(4, 8))
    release.guard(loss).backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))
