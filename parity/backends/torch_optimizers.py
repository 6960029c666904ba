"""The backends that are `penstock.torch_frontend` optimizers: one registry row for each of its backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.array_ops import numpy_dtype
from ...core.errors import PenstockError
from ..cases import Case
from .protocol import Held

if TYPE_CHECKING:
    from torch import Tensor

    from ..trajectories import Trajectory, TrajectoryRun

CLASSES = {"stable_adamw": "StableAdamW", "adamw": "AdamW", "adam": "Adam"}


class TorchRun:
    """A torch optimizer with plain `step()` calls."""

    def __init__(self, case: Case, backend: str, device: str) -> None:
        import torch

        from ... import torch_frontend

        problem, storage = case.problem, case.storage
        self.device = device
        start = problem.initial_parameters()
        self.parameters = {name: torch.nn.Parameter(to_torch(value).to(self.device)) for name, value in start.items()}
        given = problem.hyperparameters
        optimizer: Any = getattr(torch_frontend, CLASSES[problem.rule.name])
        self.optimizer = optimizer(
            list(self.parameters.values()),
            lr=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            compensation=storage.compensation,
            state_dtype=None if storage.state_dtype is None else getattr(torch, storage.state_dtype),
            backend=backend,
        )

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        """See `Run`."""
        for name, parameter in self.parameters.items():
            parameter.grad = to_torch(gradients[name]).to(self.device)
        self.optimizer.step()

    def held(self) -> dict[str, Held]:
        """See `Run`."""
        held = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            kept = state.get("compensation")
            held[name] = Held(
                to_numpy(parameter),
                None if kept is None else to_numpy(kept),
                to_numpy(state["exp_avg"]),
                to_numpy(state["exp_avg_sq"]),
            )
        return held


class TorchBackend:
    """One backend of the torch frontend.

    Args:
        name: of the backend, in ``--backend`` as in the optimizers' argument.
        device: where the parameters are.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name = name
        self.device = device

    def unavailable(self) -> str | None:
        """See `Backend`. The optimizer itself is asked."""
        try:
            import torch

            from ... import torch_frontend

            torch_frontend.AdamW([torch.zeros((), device=self.device)], backend=self.name)
        except (ImportError, PenstockError) as error:
            return str(error)
        return None

    def refuses(self, case: Case) -> str | None:
        """See `Backend`."""
        return None if case.problem.rule.name in CLASSES else f"the torch frontend has no {case.problem.rule.name}"

    def start(self, case: Case) -> TorchRun:
        """See `Backend`."""
        return TorchRun(case, self.name, self.device)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        """See `parity.trajectories.RunsTrajectories`."""
        return None

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        """See `parity.trajectories.RunsTrajectories`."""
        from ..trajectories.torch_runs import TorchTrajectory

        return TorchTrajectory(case, self.name, self.device)


def to_torch(array: np.ndarray) -> Tensor:
    """A copy as a CPU tensor; bfloat16, which numpy and torch do not share, by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy as a numpy array of the same dtype."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(numpy_dtype("bfloat16"))
    return tensor.numpy().copy()
