"""`release.verify(loss_fn)`: one plain and one released step from the same state, compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InvalidArgumentError, RefusedError
from .autograd.saved_context import SavedContext
from .changing_betas import BETAS_OF_MOMENTS, set_betas_of_moments
from .communication.shards import local
from .releasable import ReleasableOptimizer

Copies = dict[str, Tensor]


class TrainingState:
    """A copy of all that a training step changes: parameters, buffers, optimizer state, and the random state of torch.

    Args:
        model: its parameters and buffers are copied.
        optimizer: its state is copied.
    """

    def __init__(self, model: nn.Module, optimizer: ReleasableOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._tensors = {tensor: tensor.detach().clone() for tensor in self._all_tensors()}
        self._state = {p: {key: _copy(value) for key, value in state.items()} for p, state in optimizer.state.items()}
        self._betas = [tuple(map(_copy, group[BETAS_OF_MOMENTS])) for group in optimizer.param_groups]
        self._skipped = optimizer.skipped
        self._random = SavedContext(optimizer._parameters(), preserve_rng_state=True)
        self._random.save_rng_state()

    def _all_tensors(self) -> list[Tensor]:
        return [*dict.fromkeys([*self._model.parameters(), *self._model.buffers(), *self._optimizer._parameters()])]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back to what it was."""
        for tensor, copy in self._tensors.items():
            tensor.copy_(copy)
        for parameter in list(self._optimizer.state):
            before = self._state.get(parameter)
            if before is None:
                del self._optimizer.state[parameter]
            else:
                self._optimizer.state[parameter].update({key: _copy(value) for key, value in before.items()})
        for group, betas in zip(self._optimizer.param_groups, self._betas, strict=True):
            set_betas_of_moments(group, betas)
        self._optimizer._forget_groups()
        self._optimizer.skipped = self._skipped
        self._random.restore_rng_state(0)

    @torch.no_grad()
    def results(self) -> Copies:
        """Copy what a step has made: the local part of every parameter and of its optimizer state, by name."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._model.named_parameters()}
        found: Copies = {}
        for number, parameter in enumerate(self._optimizer._parameters()):
            name = repr(names[parameter]) if parameter in names else f"number {number} of the optimizer"
            found[name] = local(parameter.detach()).clone()
            for key, value in self._optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"{name}, {key}"] = local(value).clone()
        return found


def verify(release: Any, loss_fn: Callable[[], Tensor]) -> None:
    """Carry out `Release.verify`."""
    model, optimizer = release.model, release.optimizer
    if not callable(loss_fn):
        raise InvalidArgumentError(
            f"loss_fn is a {type(loss_fn).__name__}; give a function without arguments that returns the loss."
        )
    if any(parameter.grad is not None for parameter in optimizer._parameters()):
        raise RefusedError("verify() takes steps of its own, and there are gradients; call optimizer.zero_grad() first.")
    before = TrainingState(model, optimizer)
    losses: list[Tensor] = []

    def loss() -> Tensor:
        found = loss_fn()
        if not isinstance(found, Tensor) or found.dim() != 0:
            raise InvalidArgumentError("loss_fn must return the loss as a 0-d tensor, for instance loss.mean().")
        if any(found is other for other in losses):
            raise InvalidArgumentError(
                "loss_fn returned one tensor twice; compute the loss in it, as in lambda: model(batch).mean()."
            )
        losses.append(found)
        return found

    def plain() -> Copies:
        with release.paused():
            loss().backward()
        return step()

    def released() -> Copies:
        release.guard(loss()).backward()
        return step()

    def step() -> Copies:
        optimizer.step()
        return before.results()

    with _restoring(before, optimizer):
        expected = plain()
    with _restoring(before, optimizer):
        found = released()
    different = _first_difference(expected, found)
    if different is None:
        return
    with _restoring(before, optimizer):
        again = plain()
    if (random := _first_difference(expected, again)) is not None:
        raise RefusedError(
            f"parameter {random} differs between two plain steps from the same state: loss_fn is not deterministic, so there "
            "is nothing to compare with. Use one batch, random numbers of torch only (which are restored), and "
            "torch.use_deterministic_algorithms(True)."
        )
    raise RefusedError(
        f"parameter {different} differs after a released step from that after a plain one, by up to "
        f"{_distance(expected[different], found[different]):.3g}. Something reads a parameter during backward after its "
        "update: a function that is computed again (activation checkpointing, microbatch_blocks) and uses weight.detach(), "
        ".data or another module's weight, or saved_tensors_hooks that keep a reference. Pass such a weight as an argument of "
        "the function, or use accumulation='hold', which updates after the backward."
    )


@contextlib.contextmanager
def _restoring(before: TrainingState, optimizer: ReleasableOptimizer) -> Iterator[None]:
    try:
        yield
        optimizer.zero_grad()
    except BaseException:
        with contextlib.suppress(RefusedError):
            optimizer.zero_grad()
        raise
    finally:
        before.restore()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _first_difference(expected: Copies, found: Copies) -> str | None:
    """Return the name of the first tensor that differs in a bit."""
    for name, tensor in expected.items():
        other = found[name]
        if tensor.dtype is not other.dtype or not torch.equal(_bits(tensor), _bits(other)):
            return name
    return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
