"""A model with its optimizer, plain or released, and what a loop with release stands for in a plain one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from tests.support.random_graphs import DIVIDED, SAMPLES, WIDTH, Graph, RandomModel
from tests.support.torch_models import ADAM_FAMILY, perform_all
from torch import Tensor, nn

from penstock.core.release import Action
from penstock.torch_frontend import microbatch_blocks, prepare_for_gradient_release, release_gradients

Snapshot = dict[str, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How gradients are released; the attributes are the arguments of `release_gradients`, and lenient: the other function."""

    accumulation: str | None = None
    lenient: bool = False
    max_norm: float | None = None
    per_tensor: bool = False
    scaled: bool = False
    sync: bool = False
    keep_bytes: int = 0
    on_nonfinite: str = "propagate"

    @property
    def guarded(self) -> bool:
        """Whether backward() needs guard()."""
        return self.accumulation is None and not self.lenient and (self.exact_norm is not None or self.scaled)

    @property
    def exact_norm(self) -> float | None:
        return None if self.per_tensor else self.max_norm

    @property
    def in_state(self) -> bool:
        """Whether gradients go into the moments during backward()."""
        return self.lenient or self.accumulation == "state"

    @property
    def uses_parts(self) -> bool:
        """Whether the first of several parts of a gradient would be used by itself."""
        return self.accumulation != "hold" or self.sync

    def is_possible(self) -> bool:
        """Whether `release_gradients` accepts it."""
        if self.lenient:
            return self == Mode(lenient=True, on_nonfinite=self.on_nonfinite) and self.on_nonfinite != "raise"
        in_step = not self.sync or self.exact_norm is not None or self.scaled
        at_once = self.guarded or (self.accumulation == "hold" and in_step)
        return not (
            (self.sync and self.accumulation is None)
            or (self.keep_bytes and not self.guarded)
            or (self.accumulation == "state" and (self.exact_norm is not None or self.scaled))
            or (self.on_nonfinite == "raise" and not at_once)
            or (self.per_tensor and self.max_norm is None)
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The optimizer's."""

    rule: int = 1
    dtype: torch.dtype = torch.float32
    compensation: str = "auto"
    arguments: tuple[tuple[str, Any], ...] = ()
    outside: bool = False  # the optimizer has a parameter that is not the model's


class World:
    """One model with its optimizer."""

    def __init__(self, graph: Graph, settings: Settings, mode: Mode, released: bool) -> None:
        torch.manual_seed(0)
        self.mode = mode
        self.model = RandomModel(graph).to(settings.dtype)
        self.outside = nn.Parameter(torch.ones(())) if settings.outside else None
        outside = [] if self.outside is None else [self.outside]
        trained = [*self.model.parts.parameters()]
        groups = [{"params": trained[::2]}, {"params": [*trained[1::2], *outside], "lr": 2e-2}]
        arguments = {"lr": 1e-2, "compensation": settings.compensation, "on_nonfinite": mode.on_nonfinite}
        arguments |= {"gradient_release": True} if mode.lenient and released else {}
        self.optimizer = ADAM_FAMILY[settings.rule](groups, **arguments, **dict(settings.arguments))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if mode.scaled else None
        if graph.chunks:
            divided = [m for p, m in zip(graph.parts, self.model.parts, strict=True) if p.kind in DIVIDED and not p.wrap]
            if divided:
                microbatch_blocks(list(dict.fromkeys(divided)), chunks=graph.chunks)
        self.last = False
        self.release: Any = None
        self.kept: Tensor | None = None
        self.index = 0
        self.noticed: dict[str, Any] = {}  # what calls have returned
        if released:
            self.release_again()
        self.random = torch.get_rng_state()

    def release_again(self) -> None:
        mode = self.mode
        if mode.lenient:
            prepare_for_gradient_release(self.model, self.optimizer)
            self.release = self.optimizer.release
            return
        self.release = release_gradients(
            self.model,
            self.optimizer,
            max_norm=mode.max_norm,
            clipping="per_tensor" if mode.per_tensor else "exact",
            accumulation=mode.accumulation,
            sync=(lambda: self.last) if mode.sync else None,
            scaler=self.scaler,
            keep_bytes=mode.keep_bytes,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Random numbers in this context are this world's."""
        torch.set_rng_state(self.random)
        try:
            yield
        finally:
            self.random = torch.get_rng_state()

    def named(self) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        return named if self.outside is None else {**named, "outside": self.outside}

    def snapshot(self) -> Snapshot:
        """A copy of every parameter and of its state."""
        state = self.optimizer.state
        found: Snapshot = {}
        for name, p in self.named().items():
            tensors = {key: x for key, x in state.get(p, {}).items() if isinstance(x, Tensor)}
            found[name] = {"": p.detach().clone(), **{key: x.clone() for key, x in tensors.items()}}
        return found

    def copy_from(self, other: World) -> None:
        """Take over everything that training has made."""
        self.model.load_state_dict(copy.deepcopy(other.model.state_dict()))
        with torch.no_grad():
            for mine, its in zip(self.named().values(), other.named().values(), strict=True):
                mine.copy_(its)
                mine.grad = None if its.grad is None else its.grad.clone()
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        if self.scaler is not None:
            for scaler in (self.scaler, other.scaler):
                with contextlib.suppress(AssertionError):  # nothing to update from
                    scaler.update()
            self.scaler.load_state_dict(other.scaler.state_dict())
        self.random, self.index, self.kept = other.random.clone(), other.index, None

    @torch.no_grad()
    def take_buffers(self, other: World) -> None:
        for mine, its in zip(self.model.buffers(), other.model.buffers(), strict=True):
            mine.copy_(its)

    def losses(self) -> list[Tensor]:
        """The losses of the next batch; 0-d each."""
        self.index += 1
        generator = torch.Generator().manual_seed(self.index)
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(SAMPLES, WIDTH, generator=generator).to(dtype).requires_grad_(self.model.graph.leaf)
        found = self.model.loss(x, self.index)
        if self.outside is not None:
            found[0] = found[0] * self.outside
        self.noticed["input"] = x
        return found

    def prepared(self, *, guarded: bool) -> list[Tensor]:
        """The losses as backward() is called on them: guarded and scaled."""
        losses = self.losses()
        if self.mode.guarded or self.scaler is not None:
            losses = [torch.stack(losses).sum()]  # guard() takes one loss
        if self.release is not None and guarded:
            losses = [self.release.guard(loss) for loss in losses]
        return losses if self.scaler is None else [self.scaler.scale(loss) for loss in losses]


class Plain:
    """What the loop means that the released one stands for: the same rule, in a step() of gradients that are all there."""

    def __init__(self, world: World) -> None:
        self.world, self.mode = world, world.mode
        self.hooked: dict[str, Tensor] = {}
        self.accumulated: dict[str, Tensor] = {}
        self.one_by_one = False  # gradients are judged by themselves
        self.steps = 0
        self.skipped = False  # by the scaler, since the last step
        world.optimizer.register_step_post_hook(lambda *_: self.stepped())
        self.boundary()

    def stepped(self) -> None:
        """After step() no gradient is left, as under release; a plain loop calls zero_grad()."""
        self.steps += 1
        self.skipped = False
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for p in self.optimized().values():
            p.grad = None

    def optimized(self) -> dict[str, Tensor]:
        trained = {id(p) for group in self.world.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.world.named().items() if id(p) in trained}

    def boundary(self) -> None:
        """Parameters that were unfrozen or added are released from now on."""
        self.hooked |= {n: p for n, p in self.optimized().items() if p.requires_grad and n != "outside"}
        self.one_by_one = self.skipped = False

    def boundary_of_new_parameters(self) -> None:
        """Parameters of an added group are released at once."""
        new = self.world.optimizer.param_groups[2:]
        known = {id(p) for group in new for p in group["params"]}
        self.hooked |= {n: p for n, p in self.optimized().items() if id(p) in known and p.requires_grad}

    def apply_accumulated(self) -> None:
        perform_all(self.world.optimizer, [(p, None, Action.APPLY) for p in self.accumulated.values()])
        self.accumulated.clear()

    def used(self, delivered: dict[str, Tensor], *, last: bool) -> None:
        """A backward has ended, and has given these parameters a gradient: in the moments, they are used one by one."""
        self.one_by_one |= not self.mode.guarded and (self.mode.accumulation != "hold" or last)
        if not self.mode.in_state:
            return
        tasks = []
        for name, p in delivered.items():
            gradient, first = p.grad, name not in self.accumulated
            p.grad = None
            if self.mode.on_nonfinite == "skip" and not gradient.isfinite().all():
                if last and self.accumulated.pop(name, None) is not None:
                    tasks.append((p, None, Action.APPLY))
                continue
            self._clip_each([gradient])
            if last:
                self.accumulated.pop(name, None)
                tasks.append((p, gradient, Action.UPDATE if first else Action.UPDATE_LAST))
            else:
                self.accumulated[name] = p
                tasks.append((p, gradient, Action.ACCUMULATE_FIRST if first else Action.ACCUMULATE))
        perform_all(self.world.optimizer, tasks)

    def step(self) -> None:
        """Clip as declared, and step."""
        world, mode = self.world, self.mode
        last = {name: p for name, p in self.accumulated.items() if p.grad is not None or not mode.lenient}
        tasks = []
        for name, p in last.items():
            gradient, p.grad = p.grad, None
            if gradient is not None:
                self._clip_each([gradient])
            tasks.append((p, gradient, Action.APPLY if gradient is None else Action.UPDATE_LAST))
            del self.accumulated[name]
        perform_all(world.optimizer, tasks)
        if world.scaler is not None and mode.max_norm is not None:
            try:
                world.scaler.unscale_(world.optimizer)
            except RuntimeError as error:
                if "already been called" not in str(error):  # nothing is clipped where scaler.step() raises
                    raise
        present = [p for p in self.optimized().values() if p.grad is not None]
        if mode.on_nonfinite == "skip" and self.one_by_one:
            for p in present:
                p.grad = p.grad if p.grad.isfinite().all() else None
            present = [p for p in present if p.grad is not None]
        self._clip(present)
        if world.scaler is None:
            world.optimizer.step()
        else:
            self.skipped = True
            world.scaler.step(world.optimizer)

    def _clip(self, parameters: list[Tensor]) -> None:
        if self.mode.exact_norm is not None and parameters:
            given = {id(p) for p in parameters}
            ordered = [p.grad for group in self.world.optimizer.param_groups for p in group["params"] if id(p) in given]
            squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in ordered]
            scale_to(float(torch.stack(squares).sum().sqrt()), self.mode.exact_norm, ordered)
        self._clip_each([p.grad for p in parameters])

    def _clip_each(self, gradients: list[Tensor]) -> None:
        if self.mode.per_tensor:
            for gradient in gradients:
                scale_to(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)), self.mode.max_norm, [gradient])


def scale_to(norm: float, max_norm: float, gradients: list[Tensor]) -> None:
    """Clip as `clip_grad_norm_` does, by a norm in float64."""
    factor = max_norm / (norm + 1e-6)
    for gradient in gradients:
        if not factor > 1.0:
            gradient.mul_(factor)
