"""What parameter groups, parameters and gradients must be, checked before anything is changed."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..core import codings, dtypes, random_bits
from ..core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from ..core.hyperparameters import Hyperparameters, check_number
from ..core.rules import RULES, Rule, check_rule
from .array_ops import dtype_name
from .communication.shards import PLAIN, check_placements, is_interleaved, is_sharded, local, placements
from .groups import (
    NAMES,
    PLAIN_STORAGE,
    Group,
    asked_dtypes,
    field_dtypes,
    first_index,
    hyperparameters,
    number_in,
    own_settings,
    rule_of,
    settings_of,
    storage_of,
)

CALLED_HERE = {
    **dict.fromkeys(("learningrate", "lrrate"), "lr"),
    **dict.fromkeys(("wd", "decay", "decayrate", "weightdecayrate"), "weight_decay"),
    **dict.fromkeys((*(f"{beta}{number}" for beta in ("b", "beta") for number in (1, 2, 3)),), "betas"),
    "epsilon": "eps",
}
"""The names of settings in groups by what others call them, in lower case and without underscores."""

MISSPELT = 0.85
"""From this ratio of `difflib` on a key of a group is taken for a misspelt one."""

PLAIN_GRADIENT = torch.strided
"""The layout of gradients that updates accept."""


def check_keys(group: Group, given: Collection[str], defaults: Collection[str], of_constructor: Collection[str]) -> None:
    """Raise `InvalidArgumentError` for a key of a new group that would have no effect, and is meant to have one.

    Other keys are the user's own, as in torch.

    Args:
        group: as torch has completed it.
        given: the keys that the user gave.
        defaults: the settings of the optimizer's groups.
        of_constructor: the optimizer's arguments that are not settings of its groups.
    """
    check_rule(group["rule"])
    own, of_rules = own_settings(rule_of(group)), {name for rule in RULES.values() for name in own_settings(rule)}
    known = {"params", *of_rules, *defaults} - set(of_constructor)
    for key in given:
        if key in of_rules and key not in own:
            raise InvalidArgumentError(
                f"a parameter group of rule={group['rule']!r} has {key}, which that rule does not have; leave it out, or name "
                "another rule."
            )
        if key in of_constructor:
            instead = "; give it compensation and state_dtype" if key == "precision" else "; give it there"
            raise InvalidArgumentError(f"a parameter group has {key}, which is of the whole optimizer{instead}.")
        plain = str(key).lower().replace("_", "")
        called = {name.replace("_", ""): name for name in known}.get(plain)
        if called is None and not isinstance(group[key], (bool, str)):  # a mark of the user's own, such as "decay": False
            called = CALLED_HERE.get(plain)
        if key not in known and called is not None:
            raise InvalidArgumentError(f"a parameter group has {key!r}, which is called {called!r} here.")
        if key not in known and (close := difflib.get_close_matches(str(key), known, 1, MISSPELT)):
            raise InvalidArgumentError(f"a parameter group has {key!r}, which is not known; did you mean {close[0]!r}?")


def check_complete(group: Mapping[str, Any]) -> None:
    """Raise `InvalidArgumentError` if the rule of a group is not known, or the group lacks a setting of it."""
    check_rule(group["rule"])
    if missing := [name for name in settings_of(rule_of(group)) if name not in group]:
        raise InvalidArgumentError(
            f"a parameter group of rule={group['rule']!r} lacks {', '.join(missing)}; name the rule where the group is made, "
            "in the constructor or add_param_group()."
        )


def check_group(group: Group) -> None:
    """Raise if a group cannot be optimized; set a missing `max_lr` to `lr` with decouple_lr=True.

    Raises:
        InvalidArgumentError: a hyperparameter, dtype or compensation is out of range or does not fit the others; a parameter
            that is given twice.
        RefusedError: a parameter whose storage needs whole rows is sharded otherwise; one whose rule needs whole matrices is
            sharded as it cannot be gathered.
        UnsupportedTensorError: a parameter is complex, integer, sparse or a DTensor of partial sums, or its elements share
            memory, or the rule does not take its shape.
    """
    rule, ranges = rule_of(group), Hyperparameters.RANGES
    for name in ("decouple_lr", "maximize", "capturable"):
        if not isinstance(group[name], bool):
            raise InvalidArgumentError(f"{name}={group[name]!r} must be True or False.")
    lr = number_in("lr", group["lr"])
    if group["decouple_lr"]:
        if rule.l2:
            raise InvalidArgumentError(
                f"decouple_lr=True has no meaning for {rule.name}, whose weight_decay is added to the gradient; use AdamW, "
                "or decoupled_weight_decay=True."
            )
        if group["max_lr"] is None:
            check_number("lr", float(lr) if isinstance(lr, Tensor) else lr, ranges["learning_rate"])
            group["max_lr"] = float(lr)
            check_number("max_lr (taken from lr)", group["max_lr"], ranges["max_lr"])
    elif group["max_lr"] is not None:
        check_number("max_lr", group["max_lr"], ranges["max_lr"])
    checked = hyperparameters(group)
    random_bits.check_seed(group.get("seed", 0))  # which earlier versions did not save
    state_dtype = group["state_dtype"]
    if not (state_dtype is None or isinstance(state_dtype, torch.dtype) or str(state_dtype) == codings.EIGHT_BIT):
        raise InvalidArgumentError(
            f"state_dtype={state_dtype!r} is not a dtype; give for instance torch.float32, '8bit', or None."
        )
    if len(set(group["params"])) < len(group["params"]):
        raise InvalidArgumentError(
            "params has a parameter more than once, which would be updated as often in every step; give each of them once, as "
            "model.parameters() does."
        )
    for parameter in group["params"]:
        check_parameter(parameter)
        check_shape(rule, parameter)
        if storage_of(group, parameter, checked) != PLAIN_STORAGE and is_sharded(parameter):
            first_index(parameter)  # raises


def check_state_dtype_is_used(groups: Sequence[Group]) -> None:
    """Raise `InvalidArgumentError` if a state_dtype was given for groups of which none keeps a state."""
    given = groups[0]["state_dtype"]
    if given is not None and not any(rule_of(group).fields for group in groups):
        raise InvalidArgumentError(
            f"state_dtype={given!r} is not possible for {rule_of(groups[0]).name}, which keeps no state; leave it out, or give "
            "a momentum."
        )


def check_stored(
    group: Mapping[str, Any], parameter: Tensor, checked: Hyperparameters, stored: codings.StateDtypes, described: str
) -> None:
    """Raise `InvalidArgumentError` if the fields of a parameter are stored in another coding than its group asks for."""
    fields, asked, expected = rule_of(group).fields, asked_dtypes(group), [field_dtypes(group, parameter, checked)]
    arguments = ["state_dtype"] * len(fields)
    dtype = dtype_name(parameter.dtype)
    codings.check_stored(fields, dtype, stored, asked, expected, arguments=arguments, described=described)


def check_device(current: Hyperparameters, parameter: Tensor) -> None:
    """Raise `InvalidArgumentError` if a hyperparameter is on a device from which the parameter's update cannot read it."""
    for field in current.RANGES:
        value = getattr(current, field)
        if isinstance(value, Tensor) and value.device.type not in ("cpu", parameter.device.type):
            name = NAMES.get(field, field)
            raise InvalidArgumentError(
                f"{name} is a tensor on {value.device}, and a parameter of shape {tuple(parameter.shape)} is on "
                f"{parameter.device}; give a number, or a tensor on the CPU or on the parameter's device."
            )


