"""The backends that are `penstock.torch_frontend` optimizers: one registry row for each of its backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import PenstockError
from ..cases import Case
from .protocol import Held, converted
from .torch_arguments import CLASSES, group_of, to_numpy, to_torch

if TYPE_CHECKING:
    from ..events import EventCase, EventRun
    from ..markers import MarkerCase, TorchMarkers
    from ..memory import Measured, MemoryCase
    from ..trajectories import Trajectory, TrajectoryRun


class TorchRun:
    """A torch optimizer with plain `step()` calls; before each, a schedule writes to its groups as torch's schedulers do."""

    def __init__(self, case: Case, backend: str, device: str) -> None:
        import torch

        from ... import torch_frontend

        problem, storage = case.problem, case.storage
        self.problem, self.device, self.count = problem, device, 0
        start = problem.initial_parameters()
        self.parameters = {name: torch.nn.Parameter(to_torch(value).to(self.device)) for name, value in start.items()}
        optimizer: Any = getattr(torch_frontend, CLASSES[problem.rule.name])
        self.optimizer = optimizer(
            [
                {"params": [self.parameters[name] for name in names], **group_of(given)}
                for names, given in zip(problem.setting.groups, problem.group_hyperparameters(), strict=True)
            ],
            compensation=storage.compensation,
            state_dtype=None if storage.state_dtype is None else getattr(torch, storage.state_dtype),
            backend=backend,
        )

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.count += 1
        if self.problem.setting.schedule is not None:
            given = self.problem.group_hyperparameters(self.count)
            for group, current in zip(self.optimizer.param_groups, given, strict=True):
                group |= {"lr": current.learning_rate, "weight_decay": current.weight_decay}
        for name, parameter in self.parameters.items():
            parameter.grad = to_torch(gradients[name]).to(self.device)
        self.optimizer.step()

    def held(self) -> dict[str, Held]:
        return {name: converted(tensors, to_numpy) for name, tensors in self.arrays().items()}

    def arrays(self) -> dict[str, dict[str, Any]]:
        """What it holds, as PyTorch's own tensors: by tensor, then by field of `Held`."""
        return {
            name: {
                "parameter": parameter.detach(),
                **{field: self.optimizer.state[parameter].get(field) for field in ("compensation", "exp_avg", "exp_avg_sq")},
            }
            for name, parameter in self.parameters.items()
        }


class TorchBackend:
    """One backend of the torch frontend.

    Args:
        name: of the backend, in ``--backend`` as in the optimizers' argument.
        device: where the parameters are.
    """

    abilities = frozenset({"schedules", "groups", "decoupled decay"})

    norm_eps = 1e-6  # as `torch.nn.utils.clip_grad_norm_` has it, and penstock with it

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name = name
        self.device = device
        self.flushes_subnormals = device != "cpu"

    def unavailable(self) -> str | None:
        """The optimizer itself is asked."""
        try:
            import torch

            from ... import torch_frontend

            torch_frontend.AdamW([torch.zeros((), device=self.device)], backend=self.name)
        except (ImportError, PenstockError) as error:
            return str(error)
        return None

    def refuses(self, case: Case) -> str | None:
        return None if case.problem.rule.name in CLASSES else f"the torch frontend has no {case.problem.rule.name}"

    def start(self, case: Case) -> TorchRun:
        return TorchRun(case, self.name, self.device)

    def refuses_events(self, case: EventCase) -> str | None:
        if case.rule.name not in CLASSES:
            return f"the torch frontend has no {case.rule.name}"
        return case.not_compiled if self.name == "compiled" else None

    def start_events(self, case: EventCase) -> EventRun:
        from ..events.torch_release import TorchEvents

        return TorchEvents(case, self.name, self.device)

    def start_plain(self, case: EventCase) -> EventRun:
        from ..events.torch_release import TorchEvents

        return TorchEvents(case, self.name, self.device, released=False)

    def refuses_memory(self, case: MemoryCase) -> str | None:
        return None

    def measure_memory(self, case: MemoryCase) -> Measured:
        from ..memory import torch_memory

        return torch_memory(case, self.name, self.device)

    def refuses_markers(self, case: MarkerCase) -> str | None:
        return "compiling takes seconds a case, and a marker does not depend on it" if self.name == "compiled" else None

    def start_markers(self, case: MarkerCase) -> TorchMarkers:
        from ..markers import TorchMarkers

        return TorchMarkers(case.events, self.name, self.device)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        return None

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        from ..trajectories.torch_runs import TorchTrajectory

        return TorchTrajectory(case, self.name, self.device)
