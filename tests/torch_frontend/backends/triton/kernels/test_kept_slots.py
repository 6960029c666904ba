"""Slots that are kept from update to update give the bits that new ones give, whatever becomes of their tensors in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.rows import covering
from tests.support.torch_models import backend_of, bits, slot_of, unchanged

from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.backend import TensorSlot

SHAPES = ((6, 6), (1,), (3, 4, 2, 2), (300,))


class Run:
    """An optimizer of the kernels, alone or all together, with slots that are kept or made anew for each update."""

    def __init__(self, rule: type, dtype: torch.dtype, keeps: bool, together: bool, backend: str = "triton") -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "weight_decay": 0.0}]
        self.optimizer = rule(groups, lr=1e-2, weight_decay=0.1, backend=backend)
        self.gradients: list[torch.Tensor] = []
        self.left_out: list[int] = []
        self._together = together
        self._keeps = keeps

    def give_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.before = self.gradients
        self.gradients = [torch.randn(p.shape, generator=generator).to(p.dtype) * 3 for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        slots = self._slots()
        pairs = [pair for i, pair in enumerate(zip(slots, self.gradients, strict=True)) if i not in self.left_out]
        if self._together:
            backend_of(self.optimizer).update_all(pairs)
        else:
            for slot, gradient in pairs:
                backend_of(self.optimizer).update(slot, gradient, first=True)
        for slot, _ in pairs:
            slot.state["step"] += 1

    def _slots(self) -> list[TensorSlot]:
        """Those that the optimizer keeps, or new ones."""
        if not self._keeps:
            self.optimizer._forget_groups()
        self.optimizer._refresh()
        return [slot_of(self.optimizer, p) for p in self.parameters]

    def everything(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        return [bits(x.contiguous()).clone() for p in self.parameters for x in (p.detach(), *state[p].values())]


def off_alignment(run: Run) -> None:
    for p in run.parameters[:3]:
        memory = torch.empty(p.numel() + 1, dtype=p.dtype)
        p.data = memory[1:].view(p.shape).copy_(p)


def transposed_in_place(run: Run) -> None:
    """The same object at the same address with as many bytes, in another order."""
    p = run.parameters[0]
    p.data = p.data.t()


def channels_last(run: Run) -> None:
    p = run.parameters[2]
    p.data = p.data.clone(memory_format=torch.channels_last)


def state_elsewhere(run: Run) -> None:
    for p in run.parameters:
        for name, value in run.optimizer.state[p].items():
            run.optimizer.state[p][name] = value.clone()


def state_in_another_order(run: Run) -> None:
    state = run.optimizer.state[run.parameters[0]]
    state["debiased_exp_avg_sq"] = state["debiased_exp_avg_sq"].t().contiguous().t()


def loaded(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def gradient_in_another_order(run: Run) -> None:
    run.gradients[0] = run.gradients[0].t().contiguous().t()


def gradient_of_one_element_expanded(run: Run) -> None:
    run.gradients[3] = run.gradients[3][:1].expand(SHAPES[3])


def gradient_negated_when_it_is_read(run: Run) -> None:
    """At the address of one that is not."""
    run.gradients = [g.copy_(new) for g, new in zip(run.before, run.gradients, strict=True)]
    run.gradients[1] = torch._neg_view(run.gradients[1])


def other_settings(run: Run) -> None:
    run.optimizer.param_groups[1].update(lr=0.1, betas=(0.0, 0.9), maximize=True)


def other_count(run: Run) -> None:
    run.optimizer.state[run.parameters[0]]["step"].fill_(7)


def first_left_out(run: Run) -> None:
    run.left_out = [0]


CHANGES = [
    off_alignment,
    transposed_in_place,
    channels_last,
    state_elsewhere,
    state_in_another_order,
    loaded,
    gradient_in_another_order,
    gradient_of_one_element_expanded,
    gradient_negated_when_it_is_read,
    other_settings,
    other_count,
    first_left_out,
]


@pytest.mark.parametrize(
    ("rule", "dtype", "change", "together"),
    covering([(StableAdamW, torch.bfloat16), (AdamW, torch.float32)], CHANGES, [True, False]),
)
def test_kept_slots_give_the_bits_of_new_ones(
    rule: type, dtype: torch.dtype, change: Callable[[Any], None], together: bool
) -> None:
    runs = [Run(rule, dtype, keeps, together) for keeps in (True, False)]
    runs.append(Run(rule, dtype, False, together, "eager"))
    start = runs[0].everything()
    for seed in range(3):
        for run in runs:
            run.give_gradients(seed)
            if seed == 1:
                change(run)
            run.update()
        kept, new, _ = (run.everything() for run in runs)
        assert unchanged(kept, new)
        for p, q in zip(runs[0].parameters, runs[2].parameters, strict=True):
            torch.testing.assert_close(p, q, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert not unchanged(start, kept)
