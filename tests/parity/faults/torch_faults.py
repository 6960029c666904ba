"""Faults in the torch frontend: groups, state, the eager backend, and small tensors that it updates together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from penstock.core.release import Action
from penstock.torch_frontend import state as saved_state
from penstock.torch_frontend import updates
from penstock.torch_frontend.backends import eager, packed
from penstock.torch_frontend.backends.eager import EagerBackend
from penstock.torch_frontend.backends.numbers import GroupSettings
from penstock.torch_frontend.backends.packed import Batch
from penstock.torch_frontend.backends.piece import Piece
from penstock.torch_frontend.updates import TensorUpdates

from .planting import Fault, both, instead

RELEASED_ADAMW, RELEASED_STABLE = "events/release/adamw/float32", "events/release/stable_adamw/float32"
B_ADAMW = "B/adamw/float32/none/state-default"
GROUPS = "groups/adamw/float32/none/state-default"
SMALL = "shapes/{}/float32/none/state-default"
"""Of several tensors in one group, which a plain step() updates together."""


def _settings_of_the_first_group(correct: Any, self: Any, parameter: Any) -> Any:
    slot = correct(self, parameter)
    slot.settings = self._groups[0].settings
    return slot


def _plant_a_key_without_settings(patch: pytest.MonkeyPatch) -> None:
    """Tensors of different groups are updated together, with the numbers of the first."""
    patch.setattr(packed, "id", lambda settings: 0, raising=False)


def _stays_current(correct: Any, self: Any, group: Any) -> bool:
    return self._order == list(map(id, group["params"]))


def _forgets_nothing(correct: Any, self: Any) -> None:
    if not hasattr(self, "_groups"):
        correct(self)


def _slots_for_ever(correct: Any, self: Any) -> bool:
    slots = dict(self._slots)
    dropped = correct(self)
    self._slots |= slots
    return dropped


def _keeps_its_numbers(correct: Any, self: Any, current: Any) -> None:
    self.hyperparameters = current


def _counts_every_micro_batch(correct: Any, self: Any, tasks: Any, **how: Any) -> Any:
    applied = correct(self, tasks, **how)
    for parameter, _, action in tasks:
        if not action.steps:
            self.state[parameter]["step"] += 1
    return applied


def _counts_twice(correct: Any, self: Any, parameter: Any, gradient: Any, **how: Any) -> Any:
    square = correct(self, parameter, gradient, **how)
    self.state[parameter]["step"] += 1
    return square


def _all_count_twice(correct: Any, self: Any, ready: Any) -> None:
    correct(self, ready)
    for parameter, _ in ready:
        self.state[parameter]["step"] += 1


def _forgets_compensation(correct: Any, final: Any, groups: Any, state: Any) -> None:
    correct(final, groups, state)
    for tensors in state.values():
        tensors["compensation"].zero_()


def _mean_square_over_a_piece(correct: Any, self: Any, slot: Any, gradient: Any, sums: Any, first: bool) -> Any:
    return correct(self, slot, gradient, sums, first) * gradient.numel() / min(gradient.numel(), eager.piece_elements(gradient))


def _ratios_of_one_element_less(correct: Any, self: Any) -> Any:
    ratios = correct(self)
    return ratios * (ratios.numel() / max(1, ratios.numel() - 1))


def _means_over_the_largest(correct: Any, self: Any, ratios: Any) -> Any:
    sizes = torch.tensor([float(slot.parameter.numel()) for slot in self.slots])
    return correct(self, ratios) * sizes / sizes.max()


def _one_mean_for_all(correct: Any, self: Any, ratios: Any) -> Any:
    means = correct(self, ratios)
    return means.mean().expand_as(means)


def _unpacked_without_a_copy(correct: Any, together: Any, tensors: Any, views: Any) -> None:
    if together.dtype in views:
        together = views[together.dtype][0]
    correct(together, tensors, views)


FAULTS = [
    Fault(
        "wrong beta2",
        instead(updates, "hyperparameters", lambda correct, group: dataclasses.replace(correct(group), beta2=0.9985)),
        "trajectories/release/adam/float32",
        "eager",
    ),
    Fault(
        "learning rate of another group",
        instead(TensorUpdates, "_new_slot", _settings_of_the_first_group),
        GROUPS,
        "eager",
    ),
    Fault("small tensors: learning rate of another group", _plant_a_key_without_settings, GROUPS, "eager"),
    Fault(
        "stale groups after load_state_dict",
        both(
            instead(TensorUpdates, "_forget_groups", _forgets_nothing),
            instead(updates._KnownGroup, "is_current", _stays_current),
            instead(updates._KnownGroup, "refresh", lambda correct, self, group: correct(self, self.group)),
        ),
        "identity/frozen/adamw/float32",
        "eager",
    ),
    Fault(
        "stale state after load_state_dict",
        both(
            instead(TensorUpdates, "_forget_groups", _forgets_nothing),
            instead(updates._KnownGroup, "is_current", _stays_current),
            instead(TensorUpdates, "refresh", _slots_for_ever),
        ),
        "identity/resume/adamw/float32",
        "eager",
    ),
    Fault(
        "settings of the first step for ever",
        instead(updates._KnownGroup, "refresh", lambda correct, self, group: False),
        "schedule/adamw/float32/none/state-default",
        "eager",
    ),
    Fault(
        "numbers of an update with other settings",
        instead(GroupSettings, "change", _keeps_its_numbers),
        "events/schedule-unused/adamw/float32",
        "eager",
    ),
    Fault(
        "numbers of the first update for ever",
        instead(GroupSettings, "numbers", lambda correct, self, rule, step, dtype: correct(self, rule, 1.0, dtype)),
        B_ADAMW,
        "eager",
    ),
    Fault(
        "resume drops the compensation",
        instead(saved_state, "restore_tensors", _forgets_compensation),
        "identity/resume/adamw/bfloat16",
        "eager",
    ),
    Fault(
        "second moment in bfloat16 by default",
        instead(
            saved_state,
            "moment_dtypes",
            lambda correct, group, name, checked: correct(group, name, checked)._replace(exp_avg_sq=name),
        ),
        "B/adamw/bfloat16/split/state-default",
        "eager",
        100,
    ),
    Fault(
        "mean square over the elements of a piece",
        instead(EagerBackend, "_total", _mean_square_over_a_piece),
        "large/stable_adamw/float32/none/state-default",
        "eager",
    ),
    Fault(
        "mean square over the wrong count",
        instead(Piece, "ratios", _ratios_of_one_element_less),
        RELEASED_STABLE,
        "eager",
    ),
    Fault(
        "small tensors: mean square over the wrong count",
        instead(Batch, "_means", _means_over_the_largest),
        SMALL.format("stable_adamw"),
        "eager",
    ),
    Fault(
        "small tensors: one mean square for all",
        instead(Batch, "_means", _one_mean_for_all),
        SMALL.format("stable_adamw"),
        "eager",
    ),
    Fault(
        "small tensors: what was unpacked before is unpacked again",
        instead(packed, "_unpack", _unpacked_without_a_copy),
        SMALL.format("adamw"),
        "eager",
    ),
    Fault(
        "L2 added by every micro-batch",
        instead(Piece, "prepare", lambda correct, self, first, squares: correct(self, True, squares)),
        "events/state/adam/float32",
        "eager",
    ),
    Fault(
        "L2 left out",
        instead(Piece, "prepare", lambda correct, self, first, squares: correct(self, False, squares)),
        SMALL.format("adam"),
        "eager",
    ),
    Fault(
        "decay left out",
        instead(Piece, "descend", lambda correct, self, numbers, eta: correct(self, numbers._replace(decay=None), eta)),
        SMALL.format("adamw"),
        "eager",
        100,
    ),
    Fault(
        "moments decayed by every micro-batch",
        lambda patch: patch.setattr(Action, "first", property(lambda action: True), raising=False),
        "events/state-last-known/adamw/float32",
        "eager",
    ),
    Fault(
        "step counted for every micro-batch",
        instead(TensorUpdates, "perform_all", _counts_every_micro_batch),
        "events/state/adamw/float32",
        "eager",
    ),
    Fault("step counted twice", instead(TensorUpdates, "update", _counts_twice), RELEASED_ADAMW, "eager"),
    Fault(
        "small tensors: step counted twice",
        instead(TensorUpdates, "update_all", _all_count_twice),
        SMALL.format("adamw"),
        "eager",
    ),
]
