"""The hooks of a release: put on parameters, found again, missed when they are gone, and taken off."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.errors import Refused
from ..communication.shards import is_sharded

if TYPE_CHECKING:
    from .release import Release

_ACTIVE: weakref.WeakSet[Release] = weakref.WeakSet()
"""Every release in force: a parameter belongs to at most one of them."""

_HANDLES: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref[Any], Any]]] = weakref.WeakKeyDictionary()
"""The hooks on each model, and whose they are, so that they can be taken off when that optimizer is gone."""


class Hooks:
    """Two hooks on each released parameter, called inside the backward pass: `before_gradient` and `on_gradient`.

    They hold the release weakly, and no parameter: torch's collector cannot see a cycle that leads through a hook.
    """

    def __init__(self, release: Release, model: nn.Module) -> None:
        self._release = weakref.ref(release)
        self._model = weakref.ref(model)
        self._handles: dict[Tensor, Any] = {}
        self._before: list[tuple[Tensor, Any]] = []
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        _ACTIVE.add(release)

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once nobody else holds it."""
        return self._model()

    @property
    def parameters(self) -> list[Tensor]:
        """Those that have a hook, in the optimizer's order."""
        return list(self._handles)

    def numbered(self, number: int) -> Tensor:
        """The parameter that got its hooks as this one. (Swapping conversions refuse parameters with a weak reference.)"""
        return self._before[number][0]

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._handles

    def attach(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Hook those of the parameters that are the model's, require a gradient, and have no hook yet; return them.

        Those that are hooked and not among the parameters any more lose their hook.
        """
        model = self.model
        if model is None:
            return []
        parameters = dict.fromkeys(parameters)
        for parameter in [parameter for parameter in self._handles if parameter not in parameters]:
            self._handles.pop(parameter).remove()
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        fresh = [p for p in parameters if p.requires_grad and p in names and p not in self._handles]
        added: list[Any] = []
        for parameter in fresh:
            hook = torch.compiler.disable(functools.partial(_on_gradient, self._release))
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
            before = functools.partial(_before_gradient, self._release, len(self._before))
            self._before.append((parameter, parameter.register_hook(torch.compiler.disable(before))))
            self._names[parameter] = names[parameter]
            added += self._handles[parameter], self._before[-1][1]
        _HANDLES.setdefault(model, []).extend((self._release, handle) for handle in added)
        return fresh

    def remove(self) -> None:
        """Take all of them off."""
        for handle in (*self._handles.values(), *(handle for _, handle in self._before)):
            handle.remove()
        self._handles.clear()
        self._before.clear()
        model = self.model
        if model is not None:
            _HANDLES[model] = [(owner, handle) for owner, handle in _HANDLES.get(model, []) if owner is not self._release]
        release = self._release()
        if release is not None:
            _ACTIVE.discard(release)

    def check(self) -> None:
        """Raise `Refused` if parameters of the model were replaced, or hooks lost: nothing would ever update those."""
        model, release = self.model, self._release()
        if model is None or release is None:
            return
        now = dict(model.named_parameters())
        for parameter in filter(release.optimizer.holds, self._handles):
            name = self._names.get(parameter)
            gathered = name in now and is_sharded(parameter) and not is_sharded(now[name])  # FSDP2 shows the whole one now
            if name in now and now[name] is not parameter and not gathered:
                raise Refused(
                    f"parameter {name!r} of the model was replaced after release_gradients (load_state_dict(assign=True), "
                    "to_empty, fully_shard, an assignment): the optimizer still holds the old one. Call release.remove(), "
                    "construct the optimizer from the new parameters, and call release_gradients again."
                )
            self.check_one(parameter)

    def check_one(self, parameter: Tensor) -> None:
        """Raise `Refused` if the parameter has lost its hook."""
        if self._handles[parameter].id not in (getattr(parameter, "_post_accumulate_grad_hooks", None) or ()):
            raise self.lost(parameter)

    def lost(self, parameter: Tensor) -> Refused:
        """The error for a parameter whose hook did not run."""
        return Refused(
            f"{self.describe(parameter)} has lost its hook since release_gradients (somebody removed it, or a conversion "
            "swapped the contents of parameters): nothing releases its gradient. Call release.remove() and release_gradients "
            "again."
        )

    def check_ownership(self, parameters: Iterable[Tensor]) -> None:
        """Raise `Refused` if another release has one of these parameters already."""
        mine = self._release()
        for release in active_releases():
            if release is not mine and any(release.hooked(parameter) for parameter in parameters):
                raise Refused("a parameter is in another optimizer's release already; call remove() on that release first.")

    def describe(self, parameter: Tensor) -> str:
        """How an error names it."""
        name = self._names.get(parameter)
        return f"parameter {name!r}" if name else f"parameter of shape {tuple(parameter.shape)}"


@torch.no_grad()
def _before_gradient(reference: weakref.ref[Release], number: int, gradient: Tensor) -> None:
    """A gradient is about to be added to what lies in `.grad`, from where a refusal could not take it out again."""
    release = _existing(reference)
    parameter = release.hooks.numbered(number)
    if parameter.grad is not None:
        release.before_gradient(parameter)


@torch.no_grad()
def _on_gradient(reference: weakref.ref[Release], parameter: Tensor) -> None:
    try:
        release = _existing(reference)
    except Refused:
        parameter.grad = None
        raise
    release.on_gradient(parameter)


def _existing(reference: weakref.ref[Release]) -> Release:
    release = reference()
    if release is None:
        raise Refused(
            "the optimizer that released this model's gradients no longer exists, so nothing would update the parameters. "
            "Keep the optimizer as long as the model trains; or call remove_gradient_release(model)."
        )
    return release


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive, and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call


def active_releases() -> list[Release]:
    """Every release in force."""
    return list(_ACTIVE)


def remove_orphaned_hooks(model: nn.Module) -> bool:
    """Take off what a release whose optimizer is gone has left on the model; whether there was anything."""
    entries = _HANDLES.get(model, [])
    orphaned = [handle for owner, handle in entries if owner() is None]
    for handle in orphaned:
        handle.remove()
    _HANDLES[model] = [(owner, handle) for owner, handle in entries if owner() is not None]
    return bool(orphaned)
