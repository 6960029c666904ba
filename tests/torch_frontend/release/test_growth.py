"""Calls and live tensors stay as they are, however long a run is and however often its adapters are swapped."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.support.calls import calls_in
from tests.support.torch_models import batches, layers, loss_of
from torch import nn
from torch._subclasses import FakeTensor

from penstock.torch_frontend import AdamW, prepare_for_gradient_release, release_gradients

MODES: dict[str, dict[str, Any]] = {
    "release": {},
    "guard": {"max_norm": 1.0},
    "hold": {"accumulation": "hold"},
    "state": {"accumulation": "state"},
    "per tensor": {"max_norm": 1.0, "clipping": "per_tensor"},
    "lenient": {"lenient": True},
}
STEPS, SWAPS = 1000, 12
BETWEEN = 960
"""Steps between the two counts: whole rounds of the cache of each group's scalars, which is emptied when it has 96 entries."""


def released_with(model: nn.Module, *, lenient: bool = False, **arguments: Any) -> tuple[AdamW, Any]:
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=lenient)
    if lenient:
        prepare_for_gradient_release(model, optimizer)
    else:
        release_gradients(model, optimizer, **arguments)
    return optimizer, optimizer.release


def alive() -> tuple[int, int]:
    """The number of live tensors, and their bytes, without those of a compiler, which have no memory."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not issubclass(type(x), FakeTensor)]
    return len(tensors), sum(x.numel() * x.element_size() for x in tensors)


def assert_no_growth(first: tuple[int, ...], last: tuple[int, ...]) -> None:
    """Fewer are fine: tensors of an earlier test may be freed meanwhile."""
    assert all(after <= before for before, after in zip(first, last, strict=True)), f"{first} have become {last}"


@pytest.mark.parametrize("arguments", MODES.values(), ids=MODES)
def test_a_long_run_does_not_grow(arguments: dict[str, Any]) -> None:
    model, (batch,) = layers(1, 4), batches(1, 4)
    optimizer, release = released_with(model, **arguments)

    def step() -> None:
        release.guard(loss_of(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    counts = []
    for number in range(STEPS):
        if number in (STEPS - 1 - BETWEEN, STEPS - 1):
            counts.append((*alive(), calls_in(step).total()))
        else:
            step()
    assert_no_growth(*counts)


@pytest.mark.parametrize("arguments", MODES.values(), ids=MODES)
def test_swapped_adapters_do_not_pile_up(arguments: dict[str, Any]) -> None:
    """Each is put on, trained and taken off again; the base model stays, frozen."""
    base, (batch,) = layers(1, 4).requires_grad_(False), batches(1, 4)
    model = nn.Sequential(base, nn.Identity())
    counts = []
    for number in range(SWAPS):
        model[1] = nn.Linear(4, 4)
        optimizer, release = released_with(model, **arguments)

        def step(optimizer: Any = optimizer, release: Any = release) -> None:
            release.guard(loss_of(model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        calls = calls_in(step).total()
        release.remove()
        model[1] = nn.Identity()
        del optimizer, release, step
        if number in (1, SWAPS - 1):
            counts.append((*alive(), calls))
    assert_no_growth(*counts)