def check_parameter(parameter: Tensor) -> None:
    """Raise `UnsupportedTensorError` for a tensor that the optimizers cannot update."""
    if is_lazy(parameter):  # of a lazy module before its first forward
        return
    described = f"parameter of shape {tuple(parameter.shape)}"
    if parameter.layout is not torch.strided:
        raise UnsupportedTensorError(f"{described} is sparse ({parameter.layout}); use a dense parameter.")
    check_placements(parameter, described)
    if _may_overlap(local(parameter)):
        raise UnsupportedTensorError(
            f"{described} and strides {parameter.stride()} has elements that share memory, and an update would change them "
            "together; give them memory of their own (torch.nn.Parameter(tensor.clone(memory_format=torch.contiguous_format)))."
        )
    dtypes.check_parameter_dtype(dtype_name(parameter.dtype), described)


def check_shape(rule: Rule, parameter: Tensor) -> None:
    """Raise `UnsupportedTensorError` or `RefusedError` for a shape or placements that the rule does not take."""
    if rule.of_matrix is not None and not is_lazy(parameter):
        remedy = 'put it into a group with "rule": "adamw", as param_groups_for_muon(model) does'
        rule.check_shape(parameter.shape, "a parameter", remedy)
        if is_interleaved(parameter):
            raise RefusedError(
                f"{rule.name} needs whole matrices, and a parameter of shape {tuple(parameter.shape)} with placements "
                f"{placements(parameter)} cannot be gathered; {remedy}, or shard it along each dimension once."
            )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may share memory, as those of an expanded tensor do."""
    reach = 0  # offset of the last element along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Raise `UnsupportedTensorError` for a gradient that is sparse, complex, or sharded unlike its parameter."""
    if gradient.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse; penstock needs dense gradients "
            "(torch.nn.Embedding: sparse=False)."
        )
    if gradient.is_complex():
        raise UnsupportedTensorError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is complex; it must be real."
        )
    if type(gradient) in PLAIN and type(parameter) in PLAIN:
        return
    if placements(gradient) != placements(parameter):
        raise UnsupportedTensorError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} has placements "
            f"{placements(gradient) or 'none'}, the parameter {placements(parameter) or 'none'}; "
            "redistribute it: parameter.register_hook(lambda gradient: gradient.redistribute(placements=parameter.placements))."
        )
