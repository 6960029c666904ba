"""The hyperparameters of a group, to and from the names of `core.hyperparameters.Hyperparameters`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ...core.errors import InvalidArgumentError
from ...core.portable.state import PortableGroup, Settings
from ...core.rules import Rule
from ..groups import Group, own_values


def portable_settings(rule: Rule, group: Mapping[str, Any]) -> Settings:
    """The hyperparameters as they are now; waits for the device where they are tensors."""
    decoupled, own = bool(group.get("decouple_lr", False)), own_values(rule, group)
    return {
        "learning_rate": float(group["lr"]),
        **{name: float(own[name]) if name in rule.hyperparameters.RANGES else own[name] for name in own},
        "weight_decay": float(group["weight_decay"]),
        "decouple_lr": decoupled,
        "max_lr": float(group["max_lr"]) if decoupled else None,
        "maximize": bool(group["maximize"]),
    }


def group_settings(rule: Rule, groups: Collection[PortableGroup], names: Collection[str], number: int) -> dict[str, Any]:
    """The settings of group `number`, by torch's names, from the groups of a state.

    Raises:
        InvalidArgumentError: the state has none, or several for the parameters called `names`.
    """
    found = [group.hyperparameters for group in groups if not set(names).isdisjoint(group.parameters)]
    if any(other != found[0] for other in found):
        raise InvalidArgumentError(
            f"the parameters of group {number} have different hyperparameters in the state; construct the optimizer with its "
            f"{len(groups)} groups, or import with hyperparameters=False."
        )
    given = found[0] if found else {}
    constants = rule.hyperparameters.CONSTANTS  # of which one may be None
    needed = ("learning_rate", *rule.own_hyperparameters, "weight_decay")
    missing = [name for name in needed if name not in given or (given[name] is None and name not in constants)]
    if names and missing:
        raise InvalidArgumentError(
            f"the state does not hold {', '.join(missing)} of group {number}: who exported it could not know them; import with "
            "hyperparameters=False, and set them."
        )
    return _torch_settings(rule, given) if names else {}


def _torch_settings(rule: Rule, given: Settings) -> dict[str, Any]:
    own = rule.own_hyperparameters
    betas = tuple(given[name] for name in own if name.startswith("beta"))
    settings: dict[str, Any] = {
        "lr": given["learning_rate"],
        **({"betas": betas} if betas else {}),
        **{name: given[name] for name in own if not name.startswith("beta")},
        "weight_decay": given["weight_decay"],
        "decouple_lr": bool(given.get("decouple_lr")),
        "maximize": bool(given.get("maximize")),
    }
    if settings["decouple_lr"]:
        settings["max_lr"] = given.get("max_lr")
    return settings


def candidate(rule: Rule, group: Group, settings: Mapping[str, Any]) -> Group:
    """A copy of a group with other settings, to be looked at before the group is changed."""
    return {"rule": rule.name, "decouple_lr": False, "max_lr": None, **group, **settings}


def assign(group: Group, settings: Mapping[str, Any]) -> None:
    """Change those settings that the group has. Tensors stay the tensors they are: a CUDA graph may read them."""
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        elif key == "betas":
            group[key] = tuple(_filled(part, new) for part, new in zip(group[key], value, strict=True))
        elif key in group:
            group[key] = value


def _filled(old: Any, value: float) -> Any:
    return old.fill_(value) if isinstance(old, Tensor) else value
