"""Small gradients share a launch: the same bits, few launches, a bounded number of bytes, and nothing is left waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.counting_backend import BLOCKS, IN_A_LAUNCH, MATRIX, VECTOR, WIDTH, Checking, Counting, blocks, optimizer_of
from tests.support.torch_models import (
    OPTIMIZERS,
    backend_of,
    batches,
    gone,
    loss_of,
    same_parameters,
    snapshot,
    spoil,
    train,
    unchanged,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients
from penstock.torch_frontend.backends.backend import ChecksOnDevice
from penstock.torch_frontend.release import pass_end


def both(loop: Callable, optimizer_class=StableAdamW, **options) -> list[Counting]:
    """Run it with waiting and without, and compare every bit; the backends."""
    found = []
    for batched in (False, True):
        model = blocks()
        optimizer = optimizer_of(model, batched, optimizer_class, **options)
        loop(model, optimizer)
        found.append((snapshot(model, optimizer), backend_of(optimizer)))
    assert unchanged(found[0][0], found[1][0])
    return [backend for _, backend in found]


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_queued_updates_have_the_same_bits_in_fewer_launches(optimizer_class) -> None:
    def loop(model: nn.Module, optimizer) -> None:
        release_gradients(model, optimizer)
        train(model, optimizer, batches(3, WIDTH))

    alone, together = both(loop, optimizer_class)
    assert alone.launches == [1] * 3 * 4 * BLOCKS
    assert sum(together.launches) == len(alone.launches)
    assert len(together.launches) == 3 * (BLOCKS + -(-3 * BLOCKS // IN_A_LAUNCH))


def test_queued_gradients_are_bounded_and_in_the_ledger_but_not_in_grad() -> None:
    model = blocks()
    optimizer = optimizer_of(model, True)
    with (
        LiveGradientMeter(model.named_parameters()) as measured,
        release_gradients(model, optimizer) as release,
    ):
        seen = []
        for parameter in model.parameters():  # these hooks run after the release's
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append((gone([p]), release.ledger.live)))
        for batch in batches(2, WIDTH):
            loss_of(model, batch).backward()
            assert release.ledger.live == measured.live() == 0
            assert gone(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert all(none for none, _ in seen)
    assert max(live for _, live in seen) == MATRIX // 16  # a queue that is full
    assert measured.peak == release.ledger.peak == MATRIX + MATRIX // 16


def test_nothing_is_queued_without_an_end_of_pass_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_end, "at_end_of_pass", lambda callback: False)
    model = blocks()
    optimizer = optimizer_of(model, True)
    release_gradients(model, optimizer)
    loss_of(model, batches(1, WIDTH)[0]).backward()
    assert backend_of(optimizer).launches == [1] * 4 * BLOCKS


@pytest.mark.parametrize("reentrant", [False, True])
def test_queued_updates_equal_single_ones_under_checkpointing_and_tied_weights(reentrant: bool) -> None:
    def loop(model: nn.Module, optimizer) -> None:
        if not reentrant:  # refused otherwise
            model[2][1].weight = model[0][1].weight
        release_gradients(model, optimizer)
        for batch in batches(3, WIDTH):
            x = batch.requires_grad_()
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    _, together = both(loop)
    assert max(together.launches) == (3 if reentrant else IN_A_LAUNCH)  # a reentrant checkpoint is a pass, with an end


@pytest.mark.parametrize("options", [{"max_norm": 0.05}, {"max_norm": 0.01, "clipping": "per_tensor"}, {"keep_bytes": MATRIX}])
def test_queued_updates_equal_single_ones_when_guarded_and_clipped(options: dict) -> None:
    def loop(model: nn.Module, optimizer) -> None:
        release = release_gradients(model, optimizer, **{"max_norm": 1.0, **options})
        for batch in batches(3, WIDTH):
            release.guard(loss_of(model, batch)).backward()
            assert release.ledger.live == 0
            optimizer.step()
            optimizer.zero_grad()

    _, together = both(loop)
    assert max(together.launches) == IN_A_LAUNCH


@pytest.mark.parametrize("sync", [False, True])
def test_held_gradients_share_launches_in_step_and_in_the_last_backward(sync: bool) -> None:
    def loop(model: nn.Module, optimizer) -> None:
        now = {"last": False}
        release_gradients(model, optimizer, accumulation="hold", sync=(lambda: now["last"]) if sync else None)
        for number, batch in enumerate(batches(4, WIDTH)):
            now["last"] = number % 2 == 1
            loss_of(model, batch).backward()
            if now["last"]:
                optimizer.step()
                optimizer.zero_grad()

    alone, together = both(loop)
    assert len(alone.launches) == 2 * 4 * BLOCKS
    assert sum(together.launches) == len(alone.launches)
    assert max(together.launches) == IN_A_LAUNCH


def test_a_failed_launch_puts_its_gradients_back() -> None:
    model = blocks()
    optimizer = optimizer_of(model, True)
    release = release_gradients(model, optimizer)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    before = [p.detach().clone() for p in vectors]
    backend_of(optimizer).fails = True
    with pytest.raises(MemoryError, match="planted"):
        loss_of(model, batches(1, WIDTH)[0]).backward()
    given_back = [p for p in vectors if p.grad is not None]
    assert len(given_back) == IN_A_LAUNCH + 1  # and the one for which there was no room
    assert all(torch.equal(p, old) for p, old in zip(vectors, before, strict=True))
    backend_of(optimizer).fails = False
    optimizer.zero_grad()
    assert release.ledger.live <= VECTOR
    train(model, optimizer, batches(2, WIDTH))
    assert release.ledger.live == 0


def test_a_model_of_small_tensors_queues_nothing() -> None:
    model = nn.Sequential(*[nn.LayerNorm(8) for _ in range(4)])
    optimizer = optimizer_of(model, True)
    release = release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    assert backend_of(optimizer).launches == [1] * 8
    assert release.ledger.peak == 4 * 8


# -- what is not finite ---------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A switch: while it is on, what would wait for a device raises."""
    on = {"now": False}

    def refusing(name: str, original: Callable) -> Callable:
        def call(*arguments, **options):
            assert not on["now"], f"{name} waits for the device"
            return original(*arguments, **options)

        return call

    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(Tensor, name, refusing(name, getattr(Tensor, name)))
    monkeypatch.setattr(Tensor, "is_cpu", False)  # as on an accelerator, where nobody reads the sum of squares
    return lambda state: on.update(now=state)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_the_device_skips_nonfinite_gradients_without_synchronising(batched: bool, hold: bool, nobody_waits: Callable) -> None:
    """One matrix and one vector are spoiled: under release those two are left out, held ones are judged together."""
    models = [blocks(), blocks()]
    options = {"on_nonfinite": "skip", "capturable": True}
    optimizers = [
        optimizer_of(models[0], False, **options),
        optimizer_of(models[1], batched, backend=Checking, **options),
    ]
    assert isinstance(backend_of(optimizers[1]), ChecksOnDevice)
    releases = []
    for model, optimizer in zip(models, optimizers, strict=True):
        releases.append(release_gradients(model, optimizer, accumulation="hold" if hold else None))
        train(model, optimizer, batches(1, WIDTH))
        spoil(model[1][0].weight)
        spoil(model[2][1].bias)
        nobody_waits(optimizer is optimizers[1])
        for batch in batches(2, WIDTH, seed=3):
            loss_of(model, batch).backward()
            if hold:
                optimizer.step()
            nobody_waits(False)  # what is published is looked at
            optimizer.step()
            optimizer.zero_grad()
    assert unchanged(snapshot(models[0], optimizers[0]), snapshot(models[1], optimizers[1]))
    expected = 2 if hold else 4
    assert [release.skipped for release in releases] == [optimizer.skipped for optimizer in optimizers] == [expected] * 2
    assert optimizers[1].state[models[1][1][0].weight]["step"] == 1
    assert optimizers[1].state[models[1][3][0].weight]["step"] == (1 if hold else 3)


