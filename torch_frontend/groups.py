"""Parameter groups: the hyperparameters that are read from them at every call, and how they say their parameters are stored."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..core import codings, compensation
from ..core.errors import InvalidArgumentError, RefusedError
from ..core.hyperparameters import DECAY, Hyperparameters
from ..core.rules import RULES, Rule
from .array_ops import dtype_name
from .communication.shards import is_sharded, placements, rows_before

NAMES = {"learning_rate": "lr", **{f"beta{number}": f"betas[{number - 1}]" for number in (1, 2, 3)}}
"""The names of hyperparameters in torch."""

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


def plain_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what the numbers of an update depend on besides tensors, by name: numbers and strings, which processes compare."""
    return {
        f"param_groups[{index}][{key!r}]": _plain(group.get(key))
        for index, group in enumerate(groups)
        for key in ("rule", *settings_of(rule_of(group)), "compensation", "state_dtype", "seed")
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value if isinstance(value, bool | int | float) else str(value)


def complete_group(group: Group, given: Collection[str], of_optimizer: Rule) -> None:
    """Give a group that names its rule the settings that rule has, and choose the row of the rule that they ask for.

    Its own settings that were not given are those of the optimizer, or, for another rule than the optimizer's, the rule's
    defaults. Common ones (lr, weight_decay) are the optimizer's.

    Args:
        group: as torch has completed it.
        given: the keys that the user gave.
        of_optimizer: its class's rule.
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
        learning_rate=number_in("lr", group["lr"]),
        weight_decay=number_in("weight_decay", group["weight_decay"]),
        decouple_lr=group["decouple_lr"],
        max_lr=number_in("max_lr", group["max_lr"]) if group["decouple_lr"] else None,
        maximize=group["maximize"],
        names=NAMES,
    )


def own_values(rule: Rule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `Rule.own_hyperparameters` in a group: numbers, also for tensors on the CPU."""
    betas = iter(_betas(rule, group))
    values = {name: next(betas) if name.startswith("beta") else group[name] for name in rule.own_hyperparameters}
    return {name: number_in(NAMES.get(name, name), value) for name, value in values.items()}


def _betas(rule: Rule, group: Mapping[str, Any]) -> Sequence[Any]:
    """Return the betas of a group; none for a rule without them."""
    count = sum(name.startswith("beta") for name in rule.own_hyperparameters)
    betas = group["betas"] if count else ()
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        many = "a pair of numbers" if count == 2 else f"{count} numbers"
        raise InvalidArgumentError(f"betas={betas!r} must be {many}, each in {DECAY}.")
    return betas


def number_in(name: str, value: Any) -> Any:
    """Return the number in a tensor or an array; a tensor on a device is returned as it is.

    A setting that is not a number is returned so that a change is seen, and as `core` spells it: a tuple for a list, a dtype's
    name.
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


def on_device(current: Hyperparameters) -> bool:
    """Whether a hyperparameter is a tensor on a device."""
    return any(isinstance(getattr(current, field), Tensor) for field in current.RANGES)


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


def fingerprint(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a value that changes exactly when a setting of the group does; it never synchronises."""
    rule = rule_of(group)
    betas = tuple(_seen(f"betas[{index}]", beta) for index, beta in enumerate(_betas(rule, group)))
    return tuple(betas if name == "betas" else _seen(name, group[name]) for name in settings_of(rule))


def _seen(name: str, value: Any) -> Any:
    """Return a setting's value, or the tensor and its version for a tensor on a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return SeenTensor(value, value._version)
    return number_in(name, value)


def changed_settings(before: tuple[Any, ...], group: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ from an earlier fingerprint."""
    pairs = zip(settings_of(rule_of(group)), before, fingerprint(group), strict=True)
    return [name for name, old, new in pairs if old != new]


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


def field_dtypes(group: Mapping[str, Any], parameter: Tensor, checked: Hyperparameters) -> codings.StateDtypes:
    """Return the dtypes of the fields of a parameter of this group."""
    rule = rule_of(group)
    shape = None if is_lazy(parameter) else parameter.shape
    return codings.state_dtypes(
        rule.fields, dtype_name(parameter.dtype), rule.decays(checked), asked_dtypes(group), shape=shape
    )


def asked_dtypes(group: Mapping[str, Any]) -> list[str | None]:
    """Return the dtypes that a group asks for, one a field."""
    given = group["state_dtype"]
    return [dtype_name(given) if isinstance(given, torch.dtype) else given] * len(rule_of(group).fields)


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
