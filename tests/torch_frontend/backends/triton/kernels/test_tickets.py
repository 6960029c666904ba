"""The kernel counts as the model of its protocol says: the same counters with the same orders, item for item."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ticket_model import Machine
from tests.support.torch_models import backend_of, slot_of
from triton.runtime.interpreter import InterpreterBuilder

from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton import tables, work
from penstock.torch_frontend.backends.triton.configuration import INTERPRETED_MULTIPROCESSORS, INTERPRETER

ORDERS = {"ACQUIRE_RELEASE": "acquire release", "ACQUIRE": "acquire", "RELEASE": "release", "RELAXED": "relaxed"}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Address and order of every atomic operation, as they happen. The interpreter runs one program after the other."""
    found: list[tuple[int, str]] = []
    original = InterpreterBuilder.create_atomic_rmw

    def create(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        assert scope.name == "GPU"
        found.append((int(pointer.data.item()), ORDERS[order.name]))
        return original(self, operation, pointer, value, mask, order, scope)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", create)
    return found


def named(number: int) -> Any:
    """What `counters` has at a position."""
    return ("ticket", "left")[number] if number < 2 else (("arrived", "ready")[number % 2], (number - 2) // 2)


def test_the_launch_for_many_tensors_counts_as_the_model(counted: list, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    original = work.tickets
    monkeypatch.setattr(tables.work, "tickets", lambda *arguments: used.append(original(*arguments)) or used[-1])
    parameters = [torch.ones(numel, requires_grad=True) for numel in (2 * INTERPRETER.item + 1, 3, INTERPRETER.item)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    StableAdamW(parameters, backend="triton").step()
    (table,) = used
    machine = Machine(table.tolist(), min(len(table), INTERPRETED_MULTIPROCESSORS * INTERPRETER.programs), resident=1)
    machine.check()
    first = min(address for address, _ in counted)
    assert [(named((address - first) // 4), order) for address, order in counted] == machine.counted


def test_the_launch_for_one_tensor_counts_as_the_model(counted: list) -> None:
    p = torch.ones(2 * INTERPRETER.item + 1, requires_grad=True)
    optimizer = StableAdamW([p], backend="triton")
    with torch.no_grad():
        backend_of(optimizer).update(slot_of(optimizer, p), torch.ones_like(p), first=True)
    table = work.tickets([3], 1, 3).tolist()
    machine = Machine(table, min(len(table), INTERPRETED_MULTIPROCESSORS * INTERPRETER.programs), resident=1)
    machine.check()
    first = min(address for address, _ in counted)
    assert [(named((address - first) // 4), order) for address, order in counted] == machine.counted
