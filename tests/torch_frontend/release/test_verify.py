"""release.verify() finds code that reads a parameter after its update, and leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.torch_models import batches, layers, snapshot, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

MODES = [{}, {"max_norm": 0.1}, {"max_norm": 0.1, "clipping": "per_tensor"}, {"accumulation": "hold"}]


class ReadsUpdatedWeight(nn.Module):
    """A checkpointed function that multiplies by a weight without a gradient, which backward has updated by then."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: torch.tanh(self.body(y)) @ self.head.weight.detach(), x, use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arguments", MODES, ids=str)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_verify_passes_and_restores_everything(dtype: torch.dtype, arguments: dict[str, object], steps_before: int) -> None:
    model = nn.Sequential(layers(), nn.Dropout(0.5), nn.BatchNorm1d(8)).to(dtype)
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer, **arguments)
    batch, *others = batches(1 + steps_before)
    batch = batch.to(dtype)

    def loss(x: Tensor = batch) -> Tensor:
        return model(x).pow(2).mean()

    for other in others:
        release.guard(loss(other.to(dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()
    before, buffers, random = snapshot(model, optimizer), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    peak = release.ledger.peak
    release.verify(loss)
    assert release.ledger.peak == peak
    assert unchanged(before, snapshot(model, optimizer))
    torch.testing.assert_close(model.state_dict(), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    release.guard(loss()).backward()
    optimizer.step()


def test_verify_names_the_first_parameter_that_differs() -> None:
    model = ReadsUpdatedWeight()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer)
    x = batches(1)[0].requires_grad_()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RefusedError, match=r"parameter 'body\..*' differs after a released step.*accumulation='hold'"):
        release.verify(lambda: model(x).pow(2).mean())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    release.remove()
    release_gradients(model, optimizer, accumulation="hold").verify(lambda: model(x).pow(2).mean())


def test_a_loss_that_is_not_deterministic_is_told_apart() -> None:
    model = layers()
    release = release_gradients(model, AdamW(model.parameters(), lr=1e-2))
    drawn = iter(batches(3))
    with pytest.raises(RefusedError, match="loss_fn is not deterministic"):
        release.verify(lambda: model(next(drawn)).pow(2).mean())


def test_verify_refuses_what_it_cannot_compare() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    for why, arguments in {
        "approximation": {"accumulation": "state"},
        "scaler=": {"scaler": torch.amp.GradScaler("cpu")},
    }.items():
        with release_gradients(model, optimizer, **arguments) as release, pytest.raises(RefusedError, match=why):
            release.verify(lambda: model(batches(1)[0]).pow(2).mean())
    release = release_gradients(model, optimizer)
    with pytest.raises(InvalidArgumentError, match="loss_fn is a Tensor"):
        release.verify(torch.ones(()))  # type: ignore[arg-type]
    model(batches(1)[0]).pow(2).mean().backward()
    with pytest.raises(RefusedError, match=r"verify\(\) in the middle of a step"):
        release.verify(lambda: model(batches(1)[0]).pow(2).mean())


def test_the_declared_norm_can_be_read_and_not_set() -> None:
    model = layers()
    release = release_gradients(model, AdamW(model.parameters()), max_norm=2.0)
    assert release.max_norm == 2.0
    with pytest.raises(AttributeError):
        release.max_norm = 1.0  # type: ignore[misc]


def test_a_loss_that_is_not_a_scalar_is_named_and_nothing_is_changed() -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer)
    before = snapshot(model, optimizer)
    for loss in (lambda: None, lambda: model(batches(1)[0])):
        with pytest.raises(InvalidArgumentError, match="0-d tensor"):
            release.verify(loss)
    computed = model(batches(1)[0]).mean()
    with pytest.raises(InvalidArgumentError, match="loss_fn returned one tensor twice; compute the loss in it"):
        release.verify(lambda: computed)
    assert unchanged(before, snapshot(model, optimizer))
