"""`export_state` and `import_state`."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.errors import InvalidArgumentError, RefusedError, in_wrong_order
from ...core.portable import file as portable_file
from ...core.portable.bias import decays_in, for_decays
from ...core.portable.match import check_own, check_rules, matched
from ...core.portable.names import Names, table_of
from ...core.portable.rename import rename, rename_back
from ...core.portable.state import ParameterState, PortableGroup, PortableState, listed, scale_name
from ..backends.backend import scale_key
from ..communication.shards import is_sharded
from ..groups import Group
from ..state import RANDOM_KEY
from .arrays import fill, holds, to_array
from .layouts import OwnLayout, layout_of
from .naming import named_groups
from .ranks import together, writes
from .settings import assign, candidate, group_settings, portable_settings


def export_state(
    path: str | os.PathLike[str],
    optimizer: Optimizer,
    model: nn.Module,
    *,
    parameters: bool = False,
    names: Names = None,
) -> None:
    r"""Write the state of an optimizer to a file that both frameworks read; an earlier file is replaced when all is written.

    The file holds of every parameter the debiased moments, the compensation and the number of updates, bit for bit; a
    parameter that was never updated has zeros. torch.optim's moments are biased. They are divided in float64,

        exp_avg / (1-beta1^t)        exp_avg_sq / (1-beta2^t)

    and rounded to the dtypes in which this package keeps them: so not bit for bit.

    Args:
        path: of the file to write.
        optimizer: of this package, `torch.optim.AdamW` or `torch.optim.Adam`.
        model: that it trains; parameters are called as in `model.named_parameters()`, without the names of wrappers (compiled,
            DistributedDataParallel). Sharded parameters (FSDP2, DTensor) are gathered one by one: every process must call this,
            and the first writes. Of a replicated model one process calls it.
        parameters: write the optimizer's parameters, too. Buffers, and parameters that the optimizer does not have, are in the
            model's own checkpoint only.
        names: from the names here to those in the file: a mapping, or a function; see `core.portable.names`.

    Raises:
        RefusedError: in the middle of a step under release; amsgrad; the file cannot be written.
        InvalidArgumentError: the optimizer has no portable state, or parameters that are not the model's; a name that does not
            fit.
    """
    sharded = _sharded(optimizer)
    layout, named = together(
        sharded,
        lambda: _opened("export_state()", path, optimizer, model),
        same=lambda opened: (_told(optimizer, *opened), parameters),
    )
    alone = writes(sharded)
    entries: dict[str, ParameterState] = {}
    for group, members in zip(optimizer.param_groups, named, strict=True):
        for name, parameter in members.items():
            state = optimizer.state.get(parameter) or layout.initial(group, parameter)
            keys = layout.keys(group)
            kept = (*keys, *map(scale_key, keys), "compensation")
            arrays = {key: to_array(state[key]) for key in kept if key in state}
            if parameters:
                arrays["parameter"] = to_array(parameter)
            if alone:
                random_keys = (int(state[RANDOM_KEY]),) if RANDOM_KEY in state else ()
                entries[name] = _entry(layout, group, parameter, _step(name, state["step"]), arrays, random_keys)

    def save() -> None:
        if alone:
            groups = [
                PortableGroup((rule := layout.rule(group)).name, portable_settings(rule, group), tuple(sorted(members)))
                for group, members in zip(optimizer.param_groups, named, strict=True)
                if members
            ]
            state = PortableState(tuple(groups), entries)
            portable_file.save(path, rename(state, table_of(names, list(entries))))

    together(sharded, save)


def import_state(
    path: str | os.PathLike[str],
    optimizer: Optimizer,
    model: nn.Module,
    *,
    parameters: bool = False,
    hyperparameters: bool = False,
    names: Names = None,
) -> None:
    r"""Put a state that `export_state`, of either frontend, has written into an optimizer. All of it is checked first.

    Training goes on bit for bit where the file came from this package in PyTorch. Moments of a lower dtype than the
    optimizer's are widened, which is exact; a parameter that the file has without compensation begins with nothing to make
    up for. For torch.optim the moments are multiplied by 1-beta^t in float64, and rounded to the parameter's dtype. Where the
    optimizer has other betas than the file, training goes on as if its betas had changed at this moment.

    Args:
        path: of the file. Every process that trains the model reads it.
        optimizer: as for `export_state`, with the file's rules; its state is replaced. A CUDA graph that was captured before
            holds the old one: capture the step again.
        model: that it trains. Each process takes its part of sharded parameters.
        parameters: take the parameters from the file, too. Otherwise load the model's checkpoint *of the same moment*: a
            compensation holds the lost digits of just those values.
        hyperparameters: set the groups' lr, betas, eps, weight_decay, decouple_lr, max_lr and maximize to those in the file. A
            scheduler has its own state, and writes lr again.
        names: from the names here to those in the file, as for `export_state`.

    Raises:
        InvalidArgumentError: the file is damaged, or is not of these rules, model, dtypes or compensation; nothing was changed.
        RefusedError: in the middle of a step under release; another process failed; nothing was changed.
    """
    sharded = _sharded(optimizer)

    def prepare() -> tuple[list[tuple[Tensor, dict[str, Tensor], np.ndarray | None]], list[dict[str, Any]], OwnLayout]:
        if torch.is_inference_mode_enabled():
            raise RefusedError(
                "import_state() under torch.inference_mode() would make tensors that no step can update; leave it."
            )
        layout, named = _opened("import_state()", path, optimizer, model)
        table = table_of(names, [name for members in named for name in members])
        state = rename_back(portable_file.load(path), table)
        rules = [layout.rule(group) for group in optimizer.param_groups]
        check_rules(state, {name: rule for rule, members in zip(rules, named, strict=True) for name in members})
        settings: list[dict[str, Any]] = [{} for _ in named]
        if hyperparameters:
            settings = [
                group_settings(rule, state.groups, members, number)
                for number, (rule, members) in enumerate(zip(rules, named, strict=True))
            ]
        groups = [candidate(rule, group, new) for rule, group, new in zip(rules, optimizer.param_groups, settings, strict=True)]
        for group in groups:
            layout.check(group)
        placed = {name: (group, p) for group, members in zip(groups, named, strict=True) for name, p in members.items()}
        expected = {name: layout.expected(group, parameter) for name, (group, parameter) in placed.items()}
        entries = matched(state, expected, parameters=parameters)
        ready = []
        for name, (group, parameter) in placed.items():
            entry = for_decays(entries[name], decays_in(state, name), layout.decays(group))
            check_own(name, entry, functools.partial(holds, parameter), parameters=parameters)
            new_state = layout.new_state(group, name, parameter, entry)
            ready.append((parameter, new_state, entry.parameter if parameters else None))
        return ready, settings, layout

    ready, settings, layout = together(sharded, prepare, same=lambda prepared: prepared[1])
    for group, new in zip(optimizer.param_groups, settings, strict=True):
        assign(group, new)
    for parameter, new_state, array in ready:
        optimizer.state[parameter] = new_state
        if array is not None:
            fill(parameter, array)
    for group in optimizer.param_groups:
        layout.imported(group)


def _sharded(optimizer: Optimizer) -> bool:
    return any(is_sharded(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _opened(call: str, path: Any, optimizer: Optimizer, model: nn.Module) -> tuple[OwnLayout, list[dict[str, Tensor]]]:
    """Return the layout of the optimizer's state, and its parameters by group and name."""
    if isinstance(path, (Optimizer, nn.Module)) or isinstance(optimizer, nn.Module) or isinstance(model, Optimizer):
        raise in_wrong_order(path=path, optimizer=optimizer, model=model)
    layout = layout_of(optimizer)
    layout.require_closed(call)
    named = named_groups(optimizer, model)
    for group, members in zip(optimizer.param_groups, named, strict=True):
        keys = {"step", *layout.keys(group)}
        for name, parameter in members.items():
            if parameter.is_meta:
                raise InvalidArgumentError(
                    f"parameter {name!r} is on the meta device, without values; materialise the model first."
                )
            state = optimizer.state.get(parameter)
            if state and (missing := keys - state.keys()):
                raise InvalidArgumentError(
                    f"the optimizer's state of {name!r} has no {listed(sorted(missing))}; give the optimizer that updates it."
                )
    return layout, named


