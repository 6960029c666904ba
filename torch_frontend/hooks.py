"""A release in force: hooks that perform the optimizer's step for a parameter the moment its gradient exists.

What is done at every event is decided by `core.release`; here it is carried out. A hook runs inside the backward pass: ask
the state machine, perform the action, free the gradient, book it in the ledger.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InvalidArgument, NonFiniteGradient, Refused
from ..core.release import Action, Decision, Event, GradientReady, Ledger, Policy, Status, Step, ZeroGrad, decide
from .backward_pass import current_pass
from .clipping import clip_by_norm_, clip_coefficient, gradient_norm, total_norm
from .groups import changed_settings, check_gradient, fingerprint
from .guard import guarded, leaves_of, without_gradients
from .optimizers import ReleasableOptimizer, all_finite

_ACTIVE: weakref.WeakSet[Release] = weakref.WeakSet()
"""Every release in force: a parameter belongs to at most one of them."""

_HANDLES: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref[Release], Any]]] = weakref.WeakKeyDictionary()
"""The hooks on each model, and whose they are, so that they can be taken off when that optimizer is gone."""


class Release:
    """Gradient release in force; made by `release_gradients`. Use it as a context manager to remove it at the end.

    Attributes:
        ledger: bytes of gradient alive, now and at most.
        last_norm: 0-d float tensor, the global norm of the last gradient before clipping; None until one was measured, which
            max_norm with clipping="exact" makes happen. Reading it does not wait for the device.
        skipped: gradients that were not used because they held an infinity or a NaN (on_nonfinite="skip").
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ReleasableOptimizer,
        *,
        policy: Policy,
        strict: bool,
        last: Callable[[], bool],
        max_norm: float | None = None,
        clipping: str = "exact",
    ) -> None:
        self.optimizer = optimizer
        self.ledger = Ledger()
        self.last_norm: Tensor | None = None
        self.skipped = 0
        self._model = weakref.ref(model)
        self._policy = policy
        self._strict = strict
        self._last = last
        self._max_norm = max_norm
        self._clipping = clipping
        self._paused = 0
        self._status: dict[Tensor, Status] = {}
        self._handles: dict[Tensor, Any] = {}
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._settings: list[tuple[Any, ...]] | None = None
        self._stepped = False
        self._pass: int | None = None  # the backward pass that updated parameters in this group
        self._norms: dict[Tensor, Tensor] | None = None  # while a measuring pass runs
        self._finite: list[Tensor] = []  # of the gradients of a measuring pass
        self._coefficient: Tensor | None = None  # while an updating pass runs
        optimizer.release = self
        _ACTIVE.add(self)
        self.attach()

    # -- hooks ----------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the model's parameters that the optimizer holds, that require a gradient, and have none yet.

        Parameters of the optimizer outside the model are updated by step(), as without release.
        """
        model = self.model
        if model is None:
            return
        inside = set(model.parameters())
        handles = _HANDLES.setdefault(model, [])
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter in inside and parameter not in self._handles:
                    hook = torch.compiler.disable(functools.partial(_on_gradient, weakref.ref(self)))
                    handle = self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
                    handles.append((weakref.ref(self), handle))

    def check_ownership(self, parameters: Iterable[Tensor]) -> None:
        """Raise `Refused` if another release has one of these parameters already."""
        for release in active_releases():
            if release is not self and any(release.hooked(parameter) for parameter in parameters):
                raise Refused("a parameter is in another optimizer's release already; call remove() on that release first.")

    def hooked(self, parameter: Tensor) -> bool:
        """Whether a hook of this release is on the parameter."""
        return parameter in self._handles

    def remove(self) -> None:
        """Take the hooks off. Held gradients stay in `.grad`, and the optimizer goes on as a plain one.

        Raises:
            Refused: micro-batches are in the moments and wait for their step. (Under the lenient release of
                `prepare_for_gradient_release`, whose step() closes nothing, they are applied instead.)
        """
        pending = [p for p, status in self._status.items() if status is Status.ACCUMULATED]
        if pending and self._strict:
            raise Refused(
                f"{self._describe(pending[0])}: micro-batches of it are in the optimizer's moments and wait for their step. "
                "Call optimizer.step() before remove()."
            )
        with torch.no_grad():
            for parameter in pending:
                self.optimizer.perform(parameter, None, Action.APPLY)
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._status.clear()
        model = self.model
        if model is not None:
            _HANDLES[model] = [(owner, handle) for owner, handle in _HANDLES.get(model, []) if owner() is not self]
        if self.optimizer.release is self:
            self.optimizer.release = None
        _ACTIVE.discard(self)

    def __enter__(self) -> Release:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # a step that was cut short is not completed: the exception is what matters
            for parameter in self._status:
                self.optimizer.state[parameter].pop("mean_square", None)
            self._status.clear()
        self.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in this context leave gradients in `.grad`, as without release; step() and zero_grad() treat them so."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once nobody else holds it."""
        return self._model()

    # -- the way of a gradient ------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: Tensor) -> None:
        """The gradient of `parameter` has been accumulated into `.grad`."""
        gradient = parameter.grad
        if gradient is None:  # an earlier hook of the user's took it
            return
        if self._norms is not None:
            self._measure(parameter, gradient)
            return
        last = self._policy is Policy.RELEASE or bool(self._last())
        if self._paused or (self._policy is Policy.HOLD and not last):
            decision = self._decide(parameter, GradientReady(last=False))
        else:
            self._require_guard(parameter)
            self._require_same_pass(parameter)
            check_gradient(parameter, gradient)
            decision = self._decide(parameter, GradientReady(last, self._usable(gradient)))
            self._remember_settings(decision.action.steps)
        self.ledger.arrive(parameter, _storage_bytes(gradient))
        self._carry_out(parameter, gradient, decision)

    def _carry_out(self, parameter: Tensor, gradient: Tensor | None, decision: Decision) -> None:
        action = decision.action
        if action is Action.DISCARD:
            pass
        elif action.steps or action in (Action.ACCUMULATE, Action.ACCUMULATE_FIRST):
            if gradient is not None and action is not Action.APPLY:
                self._clip(gradient)
            self.optimizer.perform(parameter, gradient, action)
            self.optimizer._opt_called = True
        if action.frees:
            parameter.grad = None
            self.ledger.free(parameter)
        self._status[parameter] = decision.status

    def _measure(self, parameter: Tensor, gradient: Tensor) -> None:
        check_gradient(parameter, gradient)
        self._decide(parameter, GradientReady())  # refuses here, before the first update, what it would refuse there
        self.ledger.arrive(parameter, _storage_bytes(gradient))
        assert self._norms is not None
        self._norms[parameter] = gradient_norm(gradient)
        if self.optimizer.on_nonfinite != "propagate":
            self._finite.append(torch.isfinite(gradient).all())
        parameter.grad = None
        self.ledger.free(parameter)

    def _clip(self, gradient: Tensor) -> None:
        if self._coefficient is not None:
            gradient.mul_(self._coefficient.to(gradient.device))
        elif self._max_norm is not None and self._clipping == "per_tensor":
            clip_by_norm_(gradient, self._max_norm)

    def _usable(self, gradient: Tensor) -> bool:
        if self.optimizer.on_nonfinite == "propagate" or all_finite([gradient]):
            return True
        if self.optimizer.on_nonfinite == "raise":
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; nothing was updated.")
        self.skipped += 1
        self.optimizer.skipped += 1
        return False

    def _require_guard(self, parameter: Tensor) -> None:
        exact = self._max_norm is not None and self._clipping == "exact"
        if exact and self._policy is Policy.RELEASE and self._coefficient is None:
            raise Refused(
                f"{self._describe(parameter)}: max_norm={self._max_norm} needs the norm of the whole gradient before the first "
                "update. Call release.guard(loss).backward(), or use accumulation='hold', or clipping='per_tensor'."
            )

    def _require_same_pass(self, parameter: Tensor) -> None:
        """Refuse a second backward at its first gradient, even where that is of a parameter which was not updated yet."""
        if not self._strict or self._policy is not Policy.RELEASE:
            return
        now = current_pass()
        if now is None:
            return
        if self._pass is not None and now != self._pass:
            raise Refused(
                f"{self._describe(parameter)}: a second backward() before optimizer.step(), after the first has updated "
                "parameters. Call optimizer.step() after each backward; or add the losses up and call backward() once; or "
                "declare the micro-batches with accumulation='hold' or 'state'."
            )
        self._pass = now

    # -- boundaries -----------------------------------------------------------------------------------------------------

    def close_step(self) -> None:
        """optimizer.step(): flush what waits, and close the group. What can be refused is, before a parameter is changed."""
        self._check_hooks()
        self._check_settings()
        self.optimizer.check_settings()
        waiting = self._waiting()
        gradients = [gradient for gradient in waiting.values() if gradient is not None]
        # Where nothing was updated yet, gradients are judged together, as a plain step() does.
        together = all(self._status[p] is Status.HELD for p in waiting)
        if together and self.optimizer.on_nonfinite != "propagate" and not all_finite(gradients):
            self._refuse_nonfinite(waiting)
        else:
            usable = {p: g is None or together or self._usable(g) for p, g in waiting.items()}
            decisions = {p: self._decide(p, Step(usable[p], waiting=g is not None)) for p, g in waiting.items()}
            try:
                if gradients and self._max_norm is not None and self._clipping == "exact":
                    self.last_norm = total_norm([gradient_norm(gradient) for gradient in gradients])
                    self._coefficient = clip_coefficient(self.last_norm, self._max_norm)
                for parameter, decision in decisions.items():
                    self._carry_out(parameter, parameter.grad, decision)
            finally:
                self._coefficient = None
        self._close()
        self.attach()

    def discard(self) -> None:
        """optimizer.zero_grad(): discard held gradients, and close the group."""
        decisions = {p: self._decide(p, ZeroGrad()) for p in self._status}
        for parameter, decision in decisions.items():
            self._carry_out(parameter, None, decision)
        self._close()
        self.attach()

    def require_closed(self, call: str) -> None:
        """Raise `Refused` unless no update is under way."""
        for parameter, status in self._status.items():
            if status is not Status.IDLE:
                raise Refused(
                    f"{call} in the middle of a step: {self._describe(parameter)} is {status.value}. Call optimizer.step() "
                    "first (or finish the micro-batches with optimizer_accumulation=False)."
                )

    def _waiting(self) -> dict[Tensor, Tensor | None]:
        """The parameters that a step() has to look at, with the gradients that wait in `.grad`."""
        waiting: dict[Tensor, Tensor | None] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient, status = parameter.grad, self._status.get(parameter, Status.IDLE)
                if gradient is not None:
                    check_gradient(parameter, gradient)
                    if status is Status.RELEASED:
                        self._decide(parameter, Step(waiting=True))  # refuses
                    if status is Status.IDLE:  # set by hand, unfrozen since, or outside the model: what step() would use
                        self._status[parameter] = Status.HELD
                if gradient is not None or status is not Status.IDLE:
                    waiting[parameter] = gradient
        return waiting

    def _refuse_nonfinite(self, waiting: dict[Tensor, Tensor | None]) -> None:
        if self.optimizer.on_nonfinite == "raise":
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; the step was not taken.")
        self.skipped += 1
        self.optimizer.skipped += 1
        for parameter in waiting:
            parameter.grad = None
            self.ledger.free(parameter)

    def _close(self) -> None:
        self._status = {p: status for p, status in self._status.items() if status is Status.ACCUMULATED and not self._strict}
        self._settings, self._stepped, self._pass = None, False, None

    # -- checks ---------------------------------------------------------------------------------------------------------

    def _decide(self, parameter: Tensor, event: Event) -> Decision:
        policy = Policy.PAUSE if self._paused and isinstance(event, GradientReady) else self._policy
        try:
            return decide(policy, self._status.get(parameter, Status.IDLE), event, strict=self._strict)
        except Refused as refusal:
            raise Refused(f"{self._describe(parameter)}: {refusal}") from None

    def _remember_settings(self, stepped: bool) -> None:
        """From the first use of the settings in this group on, they must stay; `stepped`: lr was used, too."""
        self._stepped |= stepped
        if self._settings is None:
            self.optimizer.check_settings()
            self._settings = [fingerprint(group) for group in self.optimizer.param_groups]

    def _check_settings(self) -> None:
        if self._settings is None or not self._strict:
            return
        for number, (before, group) in enumerate(zip(self._settings, self.optimizer.param_groups, strict=False)):
            changed = changed_settings(before, group)
            if not self._stepped:  # micro-batches in the moments: the step itself is still to come
                changed = [name for name in changed if name in ("betas", "eps", "maximize")]
            if changed:
                raise Refused(
                    f"{', '.join(changed)} of parameter group {number} changed after the backward pass had updated the "
                    "parameters and before optimizer.step(): the new value came too late for this step. Change it (and call "
                    "scheduler.step()) after optimizer.step(); optimizer.zero_grad() closes this one."
                )

    def _check_hooks(self) -> None:
        """Parameters of the model may have been replaced since: then nothing would ever update the new ones."""
        model = self.model
        if model is None:
            return
        now = dict(model.named_parameters())
        for parameter, handle in self._handles.items():
            name = self._names.get(parameter)
            if name in now and now[name] is not parameter:
                raise Refused(
                    f"parameter {name!r} of the model was replaced after release_gradients (load_state_dict(assign=True), "
                    "to_empty, an assignment): the optimizer and its hooks still hold the old one. Call release.remove(), "
                    "construct the optimizer from the new parameters, and call release_gradients again."
                )
            if handle.id not in (getattr(parameter, "_post_accumulate_grad_hooks", None) or ()):
                self._refuse_lost_hook(parameter)

    def _refuse_lost_hook(self, parameter: Tensor) -> None:
        raise Refused(
            f"{self._describe(parameter)} has lost its hook since release_gradients (somebody removed it, or a conversion "
            "swapped the contents of parameters): nothing releases its gradient. Call release.remove() and release_gradients "
            "again."
        )

    def _describe(self, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        return f"parameter {name!r}" if name else f"parameter of shape {tuple(parameter.shape)}"

    # -- two passes -----------------------------------------------------------------------------------------------------

    def guard(self, loss: Tensor) -> Tensor:
        """The loss, with a backward() that measures first and updates second: exact clipping with one gradient alive.

        Costs a second walk through the graph. A loss without a graph, or a release without exact max_norm, or one that
        holds its gradients anyway, needs no second pass and gets its loss back as it is.

        Args:
            loss: 0-d.

        Raises:
            Refused: in backward(), before anything is changed, if gradients of an earlier backward are still there.
        """
        two_passes = self._max_norm is not None and self._clipping == "exact" and self._policy is Policy.RELEASE
        if not (two_passes and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        if loss.dim() != 0:
            raise InvalidArgument(f"loss has shape {tuple(loss.shape)}; guard() takes a scalar, for instance loss.mean().")
        return guarded(loss, self._two_passes)

    def _two_passes(self, loss: Tensor, seed: Tensor) -> None:
        if self._paused:
            torch.autograd.backward(loss, seed)
            return
        self.attach()
        for parameter in self._handles:
            if parameter.grad is not None:
                raise Refused(
                    f"{self._describe(parameter)} has a gradient from an earlier backward, which the measuring pass would mix "
                    "up with this one. Call optimizer.zero_grad() first."
                )
        foreign = leaves_of(loss) | set(() if self.model is None else self.model.parameters())
        foreign -= set(self._handles)
        self.check_ownership(foreign)
        self._norms, self._finite = {}, []
        try:
            with without_gradients(foreign):  # the first pass is not to add anything to what others hold
                torch.autograd.backward(loss, seed, retain_graph=True)
            norms = [self._norms[p] for group in self.optimizer.param_groups for p in group["params"] if p in self._norms]
        finally:
            self._norms = None
        for parameter in self._handles:
            if parameter.grad is not None:  # no hook freed it
                parameter.grad = None
                self._refuse_lost_hook(parameter)
        self.last_norm = total_norm(norms)
        if not all(bool(finite) for finite in self._finite):
            self._refuse_nonfinite({})
            return
        assert self._max_norm is not None
        self._coefficient = clip_coefficient(self.last_norm, self._max_norm)
        try:
            torch.autograd.backward(loss, seed)
        finally:
            self._coefficient = None


@torch.no_grad()
def _on_gradient(reference: weakref.ref[Release], parameter: Tensor) -> None:
    """The hook. It holds the release weakly: torch's collector cannot see a cycle that leads through a hook."""
    release = reference()
    if release is None:
        raise Refused(
            "the optimizer that released this model's gradients no longer exists, so nothing would update the parameters. "
            "Keep the optimizer as long as the model trains; or call remove_gradient_release(model)."
        )
    release.on_gradient(parameter)


def _storage_bytes(gradient: Tensor) -> int:
    return gradient.untyped_storage().nbytes()


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
