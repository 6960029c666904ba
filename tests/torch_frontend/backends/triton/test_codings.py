"""Launches for slots with random bits and 8-bit codes: what they are given each time, and which programs they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.torch_models import all_parameters, backend_of, slot_of, use_backend

from penstock.core.rules import ADAMW
from penstock.torch_frontend.backends import select_backend
from penstock.torch_frontend.backends.triton import availability

pytest.importorskip("triton")
if availability.interpreted():
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from tests.support.triton_launches import Compared, compared
from triton.runtime.jit import JITFunction

from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton.backend import TritonBackend
from penstock.torch_frontend.backends.triton.coding import SCALES
from penstock.torch_frontend.backends.triton.kernels import COLUMNS

COMPACT: dict[str, Any] = {"compensation": "split8", "state_dtype": "8bit"}


@pytest.fixture
def launches() -> Iterator[Compared]:
    with compared() as found, torch.no_grad():
        yield found


def optimizer_of(*shapes: tuple[int, ...], **options: Any) -> StableAdamW:
    parameters = [torch.zeros(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    optimizer = StableAdamW(parameters, backend="eager", **options)
    use_backend(optimizer, TritonBackend())
    for p in parameters:
        p.grad = torch.ones_like(p)
    return optimizer


def each(optimizer: StableAdamW) -> None:
    for p in all_parameters(optimizer):
        assert p.grad is not None
        backend_of(optimizer).update(slot_of(optimizer, p), p.grad, first=True)


def test_updates_sizes_seeds_and_shards_share_one_program(launches: Compared) -> None:
    """Neither the number of the update, nor a key, nor where a shard begins is compiled in, whichever values they have."""
    for shapes, seed in ((((1, 4096), (64, 128)), 0), (((32, 256),), 2**32 - 1)):
        optimizer = optimizer_of(*shapes, seed=seed, **COMPACT)
        for number in (0, 1, 15, 2**20):
            for p in all_parameters(optimizer):
                slot = slot_of(optimizer, p)
                slot.step.fill_(number)
                slot.first_index = number * 2**20
            optimizer.step()
            each(optimizer)
    assert launches.programs("update_group") == launches.programs("update_tensor") == 1
    optimizer_of((40, 200), (33, 136), **COMPACT).step()  # rows without whole blocks
    assert launches.programs("update_group") == 2


@pytest.mark.parametrize("capturable", [False, True])
def test_a_launch_has_the_numbers_and_scales_of_now(launches: Compared, capturable: bool) -> None:
    optimizer = optimizer_of((32, 256), (40, 128), capturable=capturable, **COMPACT)
    parameters = all_parameters(optimizer)
    for update in (1, 2, 3):
        launches.clear()
        optimizer.step()
        *_, together = launches.launched
        numbers = [0] if capturable else [update]
        assert [together.arguments[19]] == numbers
        launches.clear()
        each(optimizer)
        for row, alone, p in zip(together.arguments[1].tolist(), launches.launched, parameters, strict=True):
            slot, state = slot_of(optimizer, p), optimizer.state[p]
            scales = [state[key] for key in SCALES]
            place = [p.shape[1], slot.first_index, slot.random_key]
            assert row[COLUMNS.value :] == [*(scale.data_ptr() for scale in scales), *place]
            given = alone.arguments[23:31]
            assert all(one is other for one, other in zip(given[:2], scales, strict=True))
            words = [given[2], (given[3] << 32) + given[4] % 2**32, given[5] % 2**32]
            assert words == place
            assert given[6:] == (0 if capturable else update + 1, 0)
            for key in SCALES:
                state[key] = state[key].clone()
            slot.first_index += 3 * 2**31 + 256
    assert launches.programs("update_tensor") == 1


def test_a_second_launch_does_not_enter_tritons_front_end(launches: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optimizer_of((32, 256), (40, 200), (3,), **COMPACT)
    optimizer.step()
    each(optimizer)
    programs = [program.compiled for program in launches.by]
    monkeypatch.setattr(JITFunction, "compile", None, raising=False)
    monkeypatch.setattr(JITFunction, "_do_compile", None, raising=False)
    launches.clear()
    optimizer.step()
    each(optimizer)
    assert [program.compiled for program in launches.by] == programs


def test_a_launch_without_random_bits_is_given_nothing_of_them(launches: Compared) -> None:
    optimizer = optimizer_of((32, 256), (3,))
    optimizer.step()
    each(optimizer)
    together, *alone = launches.launched
    assert together.arguments[1].shape[1] == COLUMNS.value
    assert together.arguments[19] is None
    assert all(given is None for made in alone for given in made.arguments[23:31])


class OnDevice:
    """A tensor as selection sees one: no GPU is needed to ask."""

    device = torch.device("cuda", 0)
    is_cuda = True
    shape = (3, 4)

    def __init__(self, contiguous: bool) -> None:
        self._contiguous = contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous

    def stride(self) -> tuple[int, ...]:
        return (4, 1) if self._contiguous else (1, 3)

    def permute(self, order: Any) -> OnDevice:
        return OnDevice(True)


def test_auto_takes_the_kernels_for_codes_of_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for contiguous, name in ((True, "triton"), (False, "eager")):
        parameters: Any = [OnDevice(contiguous)]
        monkeypatch.setattr(availability, "dense", lambda parameter: True)
        assert select_backend("auto", parameters, [ADAMW], parameters).name == name
        assert select_backend("auto", parameters, [ADAMW]).name == "triton"
