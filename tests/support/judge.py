"""The judge of a plain model and a released one that get the same calls: equal, bit for bit, or refused in time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from tests.support.random_graphs import Graph, Planted
from tests.support.torch_models import bits
from tests.support.worlds import Mode, Plain, Settings, Snapshot, World
from torch import Tensor

from penstock.core.errors import PenstockError
from penstock.torch_frontend import remove_gradient_release

CHANGED_IN_PLACE = "modified by an inplace operation"
"""Of torch: a graph from before an update is gone through after it. As loud as a refusal, while release is ahead."""


class Judge:
    """Runs calls in both worlds, and compares what they do.

    Attributes:
        refusals: the texts of the errors that penstock has raised.
        dirty: an error was raised, and the step is not closed.
        ahead: release has updated parameters that the plain loop updates in step().
        failed: both worlds have raised the same error in this step.
        steps: how many have been compared.
        written: names of the parameters that the user has written in this step.
        settings_before: the groups before the user changed settings in this step.
        history: what has been possible in this step besides its start and its end.
        allowed: what each parameter may be after a refusal.
        saved: what `load` goes back to.
    """

    def __init__(self, graph: Graph, settings: Settings, mode: Mode) -> None:
        self.mode = mode
        self.released = World(graph, settings, mode, released=True)
        self.plain = Plain(World(graph, settings, mode, released=False))
        self.worlds = (self.plain.world, self.released)
        self.refusals: list[str] = []
        self.dirty = self.ahead = self.failed = False
        self.steps = 0
        self.written: set[str] = set()
        self.allowed: list[Snapshot] = []
        self.saved: list[Any] = []
        self.start_step()

    def compare(self, where: str) -> None:
        plain, released = self.plain.world.snapshot(), self.released.snapshot()
        for name, expected in plain.items():
            assert same(released[name], expected), f"{name} differs after {where}: {differing(released[name], expected)}"

    def judge_backward(self, run: Callable[[World], None], *, last: bool, spoils: bool = False) -> None:
        """Run a backward in both worlds; spoils: its gradient is not finite."""
        mode, was_ahead = self.mode, self.ahead
        last = last and (mode.sync or mode.lenient) and not (mode.accumulation == "hold" and mode.exact_norm is not None)
        last = last and not (mode.accumulation == "hold" and mode.scaled)
        if mode.accumulation is None and not mode.lenient:
            last = True

        def run_and_use(world: World) -> None:
            if world is self.released:
                run(world)
                return
            if mode.in_state:
                self.history += self.possible()
            if mode.guarded and self.plain.skipped:  # an overflow leaves no gradients
                self.plain.clear()
            before = [(p, p.grad) for p in world.named().values()]
            versions = {id(p): (id(g), g._version) for p, g in before if g is not None}
            try:
                run(world)
            except BaseException:
                if mode.guarded:  # the first pass leaves nothing
                    for p, gradient in before:
                        p.grad = gradient
                raise
            finally:
                self.record()
                found = {name: p for name, p in self.plain.hooked.items() if p.grad is not None}
                new = {n: p for n, p in found.items() if versions.get(id(p)) != (id(p.grad), p.grad._version)}
                self.plain.used(new, last=last)

        clean = self.both(run_and_use)
        self.ahead |= last and not mode.in_state
        # Without guard, "skip" leaves out gradients one by one, as is documented, and zero_grad() then closes the step.
        self.failed |= spoils and mode.on_nonfinite == "skip" and not mode.guarded
        if self.dirty or was_ahead:
            return
        if self.failed and mode.guarded and not clean:
            self.compare("a backward that failed")
        if clean:
            inputs = [world.noticed["input"].grad for world in self.worlds]
            assert inputs[0] is inputs[1] is None or same_bits(*inputs), "the gradient of the input differs"
        if mode.in_state and not self.dirty:
            self.compare("backward()")

    def both(self, run: Callable[[World], None], *, released_first: bool = False) -> bool:
        """Run in both worlds, and judge the errors; whether there was none. released_first: if refused, the other waits."""
        released = attempt(run, self.released) if released_first else None
        refused = isinstance(released, PenstockError)
        plain = None if refused else attempt(run, self.plain.world)
        released = released if released_first else attempt(run, self.released)
        if self.ahead:  # a forward may write buffers, from the parameters that there are
            self.plain.world.take_buffers(self.released)
        if released is None:
            assert plain is None, f"the plain loop raises, and release does not: {plain!r}"
            return True
        failed_late = plain is None and isinstance(released, Planted)  # in the second pass of guard()
        if isinstance(released, PenstockError) or failed_late or (self.ahead and CHANGED_IN_PLACE in str(released)):
            self._refused(released)
        elif type(released) is type(plain):
            self.failed = True
        else:
            raise AssertionError(f"release raises {released!r}, the plain loop {plain!r}") from released
        return False

    def plainly(self, run: Callable[[World], Any], *, writes_gradients: bool = False) -> bool:
        """Run a call that is not a backward and does not close a step."""
        if self.dirty:
            return False
        failed = self.failed
        clean = self.both(run)
        self.failed = failed
        if writes_gradients:
            self.record()
        return clean

    def first_released(self, run: Callable[[World], Any]) -> bool:
        """A call that changes nothing where it is refused, so that the plain loop leaves it out."""
        if self.dirty:
            return False
        before = self.released.snapshot()
        error = attempt(run, self.released)
        if error is None:
            assert attempt(run, self.plain.world) is None
            return True
        if not isinstance(error, PenstockError):
            raise AssertionError("a raw error") from error
        self.refusals.append(str(error))
        after = self.released.snapshot()
        assert all(same(after[name], before[name]) for name in before), f"a refused call has changed something: {error}"
        return False

    def _refused(self, error: BaseException) -> None:
        self.refusals.append(str(error))
        self.dirty = True
        self.allowed = self.possible()
        self._check_allowed(f"the refusal {error}")

    def close(self, call: Callable[[], Any]) -> None:
        """step() or zero_grad() after an error: it ends the step, or says what else does."""
        error = attempt(lambda world: call(), self.released)
        if isinstance(error, PenstockError) and self.settings_before:  # a setting that changed too late is set back
            for world in self.worlds:
                for group, before in zip(world.optimizer.param_groups, self.settings_before, strict=False):
                    group |= {name: value for name, value in before.items() if name != "params"}
            self.allowed += self.possible()
        if error is None:
            self.resume()
            return
        if not isinstance(error, PenstockError):
            raise AssertionError("a raw error") from error
        self.refusals.append(str(error))
        self._check_allowed(f"the refusal {error}")

    def resume(self) -> None:
        """Go on in the plain world from where the released one is."""
        self._check_allowed("an error and its step's end")
        assert all(p.grad is None for p in self.plain_named_in(self.released)), "a gradient is left after the step"
        assert self.released.release.ledger.live == 0, "bytes are left in the ledger"
        if self.mode.lenient:  # step() and zero_grad() leave micro-batches in the moments
            remove_gradient_release(self.released.model)
            self.released.release_again()
        self.dirty = False
        self.plain.accumulated.clear()
        self.plain.world.copy_from(self.released)
        self.start_step()

    def plain_named_in(self, world: World) -> list[Tensor]:
        return [world.named()[name] for name in self.plain.optimized()]

    def _check_allowed(self, when: str) -> None:
        """Every parameter is as before the step, or as after it."""
        for name, now in self.released.snapshot().items():
            if name not in self.written:
                assert any(same(now, each[name]) for each in self.allowed if name in each), f"{name} is wrong after {when}"

    def possible(self) -> list[Snapshot]:
        """All that a step of the plain loop could have made of the gradients that there were."""
        with contextlib.ExitStack() as versions:  # for graphs that are still to be gone through
            for p in self.plain.world.named().values():
                versions.enter_context(torch.autograd._unsafe_preserve_version_counter(p))
            return self._try_steps()

    def _try_steps(self) -> list[Snapshot]:
        world, found = self.plain.world, [self._base, *self.history, self.plain.world.snapshot()]
        saved = [(p, p.detach().clone(), p.grad, copied(world.optimizer.state.get(p))) for p in world.named().values()]
        scaler, world.scaler = world.scaler, None
        plain = self.plain
        before = dict(plain.accumulated), plain.steps, plain.one_by_one, plain.skipped
        now = {name: p.grad for name, p in world.named().items() if p.grad is not None}
        for gradients in [now] if self.mode.in_state else self._gradients:
            if scaler is not None and not all(g.isfinite().all() for g in gradients.values()):
                continue
            for name, p in world.named().items():
                p.grad = None if gradients.get(name) is None else gradients[name].clone()
            if attempt(lambda world: self.plain.step(), world) is None:
                found.append(world.snapshot())
            for p, value, _, state in saved:
                with torch.no_grad():
                    p.copy_(value)
                if state is None:
                    world.optimizer.state.pop(p, None)
                else:
                    world.optimizer.state[p].clear()
                    world.optimizer.state[p].update(copied(state))
            plain.accumulated = dict(before[0])
        for p, _, gradient, _ in saved:
            p.grad = gradient
        world.scaler, plain.steps, plain.one_by_one, plain.skipped = scaler, *before[1:]
        return found

    def record(self) -> None:
        """Remember the gradients that there are, unscaled."""
        scaler, found = self.plain.world.scaler, self.plain.optimized().items()
        factor = 1.0 if scaler is None else 1.0 / scaler.get_scale()
        gradients = {name: p.grad * factor if scaler else p.grad.clone() for name, p in found if p.grad is not None}
        self._gradients.append(gradients)

    def start_step(self) -> None:
        self._base = self.plain.world.snapshot()
        self._gradients: list[dict[str, Tensor]] = []
        self.history: list[Snapshot] = []
        self.ahead = self.failed = False
        self.written.clear()
        self.settings_before: list[dict[str, Any]] = []
        self.plain.boundary()


def copied(state: dict[str, Any] | None) -> Any:
    return state and {key: x.clone() if isinstance(x, Tensor) else x for key, x in state.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, where they are numbers."""
    if torch.equal(bits(one), bits(other)):
        return True
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(bits(one.nan_to_num(0.0)), bits(other.nan_to_num(0.0)))


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    keys = sorted(one.keys() | other.keys())
    return [key for key in keys if key not in one or key not in other or not same_bits(one[key], other[key])]


def attempt(run: Callable[[World], Any], world: World) -> BaseException | None:
    try:
        with world.running():
            run(world)
    except (Planted, PenstockError, RuntimeError, AssertionError, ValueError) as error:
        return error
    return None
