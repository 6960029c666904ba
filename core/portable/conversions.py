"""What can be made of a portable state: another rule's, one in another coding, or the same with less."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..array_ops import numpy_ops
from ..codings import EIGHT_BIT, state_dtypes
from ..codings.eight_bit import encoded, initial
from ..errors import InvalidArgumentError
from ..random_bits import bits_at, place, tensor_key, when
from ..rules import RULES, check_rule
from .state import PortableState, listed, may_have_random_keys, names_of_rules, scale_name


def with_rule(state: PortableState, rule: str) -> PortableState:
    """Return the state with another rule for all groups whose rule keeps the same fields.

    Adam's g has weight_decay*p in it, AdamW's has not: with weight decay its moments are only about theirs.

    Raises:
        InvalidArgumentError: all rules keep other fields, or the rule is not known.
    """
    check_rule(rule)
    fields = RULES[rule].fields
    same = [RULES[group.rule].fields == fields for group in state.groups]
    if state.groups and not any(same):
        raise InvalidArgumentError(
            f"the fields of {names_of_rules(state.groups)} cannot be those of {rule!r}, which keeps "
            f"{listed([field.name for field in fields]) or 'nothing'}; start that rule with a fresh state."
        )
    changed = (
        dataclasses.replace(group, rule=rule if one else group.rule) for group, one in zip(state.groups, same, strict=True)
    )
    return dataclasses.replace(state, groups=tuple(changed))


def without_compensation(state: PortableState) -> PortableState:
    """Return the state without compensation: each parameter loses up to half a spacing."""
    parameters = {}
    for name, parameter in state.parameters.items():
        dtypes = {field: array.dtype.name for field, array in parameter.fields.items()}
        keys = parameter.random_keys if may_have_random_keys(state.rules[name], "none", dtypes) else ()
        parameters[name] = dataclasses.replace(parameter, compensated="none", compensation=None, random_keys=keys)
    return dataclasses.replace(state, parameters=parameters)


def without_codes(state: PortableState) -> PortableState:
    """Return the state with the numbers that codes of 8 bits stand for, in float32: nothing is lost."""
    parameters = {}
    for name, parameter in state.parameters.items():
        rule = state.rules[name]
        new = dataclasses.replace(parameter, fields={field.name: parameter.decoded(field.name) for field in rule.fields})
        dtypes = {field: array.dtype.name for field, array in new.fields.items()}
        keys = new.random_keys if may_have_random_keys(rule, new.compensated, dtypes) else ()
        parameters[name] = dataclasses.replace(new, random_keys=keys)
    return dataclasses.replace(state, parameters=parameters)


def with_codes(state: PortableState) -> PortableState:
    """Return the state with fields in 8 bits, where an optimizer with state_dtype="8bit" has them so.

    Means of squares are rounded by chance, with random bits of their own update. An array of three or more dimensions is one
    parameter's; layers that are stacked in one array have to be split first.

    Raises:
        InvalidArgumentError: a parameter is float64, or no field of any parameter can be in 8 bits.
    """
    parameters, coded = {}, False
    for name, parameter in state.parameters.items():
        fields, known, fresh = state.rules[name].fields, dict(parameter.fields), tensor_key(0, name)
        dtypes = state_dtypes(fields, parameter.dtype, [None] * len(fields), [EIGHT_BIT] * len(fields), shape=parameter.shape)
        coded |= EIGHT_BIT in dtypes
        for number, (field, dtype) in enumerate(zip(fields, dtypes, strict=True), 1):
            if dtype == EIGHT_BIT and scale_name(field.name) not in known:
                key = parameter.random_keys[0] if parameter.random_keys else fresh
                index = np.arange(math.prod(parameter.shape)).reshape(parameter.shape)
                bits = bits_at(place(key, when(parameter.step, number)), index)
                like = initial(numpy_ops, field, known[field.name])
                codes, scale = encoded(numpy_ops, known[field.name].astype(np.float32), like, bits)
                known |= {field.name: codes, scale_name(field.name): scale}
        parameters[name] = dataclasses.replace(parameter, fields=known)
    if not coded:
        raise InvalidArgumentError("no field of the state can be in 8 bits: those of large matrices can; leave it as it is.")
    return dataclasses.replace(state, parameters=parameters)


def without_parameters(state: PortableState) -> PortableState:
    """Return the state without parameters."""
    parameters = {name: dataclasses.replace(parameter, parameter=None) for name, parameter in state.parameters.items()}
    return dataclasses.replace(state, parameters=parameters)
