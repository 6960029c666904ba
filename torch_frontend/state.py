"""Saving and loading: state tensors keep their dtype, and a state that does not fit is refused before any change."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ..core import compensation
from ..core.codings import EightBit, StateDtypes, check_codes
from ..core.codings.eight_bit import scale_shape
from ..core.errors import InvalidArgumentError, RefusedError
from ..core.hyperparameters import Hyperparameters
from ..core.precision import name_of
from ..core.rules import RULES, Rule, adam_family
from ..core.update import init_state
from .array_ops import dtype_name, torch_ops
from .backends.backend import dtypes_in, scale_key, state_keys
from .checks import check_group, check_stored
from .communication.shards import is_sharded, placements, with_rows_of
from .groups import field_dtypes, hyperparameters, rule_of, settings_of

RANDOM_KEY = "random_key"
"""The key in a parameter's state for the one of its random bits (`core.random_bits`), an int."""


def required_keys(rule: Rule) -> tuple[str, ...]:
    """Return the keys of every parameter group of penstock's optimizers with this rule; earlier versions had no "rule"."""
    return (*settings_of(rule), "compensation", "state_dtype", "capturable")


def keys_per_element(rule: Rule) -> tuple[str, ...]:
    """Return the keys of a parameter's state whose tensors have its shape."""
    return (*state_keys(rule), "compensation")


def keys_of_tensors(rule: Rule) -> tuple[str, ...]:
    """Return the keys of a parameter's state that `restore_tensors` restores: `keys_per_element`, and those of scales."""
    return (*keys_per_element(rule), *map(scale_key, state_keys(rule)))


def initial_state(group: Mapping[str, Any], parameter: Tensor, current: Hyperparameters) -> dict[str, Tensor]:
    """Return the state of a parameter before its first update: zeros with the parameter's memory layout.

    Args:
        group: of the parameter.
        current: its validated hyperparameters.
    """
    name = dtype_name(parameter.dtype)
    compensated = compensation.resolve(group["compensation"], name)
    fresh = init_state(torch_ops, rule_of(group), parameter, field_dtypes(group, parameter, current), compensated)
    place = parameter.device if group["capturable"] else "cpu"
    state = {"step": torch.zeros((), dtype=torch.float32, device=place)}
    for key, field in zip(state_keys(rule_of(group)), fresh.fields, strict=True):
        if isinstance(field, EightBit):
            state |= {key: field.codes, scale_key(key): with_rows_of(parameter, field.scale)}
        else:
            state[key] = field
    return state if fresh.compensation is None else {**state, "compensation": fresh.compensation}


def check_fits(group: Mapping[str, Any], current: Hyperparameters, state: Mapping[str, Any], parameter: Tensor) -> None:
    """Raise if the parameter was converted, resized or moved to another device, or its group's storage changed, after its state
    was made.

    Args:
        group, state: of the parameter.
        current: the group's validated hyperparameters.

    Raises:
        RefusedError, InvalidArgumentError.
    """
    rule, name = rule_of(group), dtype_name(parameter.dtype)
    if missing := [key for key in state_keys(rule) if key not in state]:
        raise RefusedError(
            f"the state of a parameter of shape {tuple(parameter.shape)} has no {', '.join(missing)}, which {rule.name} keeps: "
            "the key 'rule' of its group changed, or the state was replaced. Set it back, or construct another optimizer."
        )
    kept = state.get("compensation")
    has = None if kept is None else dtype_name(kept.dtype)
    shape = next((state[key].shape for key in state_keys(rule)), parameter.shape)
    elsewhere = {value.device for key, value in state.items() if key != "step" and isinstance(value, Tensor)} - {
        parameter.device
    }
    if elsewhere:
        raise RefusedError(
            f"the state of a parameter of shape {tuple(parameter.shape)} is on {elsewhere.pop()}, and the parameter on "
            f"{parameter.device}: it was on the former in its first step, or in load_state_dict(), which puts the state where "
            "the parameter is. Move the model before the first step; with block swapping, call load_state_dict() while each "
            "block is on the device where its gradients come."
        )
    if has == compensation.compensation_dtype(compensation.resolve(group["compensation"], name), name) and (
        shape == parameter.shape
    ):
        check_stored(group, parameter, current, dtypes_in(state_keys(rule), state), f"a parameter of shape {tuple(shape)}")
        _check_codes(rule, state, f"a parameter of shape {tuple(shape)}")
        return
    raise RefusedError(
        f"the state of a parameter of shape {tuple(parameter.shape)} and dtype {name} is of shape {tuple(shape)} and "
        f"has {'no compensation' if has is None else f'a compensation of dtype {has}'}: the "
        "model was converted or resized, or compensation= of the group changed, after the first step. Convert the model "
        "first and construct the optimizer (and the release) then; export_state and import_state carry its moments over."
    )


