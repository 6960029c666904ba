"""The calls of a training loop, each run with a plain model and with a released one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.support.judge import Judge, same_bits
from tests.support.worlds import World
from torch import Tensor

from penstock.torch_frontend import remove_gradient_release
from penstock.torch_frontend.communication.shards import is_released

CLIP = 0.05


class Twins(Judge):
    """The user's calls; each judges itself."""

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
        if self.dirty:
            return
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

        self.judge_backward(run, last=last, spoils=spoil is not None)

    def again(self) -> None:
        """Another backward of a graph that was kept."""
        if not self.dirty and self.released.kept and self.plain.world.kept:
            self.judge_backward(lambda world: torch.autograd.backward(world.kept, retain_graph=True), last=self.released.last)

    def paused(self) -> None:
        """A backward whose gradients stay in `.grad`."""

        def run(world: World) -> None:
            if world.release is None:
                torch.autograd.backward(world.prepared(guarded=False))
            else:
                with world.release.paused():
                    torch.autograd.backward(world.prepared(guarded=True))

        if not self.dirty:
            self.both(run)
            self.record()

    def step(self) -> None:
        if self.dirty:
            discards = self.released.scaler is not None  # a scaled gradient may be left by paused()
            self.close(self.released.optimizer.zero_grad if discards else self.released.optimizer.step)
            return
        before = self.plain.steps

        def run(world: World) -> None:
            if world is self.plain.world:
                self.plain.step()
            elif world.scaler is None:
                world.optimizer.step()
            else:
                world.scaler.step(world.optimizer)

        if self.both(run, released_first=True):
            self.compare("step()")
            self.steps += 1
            if self.plain.steps > before:
                self.start_step()

    def zero_grad(self) -> None:
        if self.mode.in_state and not self.dirty:
            self.history += self.possible()  # step() may follow a refusal
        if self.dirty:
            self.close(self.released.optimizer.zero_grad)
        elif self.both(lambda world: world.optimizer.zero_grad()):
            if self.failed and self.ahead:
                self.allowed = self.possible()
                self.resume()
            else:
                self.compare("zero_grad()")
                self.start_step()

    def unscale(self) -> None:
        self.plainly(lambda world: world.scaler and world.scaler.unscale_(world.optimizer))

    def update_scale(self) -> None:
        self.plainly(lambda world: world.scaler and world.scaler.update())

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
        if self.plainly(run, writes_gradients=True) and not (self.failed or late or self.released.scaler):
            torch.testing.assert_close(norms[0].float(), norms[1].float(), rtol=2e-2, atol=1e-6, equal_nan=True)

    def scale_a_gradient(self) -> None:
        one = self._with_gradient()
        self.plainly(
            lambda world: None if one is None or (p := world.named()[one]).grad is None else p.grad.mul_(0.5),
            writes_gradients=True,
        )

    def _with_gradient(self) -> str | None:
        """The first parameter whose `.grad` is not None in the released world; in the plain one others may have none."""
        return next((name for name, p in self.released.named().items() if p.grad is not None), None)

    def clear_gradients(self, how: str = "model") -> None:
        """Without the optimizer: noticed at the next boundary, if it comes too late."""

        one = self._with_gradient()

        def run(world: World) -> None:
            if how == "one":
                if one is not None:
                    world.named()[one].grad = None
            else:
                world.model.zero_grad(set_to_none=how == "model")

        self.plainly(run, writes_gradients=True)

    def evaluate(self) -> None:
        outputs: list[Tensor] = []

        def run(world: World) -> None:
            world.model.eval()
            with torch.no_grad():
                outputs.append(torch.stack(world.losses()).sum())
            world.model.train()

        if self.plainly(run) and not self.ahead:
            assert same_bits(*outputs), "evaluation differs"

    def grad_values(self) -> None:
        """torch.autograd.grad, which must neither update nor differ."""
        values: list[Any] = []

        def run(world: World) -> None:
            trained = [p for p in world.named().values() if p.requires_grad]
            values.append(torch.autograd.grad(torch.stack(world.losses()).sum(), trained, allow_unused=True))

        if self.plainly(run) and len(values) == 2 and not self.ahead:
            assert all(a is b is None or same_bits(a, b) for a, b in zip(*values, strict=True)), "autograd.grad differs"

    def set_setting(self, name: str = "lr") -> None:
        self.history += self.possible()
        self.settings_before = [copy.copy(group) for group in self.released.optimizer.param_groups]
        value = {"lr": 0.03, "weight_decay": 0.2, "eps": 1e-5}[name] / (1 + self.steps % 3)
        self.plainly(lambda world: [group.update({name: value}) for group in world.optimizer.param_groups])

    def write(self, part: int = 0, value: float = 0.9) -> None:
        """The user multiplies a parameter."""
        if self.dirty:
            return
        name = list(self.released.named())[part % len(self.released.named())]
        self.written.add(name)

        @torch.no_grad()
        def run(world: World) -> None:
            world.named()[name].mul_(value)

        self.plainly(run)

    def freeze(self, part: int = 0) -> None:
        """Or unfreeze."""

        def run(world: World) -> None:
            parts = world.model.parts
            for p in parts[part % len(parts)].parameters():
                p.requires_grad_(not p.requires_grad)

        self.plainly(run)

    def round_trip(self) -> None:
        """Save and load the optimizer."""
        self.first_released(lambda world: world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict())))

    def save(self) -> None:
        saved: list[Any] = []
        optimizers = [world.optimizer for world in (self.released, self.plain.world)]
        models = [world.model for world in (self.released, self.plain.world)]
        if self.dirty or self.plain.accumulated or self.ahead:
            return
        for model, optimizer in zip(models, optimizers, strict=True):
            saved.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        self.saved = saved

    def load(self) -> None:
        """Go back to what was saved."""
        if not self.saved or len(self.saved[0][1]["param_groups"]) != len(self.released.optimizer.param_groups):
            return

        def run(world: World) -> None:
            model, optimizer = copy.deepcopy(self.saved[world is self.plain.world])
            world.optimizer.load_state_dict(optimizer)
            world.model.load_state_dict(model)

        self.first_released(run)

    def add_group(self) -> None:
        """The late layer is used; at the next call it comes to the optimizer."""

        def run(world: World) -> None:
            if not world.model.uses_late:
                world.model.uses_late = True
            elif len(world.optimizer.param_groups) == 2:
                world.optimizer.add_param_group({"params": [world.model.late.weight], "lr": 5e-3})

        self.first_released(run)
        self.plain.boundary_of_new_parameters()
        self.record()  # the layer may have a gradient already

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
        if any(p.requires_grad for p in self.plain.hooked.values()) and self.first_released(run):
            if self.ahead:
                self.compare("remove()")
                self.start_step()
            self.released.release_again()

    def finish(self) -> None:
        """Close the step, which must be possible after every error."""
        for close in (self.zero_grad, self.step, self.zero_grad):
            if self.dirty:
                close()
        assert not self.dirty, f"the step cannot be closed: {self.refusals[-1]}"
        if not self.ahead:
            self.compare("the end")
