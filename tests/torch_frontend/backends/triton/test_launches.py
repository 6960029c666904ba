"""What the host does for a launch: nothing of Triton's front end after the first one, and everything is read anew.

Slots are kept from launch to launch, as an optimizer keeps them, while their tensors become other ones.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.rows import covering
from tests.support.torch_models import all_parameters, slot_of, use_backend

from penstock.torch_frontend.backends.triton.availability import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from benchmarks.gpu.no_launch import without_launching
from tests.support.triton_launches import Compared, compared
from triton.runtime.jit import JITFunction

from penstock.core.errors import UnsupportedTensorError
from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.backend import EXP_AVG, EXP_AVG_SQ, TensorSlot
from penstock.torch_frontend.backends.triton import corrections, kernels, launch
from penstock.torch_frontend.backends.triton.backend import TritonBackend
from penstock.torch_frontend.backends.triton.configuration import resident_programs
from penstock.torch_frontend.backends.triton.operands import LARGE, Operands, operands

NUMELS = (1500, 3, 17)
CALLS_OF_OURS = 30
"""Python functions of this package that run for a launch of one tensor, at most."""

CALLS_OF_OURS_IN_A_STEP = 170
"""The same for step(), however many tensors it updates."""


@pytest.fixture
def launches() -> Iterator[Compared]:
    with compared() as found, torch.no_grad():
        yield found


class Kept:
    """An optimizer's slots, and a gradient of each."""

    def __init__(
        self, rule: type = StableAdamW, dtype: torch.dtype = torch.bfloat16, numels: tuple[int, ...] = NUMELS, **options: Any
    ) -> None:
        self.optimizer = rule(
            [torch.zeros(numel, dtype=dtype).requires_grad_() for numel in numels], backend="eager", **options
        )
        self.backend = use_backend(self.optimizer, TritonBackend())
        self.slots = self.new_slots()
        self.gradients = [torch.ones_like(slot.parameter) for slot in self.slots]

    def new_slots(self) -> list[TensorSlot]:
        """As an optimizer makes them that has just read its groups."""
        self.optimizer._forget_groups()
        return [slot_of(self.optimizer, p) for p in all_parameters(self.optimizer)]

    @property
    def pairs(self) -> list[tuple[TensorSlot, torch.Tensor]]:
        return list(zip(self.slots, self.gradients, strict=True))

    def each(self) -> None:
        for slot, gradient in self.pairs:
            self.backend.update(slot, gradient, first=True)

    def all(self) -> None:
        self.backend.update_all(self.pairs)


def accumulate_and_apply(kept: Kept) -> None:
    (slot, gradient), *_ = kept.pairs
    kept.backend.accumulate(slot, gradient, first=True)
    kept.backend.accumulate(slot, gradient, first=False)
    kept.backend.apply(slot)
    kept.backend.accumulate(slot, gradient, first=True)
    kept.backend.update(slot, gradient, first=False)


WAYS: dict[str, Callable[[Kept], Any]] = {
    "each": Kept.each,
    "all": Kept.all,
    "accumulate": accumulate_and_apply,
    "shards": lambda kept: kept.backend.update_all(kept.pairs, over_shards=list),
    "if finite": lambda kept: kept.backend.update_if_finite(*kept.pairs[0]),
    "all if finite": lambda kept: kept.backend.update_all_if_finite(kept.pairs),
    "each if finite": lambda kept: kept.backend.update_each_if_finite(kept.pairs),
}


