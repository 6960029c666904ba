"""Parameter groups: their validation, and the hyperparameters that are read from them at every call."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..core import codings, compensation, dtypes, random_bits
from ..core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from ..core.hyperparameters import DECAY, Hyperparameters, check_number
from ..core.portable.state import check_rule
from ..core.rules import RULES, Rule
from .array_ops import dtype_name
from .communication.shards import PLAIN, check_placements, is_interleaved, is_sharded, local, placements, rows_before

NAMES = {"learning_rate": "lr", **{f"beta{number}": f"betas[{number - 1}]" for number in (1, 2, 3)}}
"""The names of hyperparameters in torch."""

USED_BY_STEP = ("lr", "weight_decay", "decouple_lr", "max_lr")
"""The settings that only the step uses; the others are used when a micro-batch goes into a rule's fields."""

MISSPELT = 0.85
"""From this ratio of `difflib` on a key of a group is taken for a misspelt one."""

Group = dict[str, Any]


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Return the rule of a group."""
    return RULES[group["rule"]]


@functools.cache
def own_settings(rule: Rule) -> tuple[str, ...]:
    """Return the keys of a group for `Rule.own_hyperparameters`: "betas" for all of its betas."""
    return tuple(dict.fromkeys("betas" if name.startswith("beta") else name for name in rule.own_hyperparameters))


def own_defaults(rule: Rule) -> dict[str, Any]:
    """Return the defaults of `own_settings`."""
    return {name: rule.betas if name == "betas" else rule.defaults[name] for name in own_settings(rule)}


@functools.cache
def settings_of(rule: Rule) -> tuple[str, ...]:
    """Return the keys of a group that an update by this rule depends on."""
    return ("lr", *own_settings(rule), "weight_decay", "decouple_lr", "max_lr", "maximize")


def complete_group(group: Group, given: Collection[str], of_optimizer: Rule) -> None:
    """Give a group that names its rule the settings that rule has, and choose the row of the rule that they ask for.

    Its own settings that were not given are those of the optimizer, or, for another rule than the optimizer's, the rule's
    defaults. Common ones (lr, weight_decay) are the optimizer's.

    Args:
        group: as torch has completed it.
        given: the keys that the user gave.
        of_optimizer: its class's rule.

    Raises:
        InvalidArgumentError: the rule keeps no state for which a state_dtype was given.
    """
    rule = rule_of(group)
    if not of_optimizer.is_of_one_kind_with(rule):
        own = own_settings(rule)
        for name in own_settings(of_optimizer):
            if name not in own:
                del group[name]
        group |= {name: default for name, default in own_defaults(rule).items() if name not in given}
    if rule is of_optimizer or not of_optimizer.is_of_one_kind_with(rule):
        group["rule"] = rule.row(own_values(rule, group)).name
    if "state_dtype" in given:
        check_state_dtype_is_used([group])


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
        if key in NAMES:
            raise InvalidArgumentError(f"a parameter group has {key!r}, which is called {NAMES[key].split('[')[0]!r} here.")
        if key not in known and (close := difflib.get_close_matches(str(key), known, 1, MISSPELT)):
            raise InvalidArgumentError(f"a parameter group has {key!r}, which is not known; did you mean {close[0]!r}?")


def check_state_dtype_is_used(groups: Sequence[Group]) -> None:
    """Raise `InvalidArgumentError` if a state_dtype was given for groups of which none keeps a state."""
    given = groups[0]["state_dtype"]
    if given is not None and not any(rule_of(group).fields for group in groups):
        raise InvalidArgumentError(
            f"state_dtype={given!r} is not possible for {rule_of(groups[0]).name}, which keeps no state; leave it out, or give "
            "a momentum."
        )


def check_complete(group: Mapping[str, Any]) -> None:
    """Raise `InvalidArgumentError` if the rule of a group is not known, or the group lacks a setting of it."""
    check_rule(group["rule"])
    if missing := [name for name in settings_of(rule_of(group)) if name not in group]:
        raise InvalidArgumentError(
            f"a parameter group of rule={group['rule']!r} lacks {', '.join(missing)}; name the rule where the group is made, "
            "in the constructor or add_param_group()."
        )


PLAIN_GRADIENT = torch.strided
"""The layout of gradients that updates accept."""


@dataclasses.dataclass(frozen=True, eq=False)
class SeenTensor:
    """A tensor and its version: equal for the same tensor without a write in between.

    It keeps the tensor alive, as the id of a deleted tensor may be reused.
    """

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenTensor) and self.tensor is other.tensor and self.version == other.version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))


def hyperparameters(group: Mapping[str, Any]) -> Hyperparameters:
    """Return the validated hyperparameters of a group.

    A 0-d tensor on the CPU is read; one on a device stays there, so that no step synchronises.
    """
    rule = rule_of(group)
    own = own_values(rule, group)
    if (row := rule.row(own)) is not rule:
        raise InvalidArgumentError(
            f"{', '.join(f'{name}={value}' for name, value in own.items())} choose the rule {row.name!r}, and the group was "
            f"made for {rule.name!r}; construct an optimizer with these settings."
        )
    return rule.hyperparameters(
        **own,
        learning_rate=_number("lr", group["lr"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        decouple_lr=group["decouple_lr"],
        max_lr=_number("max_lr", group["max_lr"]) if group["decouple_lr"] else None,
        maximize=group["maximize"],
        names=NAMES,
    )


def own_values(rule: Rule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `Rule.own_hyperparameters` in a group: numbers, also for tensors on the CPU."""
    betas = iter(_betas(rule, group))
    values = {name: next(betas) if name.startswith("beta") else group[name] for name in rule.own_hyperparameters}
    return {name: _number(NAMES.get(name, name), value) for name, value in values.items()}


