"""What other releases do where a training loop does more than step: the README's table says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from benchmarks.methods import METHODS  # noqa: E402

PEERS = ["torch AdamW fused in hooks", "optimi AdamW release"]


def trained(name: str, loop: Callable[[Any, Any, Any], None]) -> torch.Tensor:
    """The weight of a linear model after a loop (model, batch, close)."""
    method = METHODS[name]
    if method.missing() is not None:
        pytest.skip(f"{method.missing()}")
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    loop(model, batch, method.attach(model, lr=1e-2).close)
    return model.weight.detach()


@pytest.mark.parametrize("name", PEERS)
def test_clipping_by_the_global_norm_does_nothing_and_says_nothing(name: str) -> None:
    def clipped(model: Any, batch: Any, close: Any) -> None:
        for scale in (1.0, 100.0):  # a step of AdamW has a gradient's scale only beside others
            (scale * model(batch).pow(2).mean()).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0  # there is no gradient left
            close()

    def unclipped(model: Any, batch: Any, close: Any) -> None:
        for scale in (1.0, 100.0):
            (scale * model(batch).pow(2).mean()).backward()
            close()

    assert torch.equal(trained(name, clipped), trained(name, unclipped))


def test_hooks_take_a_step_for_each_micro_batch() -> None:
    def in_two(model: Any, batch: Any, close: Any) -> None:
        for part in batch.chunk(2):
            (model(part).pow(2).mean() / 2).backward()
        close()

    def in_two_steps(model: Any, batch: Any, close: Any) -> None:
        for part in batch.chunk(2):
            (model(part).pow(2).mean() / 2).backward()
            close()

    assert torch.equal(trained(PEERS[0], in_two), trained(PEERS[0], in_two_steps))