@pytest.mark.parametrize(("way", "rule", "capturable"), covering([*WAYS], [StableAdamW, AdamW], [False, True]))
def test_a_second_launch_does_not_enter_tritons_front_end(
    way: str, rule: type, capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(rule, capturable=capturable)
    with without_launching() as launched, torch.no_grad():
        WAYS[way](kept)
        first = [(made.source, made.grid) for made in launched]
        launched.clear()
        monkeypatch.setattr(JITFunction, "run", None)
        for kernel in (kernels.update_group, kernels.update_tensor, corrections.store_bias_corrections):
            monkeypatch.setattr(kernel, "create_binder", None)
        for slots in (kept.slots, kept.new_slots()):  # the same, and others
            kept.slots = slots
            WAYS[way](kept)
            assert [(made.source, made.grid) for made in launched] == first
            launched.clear()


def test_where_a_compiled_kernel_cannot_be_launched_the_front_end_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    with without_launching() as launched, torch.no_grad():
        found = []
        for known in (True, False):
            if not known:
                monkeypatch.setattr(launch, "constants_taken", lambda *_: None)
                kept.backend = TritonBackend()
            kept.each()
            kept.all()
            found.append([(made.source, made.grid, len(made.arguments)) for made in launched])
            launched.clear()
    assert found[0] == found[1]
    assert len(found[0]) == len(NUMELS) + 1


def test_a_launch_with_tickets_has_the_programs_that_its_registers_leave_room_for() -> None:
    """The pretended device has two multiprocessors and gives each thread of a loaded program 64 registers."""
    kept = Kept(numels=(2**19,))
    with without_launching() as launched, torch.no_grad():
        kept.all()
        kept.each()
        assert [made.grid for made in launched] == [(2 * 8, 1, 1)] * 2
    assert [resident_programs(registers, 4) for registers in (48, 56, 57, 255)] == [10, 9, 8, 2]


# -- everything is read anew ----------------------------------------------------------------------------------------------


def elsewhere(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The same numbers at another address; with an offset of 1 at one that is not a multiple of 16."""
    return torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:].view(tensor.shape).copy_(tensor)


def move_parameters(kept: Kept) -> None:
    for slot in kept.slots:
        slot.parameter.data = elsewhere(slot.parameter)


def move_a_parameter_off_its_alignment(kept: Kept) -> None:
    kept.slots[1].parameter.data = elsewhere(kept.slots[1].parameter, 1)


def move_gradients(kept: Kept) -> None:
    kept.gradients = [elsewhere(gradient) for gradient in kept.gradients]


def move_a_gradient_off_its_alignment(kept: Kept) -> None:
    kept.gradients[0] = elsewhere(kept.gradients[0], 1)


def load_state(kept: Kept) -> None:
    kept.optimizer.load_state_dict(kept.optimizer.state_dict())
    for slot, parameter in zip(kept.slots, all_parameters(kept.optimizer), strict=True):
        slot.state = kept.optimizer.state[parameter]


def move_to_the_host_and_back(kept: Kept) -> None:
    """As model.cpu(), model.cuda(), and the optimizer's state with it: everything is at other addresses."""
    move_parameters(kept)
    for slot in kept.slots:
        for name, value in slot.state.items():
            if value.dim() > 0:
                slot.state[name] = elsewhere(value)
    kept.gradients = [torch.ones_like(slot.parameter) for slot in kept.slots]


def set_in_place(kept: Kept) -> None:
    """The same tensor objects with other memory, as FSDP and offloading do it."""
    for slot in kept.slots:
        slot.state["debiased_exp_avg"].set_(elsewhere(slot.state["debiased_exp_avg"]))


def resize_everything(kept: Kept) -> None:
    for slot in kept.slots:
        slot.parameter.data = torch.zeros(2 * slot.parameter.numel(), dtype=slot.parameter.dtype)
        for name, value in slot.state.items():
            if value.dim() > 0:
                slot.state[name] = torch.zeros(slot.parameter.shape, dtype=value.dtype)
    kept.gradients = [torch.ones_like(slot.parameter) for slot in kept.slots]


def change_a_dtype(kept: Kept) -> None:
    state = kept.slots[2].state
    state["debiased_exp_avg"] = state["debiased_exp_avg"].float()


def change_a_gradients_layout(kept: Kept) -> None:
    kept.gradients[0] = torch.ones((), dtype=kept.gradients[0].dtype).expand(NUMELS[0])


CHANGES = [
    move_parameters,
    move_a_parameter_off_its_alignment,
    move_gradients,
    move_a_gradient_off_its_alignment,
    load_state,
    move_to_the_host_and_back,
    set_in_place,
    resize_everything,
    change_a_dtype,
    change_a_gradients_layout,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("rule", "dtype"), [(StableAdamW, torch.bfloat16), (AdamW, torch.float32)])
def test_a_launch_has_the_addresses_and_sizes_of_now(launches: Compared, rule: type, dtype: torch.dtype, change: Any) -> None:
    """And the program for them: the fixture asks Triton which one it would launch."""
    kept = Kept(rule, dtype)
    for _ in range(3):
        launches.clear()
        kept.each()
        alone = {made.arguments[3]: (*made.arguments[:6], alignment) for made, alignment in launches.aligned}
        launches.clear()
        kept.all()
        together = {
            row[3]: (*row[:5], row[6], alignment) for made, alignment in launches.aligned for row in made.arguments[1].tolist()
        }
        for slot, gradient in kept.pairs:
            given = operands(slot, gradient)
            addresses = [tensor.data_ptr() for tensor in given]
            whole = all(address % 16 == 0 for address in addresses)
            alignment = 16 if whole else min(tensor.element_size() for tensor in given)
            expected = [*addresses, slot.parameter.numel(), alignment]
            if gradient.is_contiguous():
                assert alone[addresses[3]] == together[addresses[3]] == tuple(expected)
            else:  # a copy in the order of the parameter
                assert alone[addresses[3]][1:] == together[addresses[3]][1:] == tuple(expected[1:])
                assert gradient.data_ptr() not in (alone[addresses[3]][0], together[addresses[3]][0])
        change(kept)


KEYS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ, "compensation": "compensation"}


@pytest.mark.parametrize("way", [Kept.each, Kept.all], ids=["each", "all"])
def test_a_large_tensor_off_its_alignment_is_named_once(way: Callable[[Kept], None]) -> None:
    size = LARGE + 17 * (way is Kept.all)  # the warning is given once for each shape
    kept = Kept(numels=(size, 3))
    kept.gradients = [elsewhere(gradient, 1) for gradient in kept.gradients]
    with without_launching(), torch.no_grad():
        with pytest.warns(UserWarning, match=rf"the gradient of shape \({size},\).* not a multiple of 16") as warned:
            way(kept)
        assert len(warned) == 1
        way(kept)


def shrink(kept: Kept, name: str) -> None:
    """In place: neither the object nor the address changes."""
    tensor = kept.gradients[0] if name == "gradient" else kept.slots[0].state[KEYS[name]]
    tensor.resize_(NUMELS[0] // 2)


def elsewhere_device(kept: Kept, name: str) -> None:
    if name == "gradient":
        kept.gradients[0] = kept.gradients[0].to("meta")
    else:
        kept.slots[0].state[KEYS[name]] = kept.slots[0].state[KEYS[name]].to("meta")


@pytest.mark.parametrize("name", [name for name in Operands._fields if name != "parameter"])
@pytest.mark.parametrize(
    ("spoil", "said"), [(shrink, "has 1500 elements, and its {} .* has 750"), (elsewhere_device, "on cpu, and its {} on meta")]
)
def test_a_tensor_that_has_become_wrong_is_refused_and_nothing_is_launched(
    launches: Compared, spoil: Any, said: str, name: str
) -> None:
    for way in (Kept.each, Kept.all):
        kept = Kept()
        way(kept)
        launches.clear()
        spoil(kept, name)
        with pytest.raises(UnsupportedTensorError, match=said.format(name)):
            way(kept)
        assert not launches.launched


def test_a_new_slot_is_looked_at_again(launches: Compared) -> None:
    """With other settings, and the same tensors at the same addresses."""
    kept = Kept()
    kept.all()
    old = kept.slots[1]
    state = {**old.state, "compensation": old.state["compensation"].view(torch.bfloat16)}
    kept.slots[1] = dataclasses.replace(old, compensation="kahan", state=state)
    launches.clear()
    kept.all()
    found = {
        program.options["COMPENSATION"]: len(made.arguments[1])
        for made, program in zip(launches.launched, launches.by, strict=True)
    }
    assert found == {"split": len(NUMELS) - 1, "kahan": 1}


# -- little is done -------------------------------------------------------------------------------------------------------


def calls_of_ours(run: Callable[[], Any]) -> int:
    """Calls of Python functions of this package."""
    count = 0
    root = Path(launch.__file__).resolve().parents[3]
    ours = tuple(str(root / folder) for folder in ("core", "torch_frontend"))

    def tell(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and str(Path(frame.f_code.co_filename).resolve()).startswith(ours)

    sys.setprofile(tell)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_launch_of_one_tensor_takes_few_calls() -> None:
    kept = Kept()
    with without_launching(), torch.no_grad():
        kept.each()
        (slot, gradient), *_ = kept.pairs
        found = calls_of_ours(lambda: kept.backend.update(slot, gradient, first=True))
    assert 5 < found <= CALLS_OF_OURS


@pytest.mark.parametrize(("rule", "dtype"), [(AdamW, torch.float32), (StableAdamW, torch.bfloat16)])
def test_a_step_of_many_tensors_takes_as_many_calls_as_one_of_few(rule: type, dtype: torch.dtype) -> None:
    """No function of this package is called for each tensor, wherever the gradients are."""
    found, counts = [], (4, 148)
    for count in counts:
        kept = Kept(rule, dtype, numels=(20,) * count)
        with without_launching():
            for moved in (False, True):
                for slot, gradient in kept.pairs:
                    slot.parameter.grad = elsewhere(gradient) if moved else gradient
                if not moved:
                    kept.optimizer.step()
                found.append(calls_of_ours(kept.optimizer.step))
    assert found[:2] == found[2:]
    assert max(found) <= CALLS_OF_OURS_IN_A_STEP


def test_neither_tensors_nor_slots_live_on_in_the_backend_or_in_another_slot() -> None:
    kept = Kept()
    gone = [weakref.ref(tensor) for slot in kept.slots for tensor in (slot.parameter, slot.state["debiased_exp_avg"])]
    with without_launching() as launched, torch.no_grad():
        kept.each()
        kept.all()
        gradients = [weakref.ref(gradient) for gradient in kept.gradients]
        kept.gradients = []
        launched.clear()
        gc.collect()
        assert all(gradient() is None for gradient in gradients)
        backend, lead = kept.backend, kept.slots[0]
        del kept
        gc.collect()
    assert all(tensor() is None for tensor in gone[2:])
    assert lead.parameter is gone[0]()
    del lead
    gc.collect()
    assert all(tensor() is None for tensor in gone)
    assert isinstance(backend, TritonBackend)
