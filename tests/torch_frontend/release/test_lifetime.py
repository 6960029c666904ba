"""After remove() nothing of a release acts any more, and nothing of it keeps the optimizer or a parameter alive."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.torch_models import batches, layers, same_parameters
from torch import nn

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, prepare_for_gradient_release, release_gradients

MODES = [
    {},
    {"max_norm": 1.0},
    {"accumulation": "hold"},
    {"accumulation": "state"},
    {"max_norm": 1.0, "clipping": "per_tensor"},
]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Only reference counts free objects."""
    AdamW(layers().parameters())  # the first one imports torch's compiler, which leaves frames for the collector
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("arguments", MODES, ids=str)
def test_nothing_lives_on_after_remove(arguments: dict[str, object]) -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer, **arguments)
    for batch in batches(2):
        release.guard(model(batch).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    release.remove()
    alive = [weakref.ref(thing) for thing in (model, optimizer, release, *model.parameters())]
    del model, optimizer, release
    assert [reference() for reference in alive] == [None] * len(alive)


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("arguments", [*MODES, None], ids=str)
def test_a_release_that_nobody_removed_frees_model_and_state_with_the_last_name(arguments: dict[str, object] | None) -> None:
    """In the middle of a step, too. The next model of a loop over folds, or of a notebook's cell, needs that memory."""
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=arguments is None)
    if arguments is None:
        prepare_for_gradient_release(model, optimizer)
    else:
        release_gradients(model, optimizer, **arguments)
    for batch in batches(2):
        optimizer.release.guard(model(batch).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.release.guard(model(batches(1)[0]).pow(2).mean()).backward()
    release = optimizer.release
    states = [kept for state in optimizer.state.values() for kept in state.values() if isinstance(kept, torch.Tensor)]
    alive = [weakref.ref(thing) for thing in (model, optimizer, release, *model.parameters(), *states)]
    del model, optimizer, states
    assert release.optimizer.release is release  # which alone keeps its optimizer
    del release
    assert [reference() for reference in alive] == [None] * len(alive)


def test_a_release_that_nobody_holds_is_found_again() -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer, max_norm=0.5, keep_bytes=64)
    shown, found = repr(optimizer.release), optimizer.release
    assert found is optimizer.release
    assert repr(found) == shown
    found.guard(model(batches(1)[0]).pow(2).mean()).backward()
    assert found.ledger.peak > 0 == found.ledger.live
    found.remove()
    assert optimizer.release is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_release_is_not_copied_and_the_error_says_what_is(copied: Callable[[object], object]) -> None:
    model = layers()
    model.optimizer = AdamW(model.parameters(), lr=1e-2)
    model.release = release_gradients(model, model.optimizer)
    with pytest.raises(RefusedError, match=r"copy\.deepcopy\(\(model, optimizer\)\)"):
        copied(model.release if copied is copy.copy else model)
    del model.release
    assert copy.deepcopy(model).optimizer.release is None


@pytest.mark.parametrize("guarded_before", [False, True])
def test_a_guarded_loss_of_a_removed_release_is_a_plain_one(guarded_before: bool) -> None:
    model, plain = layers(), layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer, max_norm=1.0)
    loss = model(batches(1)[0]).pow(2).mean()
    if guarded_before:
        loss = release.guard(loss)
    release.remove()
    (loss if guarded_before else release.guard(loss)).backward()
    plain(batches(1)[0]).pow(2).mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert same_parameters(model, plain)


def test_remove_again_changes_nothing_not_even_a_later_release() -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with release_gradients(model, optimizer) as release:
        release.remove()
    later = release_gradients(model, optimizer)
    release.remove()
    assert optimizer.release is later
    model(batches(1)[0]).pow(2).mean().backward()
    assert later.ledger.live == 0 < later.ledger.peak


def test_state_dict_between_held_micro_batches_is_that_of_the_last_step() -> None:
    """A checkpoint may be asked for at any moment; held gradients have changed nothing."""
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer, accumulation="hold")
    model(batches(1)[0]).pow(2).mean().backward()
    assert optimizer.state_dict()["state"] == {}
    optimizer.step()
    saved = optimizer.state_dict()["state"]
    model(batches(1)[0]).pow(2).mean().backward()
    torch.testing.assert_close(optimizer.state_dict()["state"], saved, rtol=0, atol=0)


def test_guard_computes_the_measured_gradient_again_where_backward_draws_random_numbers() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.rand_like(gradient)

    models = [layers(), layers()]
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    release, drawn = release_gradients(models[1], optimizers[1], max_norm=0.01), []
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        torch.manual_seed(0)
        loss = Noisy.apply(model(batches(1)[0])).pow(2).mean()
        (release.guard(loss) if number else loss).backward()
        if not number:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        drawn.append(torch.rand(()))
    assert drawn[0] == drawn[1]
    torch.testing.assert_close(release.last_norm.float(), norm)
    assert all(torch.allclose(p, q, rtol=0, atol=1e-6) for p, q in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_a_guarded_backward_retains_its_graph_on_request(paused: bool, retain: bool) -> None:
    model = layers()
    release = release_gradients(model, AdamW(model.parameters()), max_norm=1.0)
    own = torch.ones(8, requires_grad=True)
    grown = own.exp()  # whose result is saved for backward, and which no update changes
    loss = model(batches(1)[0]).pow(2).mean() + grown.sum()
    with release.paused() if paused else contextlib.nullcontext():
        release.guard(loss).backward(retain_graph=retain)
    with contextlib.nullcontext() if retain else pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(grown.sum(), own)
