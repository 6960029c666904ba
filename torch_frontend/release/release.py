"""A release in force: what happens to a gradient from the moment it exists.

What is done at every event is decided by `core.release`; here it is carried out. The way of a gradient: the hook that is
called inside the backward pass, the engine of communication, the optimizer's step, freed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidArgument, Refused
from ...core.release import Action, Decision, GradientReady, Ledger, Policy, Status
from ..communication import Communication
from ..communication.protocol import Purpose
from ..groups import check_gradient
from ..optimizers import ReleasableOptimizer
from . import boundaries
from .arrivals import Arrivals
from .backward_pass import at_end_of_pass, is_nested, pass_number
from .conditioning import Conditioning, Scaler
from .guard import guarded
from .held_average import HeldAverage
from .hooks import Hooks, weakly
from .launches import Launches
from .lifecycle import Lifecycle
from .nonfinite import NonFinite
from .parts import Parts
from .settings import Settings
from .two_passes import two_passes


class Release:
    """Gradient release in force; made by `release_gradients`. Use it as a context manager to remove it at the end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: ReleasableOptimizer,
        communication: Communication,
        *,
        policy: Policy,
        strict: bool,
        last: Callable[[], bool],
        averages: Callable[[], bool] | None = None,
        max_norm: float | None = None,
        clipping: str = "exact",
        scaler: Scaler | None = None,
        keep_bytes: int = 0,
    ) -> None:
        lock = threading.RLock()
        self.optimizer = optimizer
        self.hooks = Hooks(self, model)
        self._last = last
        self._keep_bytes = keep_bytes
        self._paused = 0
        self._end_is_noticed = False  # of the pass that is running
        self._is_last = True  # of the micro-batch whose gradients are under way
        lifecycle = Lifecycle(optimizer, policy, strict=strict, describe=self.hooks.describe)
        nonfinite = NonFinite(optimizer)
        conditioning = Conditioning(
            max_norm=max_norm,
            clipping=clipping,
            scaler=scaler,
            order=self._in_order,
            publishes=strict and policy is not Policy.STATE,
        )
        self._parts = Parts(
            optimizer=optimizer,
            hooks=self.hooks,
            communication=communication,
            arrivals=Arrivals(one_pass=strict and policy is Policy.RELEASE, describe=self.hooks.describe),
            lifecycle=lifecycle,
            settings=Settings(optimizer),
            conditioning=conditioning,
            held_average=HeldAverage(communication, held=self._held, due=averages, lock=lock),
            nonfinite=nonfinite,
            launches=Launches(optimizer, lifecycle, conditioning, nonfinite, lock),
            deliver=weakly(self.deliver),
            purpose=weakly(self.purpose),
            lock=lock,
        )
        optimizer.release = self
        self.attach()

    # -- the public face ------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Bytes of gradient alive, now and at most."""
        return self._parts.lifecycle.ledger

    @property
    def skipped(self) -> int:
        """Gradients that were not used because they held an infinity or a NaN: single ones (on_nonfinite="skip"), or whole
        steps (a scaler, held gradients). Reading it waits for the device where only that knows."""
        return self._parts.nonfinite.skipped

    @property
    def last_norm(self) -> Tensor | None:
        """The global norm of the last gradient, unscaled and before clipping: a 0-d tensor, so that nothing waits for it.

        It is there after backward(), or after step() where that is what releases. None before the first, and with
        accumulation="state", where nobody sees the whole gradient.
        """
        return self._parts.conditioning.last_norm

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once nobody else holds it."""
        return self.hooks.model

    def guard(self, loss: Tensor) -> Tensor:
        """The loss, with a backward() that measures first and updates second.

        So the clipping of the global norm is exact, and a step whose gradient overflows changes nothing, with one gradient
        alive. Costs a second walk through the graph, less with keep_bytes. A loss without a graph, or a release without
        max_norm and scaler, or one that holds its gradients anyway, needs no second pass and gets its loss back as it is.

        Once a step, around all of the loss: what it decides, it decides of the whole gradient. What the loss is multiplied by
        may stand outside, another term may not: guard(loss + regulariser). Hooks on modules and tensors
        run in both passes. backward(inputs=...) and torch.autograd.grad find no parameters behind a guarded loss.

        Args:
            loss: 0-d; scaled already, or to be scaled: `scaler.scale(release.guard(loss)).backward()`.

        Raises:
            InvalidArgument: loss is no 0-d tensor.
            Refused: in backward(), before anything is changed, if gradients of an earlier backward are still there, a
                guarded one ran in this step already, or it is of more than this loss.
        """
        needs_two_passes = self._parts.lifecycle.policy is Policy.RELEASE and self._parts.conditioning.needs_whole
        if not isinstance(loss, Tensor):
            raise InvalidArgument(
                f"loss is a {type(loss).__name__}; guard() takes the 0-d tensor that backward() is called on."
            )
        if not (needs_two_passes and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        if loss.dim() != 0:
            raise InvalidArgument(f"loss has shape {tuple(loss.shape)}; guard() takes a scalar, for instance loss.mean().")
        run: Any = torch.compiler.disable(self._backward_of_guarded)
        return guarded(loss, run, self._parts)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in this context leave gradients in `.grad`, as without release; step() and zero_grad() treat them so."""
        self._parts.conditioning.make_way()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def remove(self) -> None:
        """Take the hooks off. Gradients that were not used stay in `.grad`, and the optimizer goes on as a plain one.

        Raises:
            Refused: micro-batches are in the moments and wait for their step. (Under the lenient release of
                `prepare_for_gradient_release`, whose step() closes nothing, they are applied instead.)
        """
        parts = self._parts
        pending = [p for p in parts.lifecycle.tensors() if parts.lifecycle.status(p) is Status.ACCUMULATED]
        if pending and parts.lifecycle.strict:
            raise Refused(
                f"{self.hooks.describe(pending[0])}: micro-batches of it are in the optimizer's moments and wait for their "
                "step. Call optimizer.step() before remove()."
            )
        if parts.alone:
            parts.launches.hold()
        else:
            parts.launches.flush()
        with torch.no_grad():
            for parameter in pending:
                self.optimizer.perform(parameter, None, Action.APPLY)
        parts.conditioning.close()
        parts.communication.detach()
        self.hooks.remove()
        if self.optimizer.release is self:
            self.optimizer.release = None

    def __enter__(self) -> Release:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # the exception is what matters
            self._parts.launches.hold()
            self._parts.lifecycle.abandon()
        self.remove()

    # -- what the optimizer asks ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the model's parameters that the optimizer holds, that require a gradient, and have none yet.

        Parameters of the optimizer outside the model are updated by step(), as without release.
        """
        self._parts.attach()

    def hooked(self, parameter: Tensor) -> bool:
        """Whether a hook of this release is on the parameter."""
        return parameter in self.hooks

    def require_closed(self, call: str) -> None:
        """Raise `Refused` unless no update is under way."""
        parts = self._parts
        for parameter in parts.lifecycle.tensors():
            status = parts.lifecycle.status(parameter)
            if status is not Status.IDLE:
                raise Refused(
                    f"{call} in the middle of a step: {self.hooks.describe(parameter)} is {status.value}. Call "
                    "optimizer.step() first (or finish the micro-batches with optimizer_accumulation=False)."
                )

    def close_step(self) -> None:
        """optimizer.step(): see `boundaries.close_step`."""
        boundaries.close_step(self._parts)

    def discard(self) -> None:
        """optimizer.zero_grad(): see `boundaries.discard`."""
        boundaries.discard(self._parts)

    # -- the way of a gradient ------------------------------------------------------------------------------------------

    def before_gradient(self, parameter: Tensor) -> None:
        """A gradient of `parameter` comes, and is about to be added to another in `.grad`: refuse it before it is."""
        with self._parts.lock, self._parts.turning_away():
            self._decide_on_arrival(parameter)

    def on_gradient(self, parameter: Tensor) -> None:
        """The local gradient of `parameter` has been accumulated into `.grad`: keep it, or send it on its way."""
        with self._parts.lock, self._parts.turning_away([parameter]):
            self._take(parameter)

    def _take(self, parameter: Tensor) -> None:
        parts = self._parts
        gradient = parameter.grad
        if gradient is None:  # an earlier hook of the user's took it
            return
        if not self.optimizer.holds(parameter):  # taken out of its group: `Hooks.attach` takes the hook off, too
            return
        kept = self._decide_on_arrival(parameter)
        if kept is not None:
            parts.lifecycle.arrive(parameter, gradient)
            parts.lifecycle.carry_out([(parameter, gradient, kept)])
            parts.communication.held(parameter)
            if not self._paused:
                parts.held_average.gradient_held()
            return
        check_gradient(parameter, gradient)
        parts.arrivals.send(parameter)
        self._end_is_noticed = self._watch_pass()
        parts.lifecycle.arrive(parameter, gradient)
        parts.communication.gradient_ready(parameter)
        if not self._end_is_noticed:
            parts.conditioning.publish()

    def _decide_on_arrival(self, parameter: Tensor) -> Decision | None:
        """What is decided of a gradient that stays in `.grad`; None for one that is sent on its way.

        Raises:
            PenstockError: it cannot be used; no gradient of this parameter was, nor sent.
        """
        parts = self._parts
        parts.launches.require_none_left()
        parts.launches.before(parameter)
        policy, measuring = parts.lifecycle.policy, parts.measurement is not None
        self._is_last = measuring or policy is Policy.RELEASE or bool(self._last())
        if not measuring and self._keeps:
            paused = bool(self._paused) or parts.communication.keeps()
            return parts.lifecycle.decide(parameter, GradientReady(last=False), paused=paused)
        if not measuring:
            parts.settings.require_valid()
            if policy is Policy.RELEASE:
                parts.conditioning.require_decided(parameter, self.hooks.describe)
            parts.arrivals.check_pass(parameter)
        parts.lifecycle.decide(parameter, GradientReady(self._is_last))
        parts.arrivals.check_whole(parameter, seen=parts.measurement is not None and parameter in parts.measurement)
        return None

    @property
    def _keeps(self) -> bool:
        """Whether gradients stay in `.grad` for now."""
        holds = self._parts.lifecycle.policy is Policy.HOLD and not self._is_last
        return bool(self._paused) or holds or self._parts.communication.keeps()

    @torch.no_grad()
    def deliver(self, parameters: Sequence[Tensor]) -> None:
        """Communication hands over averaged gradients in `.grad`: measure them, or use them; then free them."""
        parts = self._parts
        with parts.lock:
            parts.arrivals.delivered(parameters)
            parameters = [p for p in parameters if self.optimizer.holds(p)]  # the others were taken out of their groups
            if parts.measurement is None and self._keeps:  # averaged in a backward that only adds up
                return
            gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
            for parameter, gradient in gradients.items():
                parts.lifecycle.arrive(parameter, gradient)
            if parts.measurement is not None:
                for parameter, gradient in gradients.items():
                    if not parts.measurement.take(parameter, gradient):
                        parts.lifecycle.free(parameter)
                return
            decisions = self._decide(gradients)
            used = any(decision.action.steps or decision.action is Action.QUEUE for decision in decisions.values())
            parts.settings.remember(used)
            for parameter, gradient in gradients.items():
                parts.conditioning.take(parameter, gradient)
            parts.launches.use(gradients, decisions, check="each" if parts.launches.checks(decisions) else "")

    def _decide(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Decision]:
        parts = self._parts
        batched = self._end_is_noticed and parts.launches.may_wait(gradients)
        decisions = {p: parts.lifecycle.decide(p, GradientReady(self._is_last, batched=batched)) for p in gradients}
        if parts.launches.checks(decisions):
            return decisions
        usable = parts.nonfinite.usable(gradients)
        return {p: parts.lifecycle.decide(p, GradientReady(self._is_last, usable[p], batched)) for p in gradients}

    def _watch_pass(self) -> bool:
        """The end of a pass that updates parameters: every gradient was handed over, and the norm of what it used is known.

        False if it will not be noticed.
        """
        if self._parts.measurement is not None or self._parts.conditioning.decided:
            return True
        now = pass_number()
        if now is not None and now == self._parts.arrivals.watched:
            return True
        if not is_nested():  # one that failed before, and nothing has closed its step since
            self._parts.end_failed_pass()
        noticed = at_end_of_pass(weakly(self._end_of_pass))
        self._parts.arrivals.watched = now if noticed else None
        return noticed

    @torch.no_grad()
    def _end_of_pass(self) -> None:
        parts = self._parts
        with parts.lock:
            self._parts.arrivals.watched = None
            if not is_nested():
                parts.communication.flush(always=True)
            parts.launches.flush()
            parts.conditioning.publish()

    def purpose(self) -> Purpose:
        """What the gradients that come now are for."""
        parts = self._parts
        measured, releases = parts.measurement is not None, parts.lifecycle.policy is Policy.RELEASE
        begun = any(parts.lifecycle.status(parameter) is Status.ACCUMULATED for parameter in parts.lifecycle.tensors())
        return Purpose(measured=measured, last=measured or releases or self._is_last, first=not begun)

    def _held(self) -> list[Tensor]:
        lifecycle = self._parts.lifecycle
        return [parameter for parameter in lifecycle.tensors() if lifecycle.status(parameter) is Status.HELD]

    def _in_order(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _backward_of_guarded(self, loss: Tensor, seed: Tensor) -> None:
        if self._paused:
            torch.autograd.backward(loss, seed)
        else:
            two_passes(self._parts, loss, seed, self._keep_bytes)
