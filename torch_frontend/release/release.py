"""A release in force: what happens to a gradient from the moment it exists, and what step() and zero_grad() close.

What is done at every event is decided by `core.release`; here it is carried out. The way of a gradient: the hook that is
called inside the backward pass, the engine of communication, the optimizer's step, freed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidArgument, NonFiniteGradient, Refused
from ...core.release import Action, Decision, GradientReady, Ledger, Policy, Status, Step, ZeroGrad
from ..communication import Communication
from ..communication.shards import is_sharded
from ..groups import check_gradient
from ..optimizers import ReleasableOptimizer, all_finite, finite
from .arrivals import Arrivals
from .backward_pass import at_end_of_pass, is_nested, pass_number
from .conditioning import Conditioning, Scaler
from .guard import guarded
from .held_average import HeldAverage
from .hooks import Hooks, weakly
from .lifecycle import Lifecycle
from .measurement import Measurement
from .settings import Settings
from .two_passes import two_passes


class Release:
    """Gradient release in force; made by `release_gradients`. Use it as a context manager to remove it at the end.

    Attributes:
        skipped: gradients that were not used because they held an infinity or a NaN: single ones (on_nonfinite="skip"), or
            whole steps (a scaler).
    """

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
        self.optimizer = optimizer
        self.skipped = 0
        self.hooks = Hooks(self, model)
        self._lifecycle = Lifecycle(optimizer, policy, strict=strict, describe=self.hooks.describe)
        self._settings = Settings(optimizer)
        self._communication = communication
        self._last = last
        self._keep_bytes = keep_bytes
        self._conditioning = Conditioning(
            max_norm=max_norm,
            clipping=clipping,
            scaler=scaler,
            order=self._in_order,
            publishes=strict and policy is not Policy.STATE,
        )
        self._lock = threading.RLock()  # autograd runs the hooks of several devices in several threads
        self._held_average = HeldAverage(communication, held=self._held, due=averages, lock=self._lock)
        self._paused = 0
        self._watched: int | None = None  # the pass whose end is waited for
        self._is_last = True  # of the micro-batch whose gradients are under way
        self._arrivals = Arrivals(one_pass=strict and policy is Policy.RELEASE, describe=self.hooks.describe)
        self._measurement: Measurement | None = None  # while a measuring pass runs
        optimizer.release = self
        self.attach()

    # -- the public face ------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Bytes of gradient alive, now and at most."""
        return self._lifecycle.ledger

    @property
    def last_norm(self) -> Tensor | None:
        """The global norm of the last gradient, unscaled and before clipping: a 0-d tensor, so that nothing waits for it.

        It is there after backward(), or after step() where that is what releases. None before the first, and with
        accumulation="state", where nobody sees the whole gradient.
        """
        return self._conditioning.last_norm

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once nobody else holds it."""
        return self.hooks.model

    def guard(self, loss: Tensor) -> Tensor:
        """The loss, with a backward() that measures first and updates second.

        So the clipping of the global norm is exact, and a step whose gradient overflows changes nothing, with one gradient
        alive. Costs a second walk through the graph, less with keep_bytes. A loss without a graph, or a release without
        max_norm and scaler, or one that holds its gradients anyway, needs no second pass and gets its loss back as it is.

        Once a step, around all of the loss: what it decides, it decides of the whole gradient. Hooks on modules and tensors
        run in both passes. backward(inputs=...) and torch.autograd.grad find no parameters behind a guarded loss.

        Args:
            loss: 0-d; scaled already, or to be scaled: `scaler.scale(release.guard(loss)).backward()`.

        Raises:
            Refused: in backward(), before anything is changed, if gradients of an earlier backward are still there, or a
                guarded one ran in this step already.
        """
        needs_two_passes = self._lifecycle.policy is Policy.RELEASE and self._conditioning.needs_whole
        if not (needs_two_passes and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        if loss.dim() != 0:
            raise InvalidArgument(f"loss has shape {tuple(loss.shape)}; guard() takes a scalar, for instance loss.mean().")
        run: Any = torch.compiler.disable(self._backward_of_guarded)
        return guarded(loss, run)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in this context leave gradients in `.grad`, as without release; step() and zero_grad() treat them so."""
        self._conditioning.make_way()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def remove(self) -> None:
        """Take the hooks off. Held gradients stay in `.grad`, and the optimizer goes on as a plain one.

        Raises:
            Refused: micro-batches are in the moments and wait for their step. (Under the lenient release of
                `prepare_for_gradient_release`, whose step() closes nothing, they are applied instead.)
        """
        pending = [p for p in self._lifecycle.tensors() if self._lifecycle.status(p) is Status.ACCUMULATED]
        if pending and self._lifecycle.strict:
            raise Refused(
                f"{self.hooks.describe(pending[0])}: micro-batches of it are in the optimizer's moments and wait for their "
                "step. Call optimizer.step() before remove()."
            )
        with torch.no_grad():
            for parameter in pending:
                self.optimizer.perform(parameter, None, Action.APPLY)
        self._conditioning.close()
        self._communication.detach()
        self.hooks.remove()
        if self.optimizer.release is self:
            self.optimizer.release = None

    def __enter__(self) -> Release:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # the exception is what matters
            self._lifecycle.abandon()
        self.remove()

    # -- what the optimizer asks ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the model's parameters that the optimizer holds, that require a gradient, and have none yet.

        Parameters of the optimizer outside the model are updated by step(), as without release.
        """
        fresh = self.hooks.attach(p for group in self.optimizer.param_groups for p in group["params"])
        if fresh:
            self._communication.attach(fresh, weakly(self.deliver))

    def hooked(self, parameter: Tensor) -> bool:
        """Whether a hook of this release is on the parameter."""
        return parameter in self.hooks

    def require_closed(self, call: str) -> None:
        """Raise `Refused` unless no update is under way."""
        for parameter in self._lifecycle.tensors():
            status = self._lifecycle.status(parameter)
            if status is not Status.IDLE:
                raise Refused(
                    f"{call} in the middle of a step: {self.hooks.describe(parameter)} is {status.value}. Call "
                    "optimizer.step() first (or finish the micro-batches with optimizer_accumulation=False)."
                )

    # -- the way of a gradient ------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: Tensor) -> None:
        """The local gradient of `parameter` has been accumulated into `.grad`: keep it, or send it on its way."""
        with self._lock:
            gradient = parameter.grad
            if gradient is None:  # an earlier hook of the user's took it
                return
            policy, measuring = self._lifecycle.policy, self._measurement is not None
            self._is_last = measuring or policy is Policy.RELEASE or bool(self._last())
            if not measuring and self._keeps:
                paused = bool(self._paused) or self._communication.keeps()
                decision = self._lifecycle.decide(parameter, GradientReady(last=False), paused=paused)
                self._lifecycle.arrive(parameter, gradient)
                self._lifecycle.carry_out([(parameter, gradient, decision)])
                self._communication.held(parameter)
                if not self._paused:
                    self._held_average.gradient_held()
                return
            check_gradient(parameter, gradient)
            if not measuring:
                if policy is Policy.RELEASE:
                    self._conditioning.require_decided(parameter, self.hooks.describe)
                self._arrivals.check_pass(parameter)
            self._lifecycle.decide(parameter, GradientReady(self._is_last))  # refuses before anything is sent or changed
            self._arrivals.send(parameter, seen=self._measurement is not None and parameter in self._measurement)
            end_is_noticed = self._watch_pass()
            self._lifecycle.arrive(parameter, gradient)
            self._communication.gradient_ready(parameter)
            if not end_is_noticed:
                self._conditioning.publish()

    @property
    def _keeps(self) -> bool:
        """Whether gradients stay in `.grad` for now."""
        holds = self._lifecycle.policy is Policy.HOLD and not self._is_last
        return bool(self._paused) or holds or self._communication.keeps()

    @torch.no_grad()
    def deliver(self, parameters: Sequence[Tensor]) -> None:
        """Communication hands over averaged gradients in `.grad`: measure them, or use them; then free them."""
        with self._lock:
            self._arrivals.delivered(parameters)
            if self._measurement is None and self._keeps:  # averaged in a backward that only adds up
                return
            gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
            for parameter, gradient in gradients.items():
                self._lifecycle.arrive(parameter, gradient)
            if self._measurement is not None:
                for parameter, gradient in gradients.items():
                    if not self._measurement.take(parameter, gradient):
                        self._lifecycle.free(parameter)
                return
            usable = self._usable(gradients)
            decisions = {p: self._lifecycle.decide(p, GradientReady(self._is_last, usable[p])) for p in gradients}
            self._settings.remember(any(decision.action.steps for decision in decisions.values()))
            for parameter, gradient in gradients.items():
                self._conditioning.take(parameter, gradient)
            self._use(gradients, decisions)

    def _use(self, gradients: Mapping[Tensor, Tensor], decisions: Mapping[Tensor, Decision]) -> None:
        used = [gradient for p, gradient in gradients.items() if decisions[p].action is not Action.DISCARD]
        self._conditioning.apply(used)
        self._lifecycle.carry_out([(p, gradients.get(p), decision) for p, decision in decisions.items()])

    def _watch_pass(self) -> bool:
        """The end of a pass that updates parameters: every gradient was handed over, and the norm of what it used is known.

        False if it will not be noticed.
        """
        if self._measurement is not None or self._conditioning.decided:
            return True
        now = pass_number()
        if now is not None and now == self._watched:
            return True
        noticed = at_end_of_pass(weakly(self._end_of_pass))
        self._watched = now if noticed else None
        return noticed

    @torch.no_grad()
    def _end_of_pass(self) -> None:
        with self._lock:
            self._watched = None
            if not is_nested():
                self._communication.flush(always=True)
            self._conditioning.publish()

    def _usable(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, bool]:
        """Which of them may be used; the others are counted."""
        if self.optimizer.on_nonfinite == "propagate":
            return dict.fromkeys(gradients, True)
        usable = dict(zip(gradients, finite(list(gradients.values())), strict=True))
        if self.optimizer.on_nonfinite == "raise" and not all(usable.values()):
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; nothing was updated.")
        for _ in range(list(usable.values()).count(False)):
            self._count_skipped()
        return usable

    def _count_skipped(self) -> None:
        self.skipped += 1
        self.optimizer.skipped += 1

    # -- boundaries -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def close_step(self) -> None:
        """optimizer.step(): flush what waits, and close the step. What can be refused is, before a parameter is changed."""
        self.hooks.check()
        if self._lifecycle.strict:
            self._settings.check()
        self.optimizer.check_settings()
        self._conditioning.check(self.hooks.describe)
        if self._conditioning.scaler is not None:
            self._held_average.require_judged()
        self._conditioning.withdraw()
        self._communication.flush()
        self._held_average.step([p for p, gradient in self._lifecycle.waiting().items() if gradient is not None])
        waiting = self._lifecycle.waiting()
        gradients = {p: gradient for p, gradient in waiting.items() if gradient is not None}
        self._conditioning.check_waiting(gradients, self.hooks.describe)
        # Where nothing was updated yet, gradients are judged together, as a plain step() does.
        together = all(self._lifecycle.status(p) is Status.HELD for p in waiting)
        if together and self.optimizer.on_nonfinite != "propagate" and not all_finite(gradients.values()):
            self._refuse_nonfinite(list(waiting))
        else:
            usable = dict.fromkeys(gradients, True) if together else self._usable(gradients)
            decisions = {
                p: self._lifecycle.decide(p, Step(usable.get(p, True), waiting=g is not None)) for p, g in waiting.items()
            }
            with self._conditioning.decide_waiting(gradients):
                for batch in _batches(waiting):
                    self._use({p: gradients[p] for p in batch if p in gradients}, {p: decisions[p] for p in batch})
        self._close()

    def discard(self) -> None:
        """optimizer.zero_grad(): discard held gradients, and close the step.

        Raises:
            Refused: step() was not called, and a gradient that is not finite was used. The step is closed.
        """
        propagates = self.optimizer.on_nonfinite == "propagate"
        overflow_was_used = propagates and self._released and self._conditioning.overflow_published
        self._conditioning.withdraw()
        self._communication.flush()
        decisions = {p: self._lifecycle.decide(p, ZeroGrad()) for p in self._lifecycle.tensors()}
        self._lifecycle.carry_out([(p, None, decision) for p, decision in decisions.items()])
        self._close()
        if overflow_was_used:
            raise Refused(
                "this step was to be skipped, as its gradient is not finite, and the gradient had been used already: the "
                "parameters hold infinities or NaNs. Go back to a checkpoint, and declare the torch.amp.GradScaler, as "
                "release_gradients(scaler=...) with release.guard(loss), or construct the optimizer with on_nonfinite='skip'."
            )

    @property
    def _released(self) -> bool:
        """Whether a parameter was updated in this step."""
        return any(self._lifecycle.status(parameter) is Status.RELEASED for parameter in self._lifecycle.tensors())

    def _held(self) -> list[Tensor]:
        return [parameter for parameter in self._lifecycle.tensors() if self._lifecycle.status(parameter) is Status.HELD]

    def _in_order(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _refuse_nonfinite(self, waiting: list[Tensor]) -> None:
        if self.optimizer.on_nonfinite == "raise":
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; the step was not taken.")
        self._count_skipped()
        for parameter in waiting:
            self._lifecycle.free(parameter)

    def _close(self) -> None:
        self._lifecycle.close()
        self._settings.forget()
        self._watched = None
        self._arrivals.close()
        self._communication.end_step()
        self._held_average.close()
        self._conditioning.close()
        self.attach()

    # -- two passes -----------------------------------------------------------------------------------------------------

    def _backward_of_guarded(self, loss: Tensor, seed: Tensor) -> None:
        if self._paused:
            torch.autograd.backward(loss, seed)
            return
        if self._released or self._conditioning.overflow_to_be_judged:
            raise Refused(
                "a second guarded backward() before optimizer.step(): the first has taken its gradient for the whole one, for "
                "its norm and for whether it is finite. Add the losses up, and guard their sum; or use accumulation='hold'. "
                "optimizer.step() or optimizer.zero_grad() closes a step."
            )
        self._conditioning.withdraw()
        self.attach()
        two_passes(self, loss, seed, self._keep_bytes)

    @contextlib.contextmanager
    def measuring(self, keep_bytes: int) -> Iterator[Measurement]:
        """Gradients in this context are measured, and freed but for the first that fit into keep_bytes."""
        judge = self.optimizer.on_nonfinite != "propagate" or self._conditioning.scaler is not None
        measured = self._measurement = Measurement(judge=judge, keep_bytes=keep_bytes)
        try:
            yield measured
            self._communication.flush(always=True)
            if self.optimizer.on_nonfinite == "raise" and self._conditioning.scaler is None and not measured.finite:
                raise NonFiniteGradient("a gradient holds an infinity or a NaN; nothing was updated.")
        finally:
            self._measurement = None
            self._arrivals.end_pass()

    @contextlib.contextmanager
    def updating(self, measured: Measurement) -> Iterator[bool]:
        """Gradients in this context are those that were measured, and are used; False if they must not be."""
        with self._conditioning.decide(measured) as finite:
            if not finite:
                self.forget(measured.kept)
                self._count_skipped()
            yield finite
            if finite:
                self._communication.flush(always=True)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Free their gradients unused."""
        for parameter in list(parameters):
            self._lifecycle.free(parameter)


def _batches(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """One by one, so that gradients are freed on the way; sharded ones together, for what they ask of other processes."""
    given = list(parameters)
    sharded = [parameter for parameter in given if is_sharded(parameter)]
    if sharded:
        yield sharded
    yield from ([parameter] for parameter in given if not is_sharded(parameter))
