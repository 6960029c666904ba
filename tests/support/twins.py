"""A plain model and a released one that get the same calls: every outcome is equal, bit for bit, or refused in time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.support.random_graphs import Graph, Planted
from tests.support.torch_models import bits
from tests.support.worlds import Mode, Plain, Settings, Snapshot, World
from torch import Tensor

from penstock.core.errors import PenstockError
from penstock.torch_frontend import remove_gradient_release
from penstock.torch_frontend.communication.shards import is_released

CHANGED_IN_PLACE = "modified by an inplace operation"
"""Of torch: a graph from before an update is gone through after it. As loud as a refusal, while release is ahead."""

CLIP = 0.05


class Twins:
    """Both worlds, and the judge of what they do.

    Attributes:
        refusals: the texts of the errors that penstock has raised.
        dirty: an error was raised, and the step is not closed.
        ahead: release has updated parameters that the plain loop updates in step().
        steps: how many have been compared.
    """

    def __init__(self, graph: Graph, settings: Settings, mode: Mode) -> None:
        self.mode = mode
        self.released = World(graph, settings, mode, released=True)
        self.plain = Plain(World(graph, settings, mode, released=False))
        self.worlds = (self.plain.world, self.released)
        self.refusals: list[str] = []
        self.dirty = self.ahead = self.failed = False
        self.steps = 0
        self._written: set[str] = set()
        self._allowed: list[Snapshot] = []
        self._saved: list[Any] = []
        self._start_step()

    # -- the user's calls ------------------------------------------------------------------------------------------------

    def backward(
        self,
        *,
        guarded: bool = True,
        last: bool = True,
        retain: bool = False,
        fail: int | None = None,
        in_forward: bool = False,
        second_pass: bool = False,
        spoil: int | None = None,
        freeze: int | None = None,
    ) -> None:
        """A forward and its backward; they may fail at a part, overflow at one, or freeze one in between."""
        if self.dirty or (self.ahead and self.released.outside is not None and (fail, freeze) != (None, None)):
            return  # known: what is not released gets a part of a failed backward from parameters that are ahead, unnoticed
        second_pass = second_pass and self.mode.guarded and guarded
        self.released.last = last
        if self.mode.lenient:
            self.released.optimizer.optimizer_accumulation = not last

        def run(world: World) -> None:
            model = world.model
            model.failure = None if second_pass and world is self.plain.world else fail
            model.in_forward, model.calls_before, model.spoiled = in_forward, int(second_pass), spoil
            try:
                losses = world.prepared(guarded=guarded)
                if freeze is not None:
                    model.parts[freeze % len(model.parts)].requires_grad_(False)
                world.kept = losses if retain else None
                torch.autograd.backward(losses, retain_graph=retain)
            finally:
                model.failure = model.spoiled = None

        self._backward(run, last=last, spoils=spoil is not None)

    def again(self) -> None:
        """Another backward of a graph that was kept."""
        if not self.dirty and self.released.kept and self.plain.world.kept:
            self._backward(lambda world: torch.autograd.backward(world.kept, retain_graph=True), last=self.released.last)

    def paused(self) -> None:
        """A backward whose gradients stay in `.grad`."""

        def run(world: World) -> None:
            if world.release is None:
                torch.autograd.backward(world.prepared(guarded=False))
            else:
                with world.release.paused():
                    torch.autograd.backward(world.prepared(guarded=True))

        if not self.dirty:
            self._both(run)
            self._record()

    def step(self) -> None:
        if self.dirty:
            discards = self.released.scaler is not None  # a scaled gradient may be left by paused()
            self._close(self.released.optimizer.zero_grad if discards else self.released.optimizer.step)
            return
        before = self.plain.steps

        def run(world: World) -> None:
            if world is self.plain.world:
                self.plain.step()
            elif world.scaler is None:
                world.optimizer.step()
            else:
                world.scaler.step(world.optimizer)

        if self._both(run, released_first=True):
            self.compare("step()")
            self.steps += 1
            if self.plain.steps > before:
                self._start_step()

    def zero_grad(self) -> None:
        if self.dirty:
            self._close(self.released.optimizer.zero_grad)
        elif self._both(lambda world: world.optimizer.zero_grad()):
            if self.failed and self.ahead:
                self._allowed = self._possible()
                self._resume()
            else:
                self.compare("zero_grad()")
                self._start_step()

    def unscale(self) -> None:
        self._plainly(lambda world: world.scaler and world.scaler.unscale_(world.optimizer))

    def update_scale(self) -> None:
        self._plainly(lambda world: world.scaler and world.scaler.update())

    def clip(self, declared: bool = False) -> None:
        """The user's own clipping: repeated, where it was declared."""
        norms: list[Tensor] = []
        declared = declared and self.mode.exact_norm is not None
        max_norm = self.mode.exact_norm if declared else CLIP
        clipped = declared and any(is_released(p.grad) for p in self.released.model.parameters())

        def run(world: World) -> None:
            parameters = list(world.model.parameters())
            if world is self.plain.world and clipped:
                grads = [p.grad for p in parameters if p.grad is not None]
                norms.append(torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(()))
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

        late = self.plain.optimized().keys() < self.plain.world.named().keys()
        if self._plainly(run) and not (self.failed or late or self.released.scaler):
            torch.testing.assert_close(norms[0].float(), norms[1].float(), rtol=2e-2, atol=1e-6, equal_nan=True)

    def scale_a_gradient(self) -> None:
        self._plainly(lambda world: next((p.grad.mul_(0.5) for p in world.named().values() if p.grad is not None), None))

    def clear_gradients(self, how: str = "model") -> None:
        """Without the optimizer: noticed at the next boundary, if it comes too late."""

        one = next((name for name, p in self.released.named().items() if p.grad is not None), None)

        def run(world: World) -> None:
            if how == "one":
                if one is not None:
                    world.named()[one].grad = None
            else:
                world.model.zero_grad(set_to_none=how == "model")

        self._plainly(run)

    def evaluate(self) -> None:
        outputs: list[Tensor] = []

        def run(world: World) -> None:
            world.model.eval()
            with torch.no_grad():
                outputs.append(torch.stack(world.losses()).sum())
            world.model.train()

        if self._plainly(run) and not self.ahead:
            assert same_bits(*outputs), "evaluation differs"

    def grad_values(self) -> None:
        """torch.autograd.grad, which must neither update nor differ."""
        values: list[Any] = []

        def run(world: World) -> None:
            trained = [p for p in world.named().values() if p.requires_grad]
            values.append(torch.autograd.grad(torch.stack(world.losses()).sum(), trained, allow_unused=True))

        if self._plainly(run) and len(values) == 2 and not self.ahead:
            assert all(a is b is None or same_bits(a, b) for a, b in zip(*values, strict=True)), "autograd.grad differs"

    def set_setting(self, name: str = "lr") -> None:
        self._history += self._possible()
        self._settings = [copy.copy(group) for group in self.released.optimizer.param_groups]
        value = {"lr": 0.03, "weight_decay": 0.2, "eps": 1e-5}[name] / (1 + self.steps % 3)
        self._plainly(lambda world: [group.update({name: value}) for group in world.optimizer.param_groups])

    def write(self, part: int = 0, value: float = 0.9) -> None:
        """The user multiplies a parameter."""
        if self.dirty:
            return
        name = list(self.released.named())[part % len(self.released.named())]
        self._written.add(name)

        @torch.no_grad()
        def run(world: World) -> None:
            world.named()[name].mul_(value)

        self._plainly(run)

    def freeze(self, part: int = 0) -> None:
        """Or unfreeze."""

        def run(world: World) -> None:
            parts = world.model.parts
            for p in parts[part % len(parts)].parameters():
                p.requires_grad_(not p.requires_grad)

        self._plainly(run)

    def round_trip(self) -> None:
        """Save and load the optimizer."""
        self._first_released(lambda world: world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict())))

    def save(self) -> None:
        saved: list[Any] = []
        optimizers = [world.optimizer for world in (self.released, self.plain.world)]
        models = [world.model for world in (self.released, self.plain.world)]
        if self.dirty or self.plain.accumulated or self.ahead:
            return
        for model, optimizer in zip(models, optimizers, strict=True):
            saved.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        self._saved = saved

    def load(self) -> None:
        """Go back to what was saved."""
        if not self._saved or len(self._saved[0][1]["param_groups"]) != len(self.released.optimizer.param_groups):
            return

        def run(world: World) -> None:
            model, optimizer = copy.deepcopy(self._saved[world is self.plain.world])
            world.optimizer.load_state_dict(optimizer)
            world.model.load_state_dict(model)

        self._first_released(run)

    def add_group(self) -> None:
        """The late layer is used; at the next call it comes to the optimizer."""

        def run(world: World) -> None:
            if not world.model.uses_late:
                world.model.uses_late = True
            elif len(world.optimizer.param_groups) == 2:
                world.optimizer.add_param_group({"params": [world.model.late.weight], "lr": 5e-3})

        self._first_released(run)
        self.plain.boundary_of_new_parameters()

    def remove(self) -> None:
        """Remove the release, and release again. Where release is ahead, this is the plain loop's step()."""
        if self.dirty or self.failed:
            return

        def run(world: World) -> None:
            if world is not self.released:
                if self.ahead:  # what waits in `.grad` waits on
                    waiting = [name for name, p in self.released.named().items() if p.grad is not None]
                    kept = [(p, p.grad) for name, p in world.named().items() if name in waiting]
                    for p, _ in kept:
                        p.grad = None
                    self.plain.step()
                    for p, gradient in kept:
                        p.grad = gradient
                elif self.mode.lenient:
                    self.plain.apply_accumulated()
            elif self.mode.lenient:
                remove_gradient_release(world.model)
            else:
                world.release.remove()

        scaler = self.plain.world.scaler
        if self.ahead and scaler is not None:
            return
        if any(p.requires_grad for p in self.plain.hooked.values()) and self._first_released(run):
            if self.ahead:
                self.compare("remove()")
                self._start_step()
            self.released.release_again()

    # -- the judge -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Close the step, which must be possible after every error."""
        for close in (self.zero_grad, self.step, self.zero_grad):
            if self.dirty:
                close()
        assert not self.dirty, f"the step cannot be closed: {self.refusals[-1]}"
        if not self.ahead:
            self.compare("the end")

    def compare(self, where: str) -> None:
        plain, released = self.plain.world.snapshot(), self.released.snapshot()
        for name, expected in plain.items():
            assert same(released[name], expected), f"{name} differs after {where}: {differing(released[name], expected)}"

    def _backward(self, run: Callable[[World], None], *, last: bool, spoils: bool = False) -> None:
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
                self._history += self._possible()
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
                self._record()
                found = {name: p for name, p in self.plain.hooked.items() if p.grad is not None}
                new = {n: p for n, p in found.items() if versions.get(id(p)) != (id(p.grad), p.grad._version)}
                self.plain.used(new, last=last)

        clean = self._both(run_and_use)
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

    def _both(self, run: Callable[[World], None], *, released_first: bool = False) -> bool:
        """Run in both worlds, and judge the errors; whether there was none. released_first: if refused, the other waits."""
        released = _attempt(run, self.released) if released_first else None
        refused = isinstance(released, PenstockError)
        plain = None if refused else _attempt(run, self.plain.world)
        released = released if released_first else _attempt(run, self.released)
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

    def _plainly(self, run: Callable[[World], Any]) -> bool:
        """A call that is no backward and closes nothing."""
        if self.dirty:
            return False
        failed = self.failed
        clean = self._both(run)
        self.failed = failed
        return clean

    def _first_released(self, run: Callable[[World], Any]) -> bool:
        """A call that changes nothing where it is refused, so that the plain loop leaves it out."""
        if self.dirty:
            return False
        before = self.released.snapshot()
        error = _attempt(run, self.released)
        if error is None:
            assert _attempt(run, self.plain.world) is None
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
        self._allowed = self._possible()
        self._check_allowed(f"the refusal {error}")

    def _close(self, call: Callable[[], Any]) -> None:
        """step() or zero_grad() after an error: it ends the step, or says what else does."""
        error = _attempt(lambda world: call(), self.released)
        if isinstance(error, PenstockError) and self._settings:  # a setting that changed too late is set back
            for world in self.worlds:
                for group, before in zip(world.optimizer.param_groups, self._settings, strict=False):
                    group |= {name: value for name, value in before.items() if name != "params"}
        if error is None:
            self._resume()
            return
        if not isinstance(error, PenstockError):
            raise AssertionError("a raw error") from error
        self.refusals.append(str(error))
        self._check_allowed(f"the refusal {error}")

    def _resume(self) -> None:
        """Go on in the plain world from where the released one is."""
        self._check_allowed("an error and its step's end")
        assert all(p.grad is None for p in self.plain_named_in(self.released)), "a gradient is left after the step"
        assert self.released.release.ledger.live == 0, "bytes are left in the ledger"
        self.dirty = False
        self.plain.accumulated.clear()
        self.plain.world.copy_from(self.released)
        self._start_step()

    def plain_named_in(self, world: World) -> list[Tensor]:
        return [world.named()[name] for name in self.plain.optimized()]

    def _check_allowed(self, when: str) -> None:
        """Every parameter is as before the step, or as after it."""
        for name, now in self.released.snapshot().items():
            if name not in self._written:
                assert any(same(now, each[name]) for each in self._allowed if name in each), f"{name} is wrong after {when}"

    def _possible(self) -> list[Snapshot]:
        """All that a step of the plain loop could have made of the gradients that there were."""
        with contextlib.ExitStack() as versions:  # for graphs that are still to be gone through
            for p in self.plain.world.named().values():
                versions.enter_context(torch.autograd._unsafe_preserve_version_counter(p))
            return self._try_steps()

    def _try_steps(self) -> list[Snapshot]:
        world, found = self.plain.world, [self._base, *self._history, self.plain.world.snapshot()]
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
            if _attempt(lambda world: self.plain.step(), world) is None:
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

    def _record(self) -> None:
        """Remember the gradients that there are, unscaled."""
        scaler, found = self.plain.world.scaler, self.plain.optimized().items()
        factor = 1.0 if scaler is None else 1.0 / scaler.get_scale()
        gradients = {name: p.grad * factor if scaler else p.grad.clone() for name, p in found if p.grad is not None}
        self._gradients.append(gradients)

    def _start_step(self) -> None:
        self._base = self.plain.world.snapshot()
        self._gradients: list[dict[str, Tensor]] = []
        self._history: list[Snapshot] = []
        self.ahead = self.failed = False
        self._written.clear()
        self._settings: list[dict[str, Any]] = []
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


def _attempt(run: Callable[[World], Any], world: World) -> BaseException | None:
    try:
        with world.running():
            run(world)
    except (Planted, PenstockError, RuntimeError, AssertionError, ValueError) as error:
        return error
    return None
