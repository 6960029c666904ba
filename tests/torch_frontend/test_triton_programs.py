"""Which programs launches need: asked of Triton itself, as on a device, with all that is compiled and nothing launched."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
import torch

from penstock.torch_frontend.backends.triton.availability import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from penstock.core.release import Action
from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton import backend as triton_backend
from penstock.torch_frontend.backends.triton import launch
from penstock.torch_frontend.backends.triton.configuration import TABLE, Configuration
from penstock.torch_frontend.backends.triton.kernels import update_group, update_tensor
from penstock.torch_frontend.backends.triton.launch import Launch

if not hasattr(driver, "_active"):
    pytest.skip("this version of Triton keeps its driver elsewhere", allow_module_level=True)


class NoDevice:
    """What Triton asks of a driver until it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """By `Launch.key`, the program that Triton would have launched."""
    found: dict[Any, Any] = {}

    def compile(self: Launch) -> None:
        program = self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)
        assert found.setdefault(self.key, program) is program, "one key for two programs"

    monkeypatch.setattr(driver, "_active", NoDevice())
    for module in (triton_backend, launch):
        monkeypatch.setattr(module, "on", lambda device: contextlib.nullcontext())
    for kernel in (update_group, update_tensor):
        monkeypatch.setattr(kernel, "device_caches", collections.defaultdict(kernel.create_binder))
    monkeypatch.setattr(Launch, "__call__", compile)
    monkeypatch.setattr(Launch, "compile", compile)
    monkeypatch.setitem(TABLE, ("cpu", None), Configuration())
    return found


def optimizer_of(numels: tuple[int, ...], dtype: torch.dtype, **options: Any) -> StableAdamW:
    parameters = [torch.zeros(numel, dtype=dtype).requires_grad_() for numel in numels]
    optimizer = StableAdamW(parameters, backend="eager", **options)
    optimizer._backend = triton_backend.TritonBackend()
    for p in parameters:
        p.grad = torch.ones_like(p)
    return optimizer


def test_audit_of_what_makes_no_other_program(programs: dict[Any, Any]) -> None:
    """Sizes and numbers of tensors, of 1 and multiples of 16 too; learning rate, betas (but 0), decay, number of updates."""
    for numels in ((1,), (16,), (3, 17), (8192,) * 16, (8193, 1)):
        optimizer = optimizer_of(numels, torch.bfloat16)
        (group,) = optimizer.param_groups
        for lr, betas, decay in ((1e-3, (0.9, 0.99), 0.01), (1, (0.25, 0.5), 0), (0.0, (0.9, 0.99), 1.0)):
            group.update(lr=lr, betas=betas, weight_decay=decay)
            optimizer.step()
            with torch.no_grad():
                for p in optimizer._parameters()[:2]:
                    optimizer.perform(p, p.grad, Action.UPDATE)
    assert [len(kernel.device_caches[0][0]) for kernel in (update_group, update_tensor)] == [1, 1]
    assert len(programs) == 2


def test_audit_of_a_beta_of_zero(programs: dict[Any, Any]) -> None:
    """It is compiled in: one program more of each kernel, whichever tensors and however often."""
    before = [len(kernel.device_caches[0][0]) for kernel in (update_group, update_tensor)]
    for numels in ((1,), (3, 17)):
        optimizer = optimizer_of(numels, torch.bfloat16, betas=(0.0, 0.9))
        for _ in range(2):
            optimizer.step()
            with torch.no_grad():
                optimizer.perform(optimizer._parameters()[0], optimizer._parameters()[0].grad, Action.UPDATE)
    after = [len(kernel.device_caches[0][0]) for kernel in (update_group, update_tensor)]
    assert after == [count + 1 for count in before]


def test_audit_of_numbers_on_the_device_at_any_address(programs: dict[Any, Any]) -> None:
    """A part of a larger tensor begins anywhere: a number of updates, a mean square."""
    optimizer = optimizer_of((40,), torch.bfloat16, capturable=True)
    (p,) = optimizer._parameters()
    backend, slot = optimizer._backend, optimizer._slot(p)
    numbers = torch.ones(8)
    for first, second in ((0, 4), (1, 5), (2, 7)):
        slot.state["step"], slot.state["mean_square"] = numbers[first], numbers[second]
        backend.update_all([(slot, p.grad)])
        backend.accumulate(slot, p.grad, first=False)
    assert [len(kernel.device_caches[0][0]) for kernel in (update_group, update_tensor)] == [1, 1]


def test_audit_of_what_does_make_another_program(programs: dict[Any, Any]) -> None:
    """A mean square of earlier micro-batches, and one of another dtype; each key is that of one program."""
    optimizer = optimizer_of((40,), torch.bfloat16)
    (p,) = optimizer._parameters()
    slot = optimizer._slot(p)
    square = torch.ones(())
    for before in (None, square, square.double(), None):
        slot.state["mean_square"] = before
        optimizer._backend.accumulate(slot, p.grad, first=before is None)
    assert len(update_tensor.device_caches[0][0]) == len(programs) == 3
