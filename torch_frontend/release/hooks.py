"""The hooks of a release: registered on parameters, checked for when no gradient comes, and removed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...core.errors import RefusedError
from ..communication.shards import is_released, is_sharded

_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The pipeline of each released parameter, by the parameter's id; the pipeline keeps the parameter alive."""


class Hooks:
    """One hook on each released parameter, which autograd calls once the gradient is in `.grad`.

    The hook calls `owner.arrive(parameter)`; that of a parameter outside the model, which step() updates, calls
    `owner.check_outside(parameter)`. It holds the owner weakly, and no parameter, as Python's garbage collector cannot see a
    cycle through a hook.
    """

    def __init__(self, owner: Any, model: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._model = weakref.ref(model)
        self._handles: dict[Tensor, Any] = {}
        self._outside: dict[Tensor, Any] = {}
        self._names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
        self._all: list[int] = []  # ids of the optimizer's parameters at the last `attach`
        self.without: list[Tensor] = []  # of these, the parameters without a hook

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once nobody else holds it."""
        return self._model()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters with a hook, in the optimizer's order."""
        return list(self._handles)

    def attach(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """Register hooks on the parameters that belong to the model, require a gradient, and have none yet.

        Parameters with a hook that are not among these any more lose it.

        Returns:
            The parameters that got a hook; None if there was nothing to do.
        """
        given = list(parameters)
        if [*map(id, given)] == self._all and not any(parameter.requires_grad for parameter in self.without):
            return None
        model = self.model
        if model is None:
            return None
        names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
        hooked = {id(parameter) for parameter in self._handles}
        fresh = [p for p in given if p.requires_grad and id(p) in names and id(p) not in hooked and not is_lazy(p)]
        wanted = set(map(id, given))
        for parameter in [parameter for parameter in self._handles if id(parameter) not in wanted]:
            self._handles.pop(parameter).remove()
            _OWNERS.pop(id(parameter), None)
        remove_orphaned_hooks(fresh)
        hook: Any = torch.compiler.disable(functools.partial(_on_gradient, self._owner))
        hook.released_by = self._owner  # so that the hook is found on its parameters once the optimizer is gone
        for parameter in fresh:
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
            self._names[id(parameter)] = names[id(parameter)]
            _OWNERS[id(parameter)] = self._owner()
        for parameter in [parameter for parameter in self._outside if id(parameter) not in wanted]:
            self._outside.pop(parameter).remove()
        check = torch.compiler.disable(functools.partial(_check_outside, self._owner))
        for parameter in given:
            if parameter.requires_grad and id(parameter) not in names and parameter not in self._outside:
                self._outside[parameter] = parameter.register_post_accumulate_grad_hook(check)
        self._handles = {p: self._handles[p] for p in given if p in self._handles}
        self._all, self.without = [*map(id, given)], [p for p in given if p not in self._handles]
        return fresh

    def remove(self) -> None:
        """Remove all hooks."""
        for parameter, handle in self._handles.items():
            handle.remove()
            _OWNERS.pop(id(parameter), None)
        for handle in self._outside.values():
            handle.remove()
        self._handles.clear()
        self._outside.clear()

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Raise `RefusedError` if a parameter was replaced in the model or has lost its hook, and so is never updated.

        Args:
            parameters: had a hook, and no gradient has come.
        """
        suspects, model = list(parameters), self.model
        if not suspects or model is None:
            return
        now = dict(model.named_parameters())
        for parameter in suspects:
            name = self._names.get(id(parameter))
            gathered = name in now and is_sharded(parameter) and not is_sharded(now[name])  # FSDP2 shows the whole one now
            if name in now and now[name] is not parameter and not gathered:
                raise RefusedError(
                    f"parameter {name!r} of the model was replaced after release_gradients (load_state_dict(assign=True), "
                    "to_empty, fully_shard, an assignment): the optimizer still holds the old one. Call release.remove(), "
                    "construct the optimizer from the new parameters, and call release_gradients again."
                )
            if self._handles[parameter].id not in (getattr(parameter, "_post_accumulate_grad_hooks", None) or ()):
                raise self.lost(parameter)

    def lost(self, parameter: Tensor) -> RefusedError:
        """The error for a parameter whose hook did not run."""
        return RefusedError(
            f"{self.describe(id(parameter))} has lost its hook since release_gradients (somebody removed it, or a conversion "
            "swapped the contents of parameters): nothing releases its gradient. Call release.remove() and release_gradients "
            "again."
        )

    @property
    def describe(self) -> Callable[[int], str]:
        """A function from a parameter's id to its name in errors; it holds neither the release nor a parameter."""
        names = self._names
        return lambda key: f"parameter {names[key]!r}" if key in names else "a parameter that the model does not name"


def _on_gradient(reference: weakref.ref[Any], parameter: Tensor) -> None:
    owner = reference()
    if owner is None:
        parameter.grad = None
        raise RefusedError(
            "the optimizer that released this model's gradients no longer exists, so nothing would update the parameters. "
            "Keep the optimizer as long as the model trains; or call remove_gradient_release(model), or release_gradients with "
            "another optimizer."
        )
    owner.arrive(parameter)


def _check_outside(reference: weakref.ref[Any], parameter: Tensor) -> None:
    owner = reference()
    if owner is not None:
        owner.check_outside(parameter)


def owner_of(parameter: Tensor) -> Any:
    """The pipeline of this parameter, or None if its gradient is not released."""
    return _OWNERS.get(id(parameter))


def check_ownership(parameters: Iterable[Tensor]) -> None:
    """Raise `RefusedError` if one of these parameters is released."""
    if any(owner_of(parameter) is not None for parameter in parameters):
        raise RefusedError("a parameter is in another optimizer's release already; call remove() on that release first.")


def remove_orphaned_hooks(parameters: Iterable[Tensor]) -> bool:
    """Remove the hooks and markers of releases whose optimizer no longer exists; return whether there were any."""
    found = False
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        owners = {key: getattr(hook, "released_by", None) for key, hook in hooks.items()}
        orphaned = [key for key, owner in owners.items() if isinstance(owner, weakref.ref) and owner() is None]
        for key in orphaned:
            del hooks[key]
        if orphaned and is_released(parameter.grad):
            parameter.grad = None
        found = found or bool(orphaned)
    return found
