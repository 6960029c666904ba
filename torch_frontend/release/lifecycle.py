"""Where every tensor stands in its step: asks `core.release` what is to be done, does it, and books the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ...core.errors import Refused
from ...core.release import Action, Decision, Event, Ledger, Policy, Status, Step, decide
from ..communication.shards import local
from ..groups import check_gradient
from ..optimizers import ReleasableOptimizer


class Lifecycle:
    """The status of every parameter, and the ledger of the gradients that are alive.

    Args:
        policy: what is done with a gradient.
        strict: see `core.release.decide`.
        describe: how an error names a parameter.
    """

    def __init__(
        self, optimizer: ReleasableOptimizer, policy: Policy, *, strict: bool, describe: Callable[[Tensor], str]
    ) -> None:
        self.policy = policy
        self.strict = strict
        self.ledger = Ledger()
        self._optimizer = optimizer
        self._describe = describe
        self._status: dict[Tensor, Status] = {}
        self._mixed: set[Tensor] = set()  # what waits in their `.grad` has something of a refused backward in it

    def status(self, parameter: Tensor) -> Status:
        """Where it stands."""
        return self._status.get(parameter, Status.IDLE)

    def tensors(self) -> list[Tensor]:
        """Those that an event of this step has touched."""
        return list(self._status)

    def arrive(self, parameter: Tensor, gradient: Tensor) -> None:
        """The gradient exists."""
        here = local(gradient)
        nbytes = here.numel() * here.element_size()  # its own part, where gradients share a buffer
        self.ledger.arrive(parameter, min(nbytes, here.untyped_storage().nbytes()))

    def free(self, parameter: Tensor) -> None:
        """Free its gradient, whatever becomes of it."""
        parameter.grad = None
        self.ledger.free(parameter)

    def turn_away(self, parameter: Tensor) -> None:
        """Its gradient is refused: nothing of it stays. (It may be in the sum of what is held, where nobody could tell before
        it was added; then step() is refused.)"""
        if parameter.grad is not None and self.status(parameter) is Status.HELD:
            self._mixed.add(parameter)
        elif parameter.grad is not None:
            self.free(parameter)

    def book_out(self) -> None:
        """Nothing is on its way: what is in the ledger and does not wait will not come (of a backward that failed, or of a
        block of micro-batches, whose gradients are booked together)."""
        for parameter in self.ledger.booked:
            assert isinstance(parameter, Tensor)
            if self.status(parameter) not in (Status.HELD, Status.QUEUED):
                self.ledger.free(parameter)

    def decide(self, parameter: Tensor, event: Event, *, paused: bool = False) -> Decision:
        """What is to be done; changes nothing.

        Raises:
            Refused: nothing exact can be done; the text names the parameter.
        """
        try:
            policy = Policy.PAUSE if paused else self.policy
            return decide(policy, self.status(parameter), event, strict=self.strict)
        except Refused as refusal:
            raise Refused(f"{self._describe(parameter)}: {refusal}") from None

    def carry_out(self, decided: Sequence[tuple[Tensor, Tensor | None, Decision]], *, check: str = "") -> Sequence[Tensor]:
        """Do it: of each parameter its gradient, ready to be used as it is, and what is to be done.

        Args:
            decided: as above. A gradient that is queued is taken out of `.grad`, and comes again with its `Launch`.
            check: "each": an update whose gradient is not finite is left out; "all": all are, if one is not; by the device
                (`ReleasableOptimizer.checks_on_device`), and all that is decided are updates.

        Returns:
            With check, 1 where it was done, 0 where it was left out, of each or of all, 0-d on the device.
        """
        tasks = [(parameter, gradient, decision.action) for parameter, gradient, decision in decided]
        used = [task for task in tasks if task[2].steps or task[2] in (Action.ACCUMULATE, Action.ACCUMULATE_FIRST)]
        applied: Sequence[Tensor] = ()
        if check == "all":
            applied = self._optimizer.update_if_all_finite([(p, g) for p, g, _ in used if g is not None])
        elif used:
            applied = self._optimizer.perform_all(used, if_finite=check == "each")
        if used:
            self._optimizer._opt_called = True
        for parameter, _, decision in decided:
            if self.status(parameter) is Status.QUEUED:  # its gradient is not in `.grad`, where another may be
                self.ledger.free(parameter)
            elif decision.action is Action.QUEUE:
                parameter.grad = None
            elif decision.action.frees:
                self.free(parameter)
            self._status[parameter] = decision.status
        return applied

    def give_back(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """What was queued could not be used: it is held in `.grad`."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
            self._status[parameter] = Status.HELD

    def waiting(self) -> dict[Tensor, Tensor | None]:
        """The parameters that a step() has to look at, with the gradients that wait in `.grad`."""
        waiting: dict[Tensor, Tensor | None] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                gradient, status = parameter.grad, self.status(parameter)
                if gradient is None and status is Status.HELD:  # somebody took it out of `.grad`
                    self.ledger.free(parameter)
                    status = self._status[parameter] = Status.IDLE
                if gradient is not None:
                    if parameter in self._mixed:
                        raise Refused(
                            f"{self._describe(parameter)}: a backward that was refused has added to the gradient that it "
                            "held. Call optimizer.zero_grad(), and compute this step's gradients again."
                        )
                    check_gradient(parameter, gradient)
                    if status is Status.RELEASED:
                        self.decide(parameter, Step(waiting=True))  # refuses
                    if status is Status.IDLE:  # set by hand, unfrozen since, or outside the model: what step() would use
                        self._status[parameter] = Status.HELD
                if gradient is not None or status is not Status.IDLE:
                    waiting[parameter] = gradient
        return waiting

    def close(self) -> None:
        """The step is over. Leniently, micro-batches in the moments stay for the update that ends them."""
        self._mixed.clear()
        self.book_out()
        left = [p for p, status in self._status.items() if status is Status.ACCUMULATED and not self.strict]
        self._status = dict.fromkeys(left, Status.ACCUMULATED)

    def abandon(self) -> None:
        """The step was cut short and is not completed."""
        for parameter in self._status:
            self._optimizer.state[parameter].pop("mean_square", None)
        self._status.clear()
