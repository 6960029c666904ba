"""The backend "walk": the reverse walk over stacked layers, whose layers make the gradients of the case.

Every tensor of a case belongs to the middle one of three stacked layers. Its neighbours start from the same numbers and get
other gradients, so that a gradient that reaches the wrong layer, or a mean square over the whole stack, is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.compensation import resolve
from ...core.dtypes import compute_dtype
from ..cases import EVERY_DTYPE, Case, Storage
from ..rules import FAMILY
from .jax_arguments import FACTORS, MIDDLE, Recipe, held_of, precision, stack_of_given_gradients
from .jax_transforms import JaxBackend
from .protocol import Held

if TYPE_CHECKING:
    from ..codings import CodingCase, CodingRun
    from ..events import EventCase, EventRun
    from ..memory import Measured, MemoryCase
    from ..trajectories import Trajectory, TrajectoryRun

NOT_QUICK = "compiling takes a second a case; leave out --quick, or name the backend with --backend walk"
"""Why a quick run leaves a case out."""

NOT_USUAL = "compiling takes a second a case; name the backend with --backend walk"
"""Why a run in which nobody named the walk leaves a case out."""

SPIKE_EVERY, CALM = 3, 1 / 16
"""The neighbours' gradients are multiplied by the second one but for every third step, when StableAdamW clips the
neighbours, and would clip the middle layer with them if it took its mean over the stack."""


@functools.lru_cache(maxsize=64)  # cases that differ in their gradients only share what is compiled
def _transform_and_step(recipe: Recipe, dtype: str) -> tuple[Any, Any]:
    """The transform, and the step of a model whose gradients are the batch; `dtype` is the compute dtype."""
    from ... import jax_frontend

    tx = recipe.transform()
    return tx, jax_frontend.make_release_step(stack_of_given_gradients(dtype), tx)


class WalkRun:
    """A stack of layers and its jitted, donated step."""

    def __init__(self, case: Case) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        problem, self.count = case.problem, 0
        self.dtype = problem.dtype
        tx, self.release = _transform_and_step(Recipe.of(case), compute_dtype(problem.dtype))
        with precision(self.dtype):
            layers = {name: jnp.stack([value] * len(FACTORS)) for name, value in problem.initial_parameters().items()}
            self.state = jax_frontend.init_train_state(tx, {"outer": {}, "layers": layers})

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.count += 1
        calm = 1.0 if self.count % SPIKE_EVERY == 0 else CALM
        factors = [factor if layer == MIDDLE else factor * calm for layer, factor in enumerate(FACTORS)]
        batch = {
            name: np.stack([np.asarray(gradient * factor, gradient.dtype) for factor in factors])
            for name, gradient in gradients.items()
        }
        with precision(self.dtype):
            self.state, _ = self.release(self.state, batch)

    def held(self) -> dict[str, Held]:
        import jax

        parameters, state = jax.tree.map(
            lambda leaf: np.array(leaf)[MIDDLE], (self.state.params["layers"], self.state.opt_state.layers)
        )
        return held_of(parameters, state)


class WalkBackend(JaxBackend):
    """The backend "walk": `make_release_step`, layer by layer.

    Args:
        takes: of plain updates, whose cases compile a program each, "all"; "usual": those with the default dtypes of the
            moments and the default compensation, StableAdamW's, whose mean must not be over the stack, on one matrix with
            every compensation, Adam's and AdamW's on one matrix or in float32, schedules and groups both at once, of every
            other rule one in float32; or
            "quick": of these one matrix without schedules, StableAdamW in every dtype but float16, and Adam, whose decay
            is in the gradient, in float32. A quick walk also takes, of event sequences, in-state accumulation only, which
            no other backend of JAX has; of the memory policies clipping, which needs most.
    """

    name = "walk"

    def __init__(self, takes: str = "all") -> None:
        self.takes = takes

    @property
    def quick(self) -> bool:
        """Whether it is that of a quick run."""
        return self.takes == "quick"

    def refuses(self, case: Case) -> str | None:
        if self.takes == "usual" and not self._is_usual(case):
            return NOT_USUAL
        if self.quick and not self._is_quick(case):
            return NOT_QUICK
        return super().refuses(case)

    def _is_usual(self, case: Case) -> bool:
        problem, setting = case.problem, case.problem.setting
        if case.storage.state_dtype is not None or setting.name in ("A", "groups", "schedule"):
            return False
        default = case.storage == Storage(resolve("auto", problem.dtype), None)
        if problem.rule.name not in FAMILY:
            return default and setting.name == EVERY_DTYPE and problem.dtype == "float32"
        matrix = setting.tensors == "matrix" and not problem.needs
        if problem.rule.clips_update:
            return default or matrix
        return default and (matrix or problem.dtype == "float32")

    def _is_quick(self, case: Case) -> bool:
        problem = case.problem
        plain = problem.setting.tensors == "matrix" and not problem.needs
        default = case.storage == Storage(resolve("auto", problem.dtype), None)
        taken = problem.dtype != "float16" if problem.rule.clips_update else problem.rule.l2 and problem.dtype == "float32"
        return plain and default and taken and problem.rule.name in FAMILY

    def start(self, case: Case) -> Any:
        return WalkRun(case)

    def refuses_events(self, case: EventCase) -> str | None:
        from ..events.jax_steps import refusal

        if self.quick and case.sequence.accumulation != "state":
            return NOT_QUICK
        return refusal(case, walk=True)

    def start_events(self, case: EventCase) -> EventRun:
        from ..events.jax_steps import JaxEvents

        return JaxEvents(case, walk=True)

    def refuses_codings(self, case: CodingCase) -> str | None:
        return None if case.micro_batches > 1 or self.takes == "all" else NOT_QUICK if self.quick else NOT_USUAL

    def start_codings(self, case: CodingCase) -> CodingRun:
        from ..codings.jax_runs import WalkCodings

        return WalkCodings(case)

    def refuses_memory(self, case: MemoryCase) -> str | None:
        from ..memory import walk_refusal

        if self.quick and case.policy != "clip":
            return NOT_QUICK
        return walk_refusal(case)

    def measure_memory(self, case: MemoryCase) -> Measured:
        from ..memory import walk_memory

        return walk_memory(case)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        if case.mode == "step":
            return "the walk always releases"
        return case.program_skipped(self.name)

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        from ..trajectories.jax_runs import StackedTrajectory

        return StackedTrajectory(case)
