"""Gradients as they come: what is used must be the whole gradient of its parameter, from the one backward of this step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ...core.errors import Refused
from .backward_pass import current_pass
from .reentrant import StillToCome


class Arrivals:
    """Knows which pass has updated parameters in this step, and which gradients are under way to be averaged.

    Attributes:
        watched: the pass that updates parameters and whose end is waited for, if there is one.

    Args:
        one_pass: a step has one backward, and every gradient is used in it.
        describe: how an error names a parameter.
    """

    def __init__(self, *, one_pass: bool, describe: Callable[[Tensor], str]) -> None:
        self.watched: int | None = None
        self._one_pass = one_pass
        self._describe = describe
        self._pass: int | None = None  # the backward pass that updated parameters in this step
        self._sent: set[Tensor] = set()
        self._still_to_come = StillToCome()

    def check_pass(self, parameter: Tensor) -> None:
        """Refuse a second backward at its first gradient, even where that is of a parameter which was not updated yet."""
        now = current_pass() if self._one_pass else None
        if now is None:
            return
        if self._pass is not None and now != self._pass:
            raise Refused(
                f"{self._describe(parameter)}: a second backward() before optimizer.step(), after the first has updated "
                "parameters. Call optimizer.step() after each backward; or add the losses up and call backward() once; or "
                "declare the micro-batches with accumulation='hold' or 'state'."
            )
        self._pass = now

    def check_whole(self, parameter: Tensor, *, seen: bool) -> None:
        """Its gradient is about to go to communication; `seen`: another part of it was measured in this pass.

        Raises:
            Refused: it is a part of a gradient, and would be used as if it were the whole.
        """
        if seen or parameter in self._still_to_come:
            raise Refused(
                f"{self._describe(parameter)}: its gradient comes in several parts in one backward (reentrant checkpointing of "
                "a layer that is used several times), and each would be used as if it were the whole. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or accumulation='hold'."
            )
        if parameter in self._sent:
            raise Refused(
                f"{self._describe(parameter)}: a second gradient of it arrived while the first was being averaged. Call "
                "optimizer.step() after each backward; or declare the micro-batches with accumulation='hold' or 'state'."
            )

    def send(self, parameter: Tensor) -> None:
        """Its gradient goes to communication now."""
        self._sent.add(parameter)

    def delivered(self, parameters: Iterable[Tensor]) -> None:
        """Communication has handed them over."""
        self._sent.difference_update(parameters)

    def end_pass(self) -> None:
        """Nothing is under way any more."""
        self._sent.clear()

    def close(self) -> None:
        """The step is over."""
        self._pass = None
        self._sent.clear()
        self._still_to_come.forget()