def _step(name: str, step: Any) -> int:
    if not float(step).is_integer():
        raise InvalidArgumentError(f"step of {name!r} is {float(step)} in the optimizer; it must be a whole number.")
    return int(step)


def _told(optimizer: Optimizer, layout: OwnLayout, named: list[dict[str, Tensor]]) -> Any:
    """What the processes with parts of one model have in common."""
    return [
        (layout.rule(group).name, [(name, tuple(parameter.shape)) for name, parameter in members.items()])
        for group, members in zip(optimizer.param_groups, named, strict=True)
    ]


def _entry(
    layout: OwnLayout, group: Group, parameter: Tensor, step: int, arrays: dict[str, np.ndarray], keys: tuple[int, ...]
) -> ParameterState:
    expected = layout.expected(group, parameter)
    names = dict(zip(layout.keys(group), expected.fields, strict=True))
    fields = {name: arrays.pop(key) for key, name in names.items()}
    fields |= {scale_name(name): arrays.pop(scale_key(key)) for key, name in names.items() if scale_key(key) in arrays}
    debiased = layout.debiased(group, parameter, fields, step)
    return ParameterState(
        dtype=expected.dtype,
        shape=expected.shape,
        compensated=expected.compensated,
        step=step,
        fields=debiased,
        random_keys=keys,
        **arrays,
    )