def _betas(rule: Rule, group: Mapping[str, Any]) -> Sequence[Any]:
    """Return the betas of a group; none for a rule without them."""
    count = sum(name.startswith("beta") for name in rule.own_hyperparameters)
    betas = group["betas"] if count else ()
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        many = "a pair of numbers" if count == 2 else f"{count} numbers"
        raise InvalidArgumentError(f"betas={betas!r} must be {many}, each in {DECAY}.")
    return betas


def _number(name: str, value: Any) -> Any:
    """Return the number in a tensor or an array; a tensor on a device is returned as it is.

    What is no number is returned so that a change is seen, and as `core` spells it: a tuple for a list, a dtype's name.
    """
    if not hasattr(value, "dtype"):
        return tuple(value) if type(value) is list else dtype_name(value) if type(value) is torch.dtype else value
    if value.shape != () and math.prod(value.shape) != 1:
        raise InvalidArgumentError(
            f"{name} is a tensor of shape {tuple(value.shape)}; it must be a number or have one element."
        )
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.reshape(())
    return value.item()


def fingerprint(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a value that changes exactly when a setting of the group does; it never synchronises."""
    rule = rule_of(group)
    betas = tuple(_seen(f"betas[{index}]", beta) for index, beta in enumerate(_betas(rule, group)))
    return tuple(betas if name == "betas" else _seen(name, group[name]) for name in settings_of(rule))


def _seen(name: str, value: Any) -> Any:
    """Return a setting's value, or the tensor and its version for a tensor on a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return SeenTensor(value, value._version)
    return _number(name, value)


def changed_settings(before: tuple[Any, ...], group: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ from an earlier fingerprint."""
    pairs = zip(settings_of(rule_of(group)), before, fingerprint(group), strict=True)
    return [name for name, old, new in pairs if old != new]


class UsedSettings:
    """The settings that a step has used: a change between their use and optimizer.step() comes too late."""

    def __init__(self) -> None:
        self._seen: list[tuple[Any, ...]] | None = None
        self._stepped = False

    def remember(self, groups: list[Group], *, stepped: bool) -> None:
        """Record that the present settings are used; `stepped`: including lr and decay."""
        self._stepped |= stepped
        if self._seen is None:
            self._seen = [fingerprint(group) for group in groups]

    def check(self, groups: list[Group]) -> None:
        """Raise `RefusedError` if a setting that was used has changed since."""
        for number, (before, group) in enumerate(zip(self._seen or [], groups, strict=False)):
            changed = changed_settings(before, group)
            if not self._stepped:  # only micro-batches went into the moments so far
                l2 = rule_of(groups[number]).l2  # weight_decay is part of the gradient
                changed = [name for name in changed if name not in USED_BY_STEP or (l2 and name == "weight_decay")]
            if changed and not self._stepped:
                raise RefusedError(
                    f"{', '.join(changed)} of parameter group {number} changed after micro-batches had gone into the moments "
                    "and before optimizer.step(): the new value came too late for this step. Set it back, and change it (and "
                    "call scheduler.step()) after optimizer.step()."
                )
            if changed:
                raise RefusedError(
                    f"{', '.join(changed)} of parameter group {number} changed after the backward pass had updated the "
                    "parameters and before optimizer.step(): the new value came too late for this step. Change it (and call "
                    "scheduler.step()) after optimizer.step(); optimizer.zero_grad() closes this one."
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
    lr = _number("lr", group["lr"])
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


class Storage(NamedTuple):
    """How a parameter and its fields are stored, where it is not plain: values of axes of `core.combinations`."""

    compensation: str
    states: str


PLAIN_STORAGE = Storage("none", "plain")


def storage_of(group: Mapping[str, Any], parameter: Tensor, current: Hyperparameters) -> Storage:
    """Return the storage of a parameter of this group; "none" for a compensation without random bits.

    Raises:
        InvalidArgumentError: a dtype or compensation does not fit the parameter.
    """
    resolved = compensation.resolve(group["compensation"], dtype_name(parameter.dtype))
    fields = field_dtypes(group, parameter, current)
    random = codings.random_fields(rule_of(group).fields, fields, rule_of(group).decays(current))
    states = "8bit" if codings.EIGHT_BIT in fields else "stochastic" if random else "plain"
    return Storage(resolved if resolved in compensation.WITH_RANDOM_BITS else "none", states)


def follow_rows(group: Mapping[str, Any]) -> list[Tensor]:
    """Return the group's parameters whose random bits, or codes of states, are those of their rows."""
    current = hyperparameters(group)
    return [parameter for parameter in group["params"] if storage_of(group, parameter, current) != PLAIN_STORAGE]


def first_index(parameter: Tensor) -> int:
    """Return the index of the first element of this process's part in the whole tensor, row by row.

    Raises:
        RefusedError: the part does not consist of neighbouring rows.
    """
    if not is_sharded(parameter):
        return 0
    rows = rows_before(parameter)
    if rows is None:
        raise RefusedError(
            f"compensation='stochastic' or 'split8', and state_dtype='8bit' or a bfloat16 second moment, are not possible for "
            f"a parameter of shape {tuple(parameter.shape)} with placements {placements(parameter)}: they have random bits and "
            "blocks for shards along the first dimension only (fully_shard's, if not combined with tensor parallelism). Shard "
            "it so, or use 'kahan' or 'split', and state_dtype=torch.float32."
        )
    return rows * (parameter.numel() // max(1, parameter.shape[0])) if parameter.dim() else 0


def on_device(current: Hyperparameters) -> bool:
    """Whether a hyperparameter is a tensor on a device."""
    return any(isinstance(getattr(current, field), Tensor) for field in current.RANGES)


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
            "redistribute the gradient."
        )


def field_dtypes(group: Mapping[str, Any], parameter: Tensor, checked: Hyperparameters) -> codings.StateDtypes:
    """Return the dtypes of the fields of a parameter of this group."""
    rule = rule_of(group)
    shape = None if is_lazy(parameter) else parameter.shape
    return codings.state_dtypes(rule.fields, dtype_name(parameter.dtype), rule.decays(checked), _asked(group), shape=shape)


def check_stored(
    group: Mapping[str, Any], parameter: Tensor, checked: Hyperparameters, stored: codings.StateDtypes, described: str
) -> None:
    """Raise `InvalidArgumentError` if the fields of a parameter are stored in another coding than its group asks for."""
    fields, asked, expected = rule_of(group).fields, _asked(group), [field_dtypes(group, parameter, checked)]
    arguments = ["state_dtype"] * len(fields)
    dtype = dtype_name(parameter.dtype)
    codings.check_stored(fields, dtype, stored, asked, expected, arguments=arguments, described=described)


def _asked(group: Mapping[str, Any]) -> list[str | None]:
    """Return the dtypes that a group asks for, one a field."""
    given = group["state_dtype"]
    return [dtype_name(given) if isinstance(given, torch.dtype) else given] * len(rule_of(group).fields)