def test_micro_batches_in_the_moments_are_judged_by_the_host() -> None:
    """Whether to apply them or to add the last one is for the host to decide."""
    models = [blocks(), blocks()]
    options = {"on_nonfinite": "skip", "capturable": True}
    optimizers = [optimizer_of(models[0], False, **options), optimizer_of(models[1], True, backend=Checking, **options)]
    for model, optimizer in zip(models, optimizers, strict=True):
        release_gradients(model, optimizer, accumulation="state")
        for number, batch in enumerate(batches(4, WIDTH)):
            if number == 2:
                spoil(model[1][0].weight)
            loss_of(model, batch).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.skipped == 2
    assert same_parameters(*models)


def test_skips_are_counted_on_after_a_reset_and_survive_a_copy() -> None:
    model = blocks(1)
    optimizer = optimizer_of(model, True, AdamW, Checking, on_nonfinite="skip", capturable=True)
    with release_gradients(model, optimizer) as release:
        spoil(model[0][0].bias)
        train(model, optimizer, batches(2, WIDTH))
        assert (release.skipped, optimizer.skipped) == (2, 2)
        optimizer.skipped = 0
        train(model, optimizer, batches(1, WIDTH))
        assert (release.skipped, optimizer.skipped) == (3, 1)
    other = AdamW(blocks(1).parameters())
    other.__setstate__(optimizer.__getstate__())
    assert other.skipped == 1
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped == 1