def sendable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state_dict with int16 shards as int32, so that `full_state_dict=True` works.

    torch.distributed does not send int16, the dtype of the "split" compensation. `restore_tensors` converts the values back.
    """
    states = dict(state_dict["state"])
    for index, state in states.items():
        kept = state.get("compensation")
        if is_sharded(kept) and kept.dtype is torch.int16:
            states[index] = {**state, "compensation": kept.to(torch.int32)}
    return {**state_dict, "state": states}


def with_present_keys(of_optimizer: str, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict of this or an earlier version, which called debiased fields by their names, with present keys.

    Earlier versions did not save the rule of a group, which is `of_optimizer` then.
    """
    present: dict[Any, dict[str, str]] = {}
    for group in state_dict.get("param_groups") or ():
        if (rule := RULES.get(group.get("rule", of_optimizer))) is not None:
            keys = {field.name: key for field, key in zip(rule.fields, state_keys(rule), strict=True)}
            present |= dict.fromkeys(group.get("params", ()), keys)
    states = state_dict.get("state") or {}
    renamed = {i: {present.get(i, {}).get(key, key): value for key, value in state.items()} for i, state in states.items()}
    return {**state_dict, "state": renamed} if "state" in state_dict else dict(state_dict)


def _saved_dtype(key: str, value: Tensor) -> torch.dtype:
    """Return the dtype of a saved tensor: int16 for one that `sendable` has made int32."""
    return torch.int16 if key == "compensation" and value.dtype is torch.int32 else value.dtype


