"""Which programs launches need: asked of Triton itself, as on a device, with all that is compiled and nothing launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.torch_models import all_parameters, backend_of, slot_of, use_backend

from penstock.torch_frontend.backends.triton.availability import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from tests.support.triton_launches import Compared, compared

from penstock.core.release import Action
from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton.backend import TritonBackend


@pytest.fixture
def launches() -> Iterator[Compared]:
    with compared() as found:
        yield found


def optimizer_of(numels: tuple[int, ...], dtype: torch.dtype, **options: Any) -> StableAdamW:
    parameters = [torch.zeros(numel, dtype=dtype).requires_grad_() for numel in numels]
    optimizer = StableAdamW(parameters, backend="eager", **options)
    use_backend(optimizer, TritonBackend())
    for p in parameters:
        p.grad = torch.ones_like(p)
    return optimizer


def test_sizes_and_settings_share_one_program(launches: Compared) -> None:
    """Sizes and numbers of tensors, of 1 and multiples of 16 too; learning rate, betas (but 0), decay, number of updates."""
    for numels in ((1,), (16,), (3, 17), (8192,) * 16, (8193, 1)):
        optimizer = optimizer_of(numels, torch.bfloat16)
        (group,) = optimizer.param_groups
        for lr, betas, decay in ((1e-3, (0.9, 0.99), 0.01), (1, (0.25, 0.5), 0), (0.0, (0.9, 0.99), 1.0)):
            group.update(lr=lr, betas=betas, weight_decay=decay)
            optimizer.step()
            with torch.no_grad():
                for p in all_parameters(optimizer)[:2]:
                    optimizer._perform(p, p.grad, Action.UPDATE)
    assert launches.programs("update_group") == launches.programs("update_tensor") == 1


def test_a_beta_of_zero_makes_one_more_program(launches: Compared) -> None:
    """It is compiled in: one program more of each kernel, whichever tensors and however often."""
    for betas in ((0.9, 0.9), (0.0, 0.9)):
        for numels in ((1,), (3, 17)):
            optimizer = optimizer_of(numels, torch.bfloat16, betas=betas)
            for _ in range(2):
                optimizer.step()
                with torch.no_grad():
                    optimizer._perform(all_parameters(optimizer)[0], all_parameters(optimizer)[0].grad, Action.UPDATE)
    assert launches.programs("update_group") == launches.programs("update_tensor") == 2


def test_numbers_at_any_address_share_one_program(launches: Compared) -> None:
    """A part of a larger tensor begins anywhere: a number of updates, a mean square."""
    optimizer = optimizer_of((40,), torch.bfloat16, capturable=True)
    (p,) = all_parameters(optimizer)
    backend, slot = backend_of(optimizer), slot_of(optimizer, p)
    numbers = torch.ones(8)
    for first, second in ((0, 4), (1, 5), (2, 7)):
        slot.state["step"], slot.state["mean_square"] = numbers[first], numbers[second]
        backend.update_all([(slot, p.grad)])
        backend.accumulate(slot, p.grad, first=False)
    assert launches.programs("update_group") == launches.programs("update_tensor") == 1


def test_an_earlier_mean_square_makes_another_program(launches: Compared) -> None:
    """A mean square of earlier micro-batches, and one of another dtype."""
    optimizer = optimizer_of((40,), torch.bfloat16)
    (p,) = all_parameters(optimizer)
    slot = slot_of(optimizer, p)
    square = torch.ones(())
    for before in (None, square, square.double(), None):
        slot.state["mean_square"] = before
        backend_of(optimizer).accumulate(slot, p.grad, first=before is None)
    assert launches.programs("update_tensor") == 3