def check_loadable(state_dict: Mapping[str, Any], groups: list[dict[str, Any]], asked: Set[str] = frozenset()) -> None:
    """Raise `InvalidArgumentError` if `state_dict` is not of a penstock optimizer, or not of these parameters.

    `asked` names the settings of storage that the optimizer was given: the checkpoint's may not differ from those.

    Moments in torch.optim are debiased when they are used; penstock's are stored debiased. Loading one as the other would be
    wrong without an error, so the state of another optimizer is refused.
    """
    saved_groups = state_dict.get("param_groups")
    states = state_dict.get("state")
    if saved_groups is None or states is None:
        raise InvalidArgumentError(
            "state_dict has no 'param_groups' and 'state'; give what an optimizer's state_dict() returned."
        )
    rules = list(map(rule_of, groups))
    for number, (saved, rule) in enumerate(zip(saved_groups, rules, strict=False)):
        _check_rule(rule, saved, f"parameter group {number} of state_dict")
    if any(key not in saved for saved, rule in zip(saved_groups, rules, strict=False) for key in required_keys(rule)):
        raise InvalidArgumentError(
            "state_dict comes from another optimizer than penstock's: its moments are debiased elsewhere. Load it into "
            "that optimizer, and take its state over with export_state and import_state, or a checkpoint of Transformers' "
            "Trainer with convert_checkpoint of penstock.torch_frontend.integrations.transformers; or start with fresh state."
        )
    if len(saved_groups) != len(groups):
        raise InvalidArgumentError(
            f"state_dict has {len(saved_groups)} parameter groups, the optimizer has {len(groups)}; construct it as the "
            "saved one was."
        )
    for number, (saved, group, rule) in enumerate(zip(saved_groups, groups, rules, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise InvalidArgumentError(
                f"parameter group {number} of state_dict has {len(saved['params'])} parameters, the optimizer's has "
                f"{len(group['params'])}; construct it as the saved one was."
            )
        loaded = {"rule": rule.name, **saved, "params": group["params"]}
        check_group(loaded)
        _check_storage(group, loaded, number, asked)
        current = hyperparameters(loaded)
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            described = f"parameter {index} of group {number}"
            expected = compensation.resolve(saved["compensation"], dtype_name(parameter.dtype))
            state = states.get(index, {})
            _check_tensor_state(rule, state, parameter, expected, described)
            if state:
                check_stored(loaded, parameter, current, dtypes_in(state_keys(rule), state), described)


def _check_rule(rule: Rule, saved: Mapping[str, Any], described: str) -> None:
    """Raise `InvalidArgumentError` if a saved group is of another rule, or of an earlier version, which had Adam's alone."""
    other = saved.get("rule", rule.name)
    said = f"{described} is of the rule {other!r}, the optimizer's is of {rule.name!r}"
    if other == rule.name:
        if "rule" in saved or "compensation" not in saved or adam_family.is_member(rule):
            return
        said = f"{described} is of an earlier version, which did not have {rule.name!r}"
    same_fields = other != rule.name and other in RULES and RULES[other].fields == rule.fields
    convert = "take its moments over with export_state, penstock convert --rule and import_state"
    raise InvalidArgumentError(
        f"{said}; construct the optimizer that was saved, or {convert if same_fields else 'start afresh'}."
    )


def _check_storage(group: Mapping[str, Any], loaded: Mapping[str, Any], number: int, asked: Set[str]) -> None:
    """Raise `InvalidArgumentError` if a group asks for another storage than the saved one, whose settings it would get."""
    for name, default in (("compensation", "auto"), ("state_dtype", None)):
        if (name in asked or group[name] != default) and _kept({**loaded, name: group[name]}) != _kept(loaded):
            saved, own = loaded[name], group[name]
            presets = [name_of(each["compensation"], each["state_dtype"]) for each in (loaded, group)]
            if all(presets):
                name, (saved, own) = "precision", presets
            raise InvalidArgumentError(
                f"parameter group {number} of state_dict has {name}={saved!r}, the optimizer's has {name}={own!r}; construct "
                "it with the former, or with neither compensation, state_dtype nor precision; or take its moments over with "
                "export_state and import_state, which upcast and never round; penstock convert --encode does."
            )


def _kept(group: Mapping[str, Any]) -> list[tuple[str, StateDtypes]]:
    """Return the compensation, and the dtypes of the fields, of each parameter of a group."""
    current = hyperparameters(group)
    return [
        (compensation.resolve(group["compensation"], dtype_name(parameter.dtype)), field_dtypes(group, parameter, current))
        for parameter in group["params"]
    ]


def _check_tensor_state(rule: Rule, state: Mapping[str, Any], parameter: Tensor, expected: str, described: str) -> None:
    kept = state.get("compensation")
    has = None if kept is None else dtype_name(_saved_dtype("compensation", kept))
    wants = compensation.compensation_dtype(expected, dtype_name(parameter.dtype))
    if state and has != wants:
        raise InvalidArgumentError(
            f"the compensation of {described} is {has} in state_dict, and a parameter of dtype {dtype_name(parameter.dtype)} "
            f"needs {wants}; load it into a model of the dtype that it was saved with."
        )
    for key in keys_per_element(rule):
        value: Tensor | None = state.get(key)
        coded = value is not None and key != "compensation" and value.dtype in (torch.int8, torch.uint8)
        if coded != (scale_key(key) in state) or (coded and state[scale_key(key)].shape != scale_shape(parameter.shape)):
            raise InvalidArgumentError(
                f"{key} of {described} has dtype {value.dtype if value is not None else None} in state_dict, which does not go "
                f"with its scales (of 8 bits) under {scale_key(key)}: they are missing, too many or of another shape. The file "
                "is damaged."
            )
        if value is not None and value.shape != parameter.shape:
            raise InvalidArgumentError(
                f"{key} of {described} has shape {tuple(value.shape)} in state_dict, the parameter has "
                f"{tuple(parameter.shape)}; load the state of this model."
            )
        if value is not None and placements(value) != placements(parameter):
            raise InvalidArgumentError(
                f"{key} of {described} has placements {placements(value) or 'none'} in state_dict, the parameter "
                f"{placements(parameter) or 'none'}; load it with torch.distributed.checkpoint.state_dict's "
                "set_optimizer_state_dict, which distributes it."
            )
    missing = ", ".join(key for key in ("step", *state_keys(rule)) if key not in state)
    if state and missing:
        raise InvalidArgumentError(f"the state of {described} lacks {missing}; the file is damaged or of another optimizer.")
    _check_codes(rule, state, described)


def _check_codes(rule: Rule, state: Mapping[str, Any], described: str) -> None:
    for key, field in zip(state_keys(rule), rule.fields, strict=True):
        if (scale := state.get(scale_key(key))) is not None:
            check_codes(field, dtype_name(state[key].dtype), dtype_name(scale.dtype), described)


def restore_tensors(saved: Mapping[str, Any], groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Restore the dtypes of saved tensors, which torch casts to the parameter's, and make step numbers tensors."""
    for saved_group, group in zip(saved["param_groups"], groups, strict=True):
        for index, parameter in zip(saved_group["params"], group["params"], strict=True):
            step = state[parameter].get("step") if parameter in state else None
            if step is not None and not isinstance(step, Tensor):  # as torch's optimizers accept it
                place = parameter.device if group["capturable"] else "cpu"
                state[parameter]["step"] = torch.tensor(float(step), dtype=torch.float32, device=place)
            for key in keys_of_tensors(rule_of(group)):
                value = saved["state"].get(index, {}).get(key)
                if not isinstance(value, Tensor):
                    continue
                dtype = _saved_dtype(key, value)
                if state[parameter][key].dtype != dtype:
                    like = parameter if value.shape == parameter.shape else state[parameter][key]
                    layout = torch.empty_like(like, dtype=dtype, memory_format=torch.preserve_format)
                    state[parameter][key] = layout.copy_(value)
