"""The backends that are `penstock.torch_frontend` optimizers: one registry row for each of its backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.errors import PenstockError
from ...core.hyperparameters import Hyperparameters
from ...core.rules import Rule, adam_family
from ..cases import EVERY_DTYPE, Case, storages
from ..rules import FAMILY
from .protocol import Run
from .torch_adapter import OptimizerRun
from .torch_arguments import class_of, kept_by, optimizer_of

if TYPE_CHECKING:
    from ..codings import CodingCase, CodingRun
    from ..events import EventCase, EventRun
    from ..markers import MarkerCase, TorchMarkers
    from ..memory import Measured, MemoryCase
    from ..trajectories import Trajectory, TrajectoryRun


def _without_class(rule: Rule) -> str | None:
    return None if class_of(rule) else f"the torch frontend has no {rule.name}"


class TorchBackend:
    """One backend of the torch frontend.

    Args:
        name: of the backend, in ``--backend`` as in the optimizers' argument.
        device: where the parameters are.
    """

    abilities = frozenset({"schedules", "groups", "decoupled decay", "changing betas"})

    norm_eps = 1e-6  # as `torch.nn.utils.clip_grad_norm_` has it, and penstock with it

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name = name
        self._device = device

    @property
    def device(self) -> str:
        """Where the parameters are."""
        return self._device

    @property
    def flushes_subnormals(self) -> bool:
        """Whether the device that runs the kernels does."""
        return self.device != "cpu"

    def unavailable(self) -> str | None:
        """Construct an optimizer to find out."""
        try:
            import torch

            from ... import torch_frontend

            torch_frontend.AdamW([torch.zeros((), device=self.device)], backend=self.name)
        except (ImportError, PenstockError) as error:
            return str(error)
        return None

    def _refuses(self, rule: Rule) -> str | None:
        if self.name == "triton" and not adam_family.is_member(rule):
            return f"there are no kernels for {rule.name}"
        return _without_class(rule)

    def refuses(self, case: Case) -> str | None:
        return self._refuses(case.problem.rule)

    def start(self, case: Case) -> Run:
        def make(parameters: list[Any], given: Hyperparameters) -> Any:
            return optimizer_of(case.problem.rule, parameters, given, case.storage, backend=self.name)

        return OptimizerRun(case, make, kept_by, self.device, keeps_gradients=True)

    def refuses_events(self, case: EventCase) -> str | None:
        return self._refuses(case.rule) or (case.not_compiled if self.name == "compiled" else None)

    def start_events(self, case: EventCase) -> EventRun:
        from ..events.torch_release import TorchEvents

        return TorchEvents(case, self.name, self.device)

    def start_plain(self, case: EventCase) -> EventRun:
        from ..events.torch_release import TorchEvents

        return TorchEvents(case, self.name, self.device, released=False)

    def refuses_codings(self, case: CodingCase) -> str | None:
        return self._refuses(case.rule)

    def start_codings(self, case: CodingCase) -> CodingRun:
        from ..codings.torch_runs import TorchCodings

        return TorchCodings(case, self.name, self.device)

    def refuses_memory(self, case: MemoryCase) -> str | None:
        return None

    def measure_memory(self, case: MemoryCase) -> Measured:
        from ..memory import torch_memory

        return torch_memory(case, self.name, self.device)

    def refuses_markers(self, case: MarkerCase) -> str | None:
        if self.name == "compiled":
            return "compiling takes seconds a case, and a marker does not depend on it"
        return self._refuses(case.rule)

    def start_markers(self, case: MarkerCase) -> TorchMarkers:
        from ..markers import TorchMarkers

        return TorchMarkers(case.events, self.name, self.device)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        return self._refuses(case.rule)

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        from ..trajectories.torch_runs import TorchTrajectory

        return TorchTrajectory(case, self.name, self.device)


class UsualCompiled(TorchBackend):
    """The backend "compiled" where nobody named it: of rules that are not of Adam's family it has B in its default coding."""

    def __init__(self) -> None:
        super().__init__("compiled")

    def refuses(self, case: Case) -> str | None:
        problem = case.problem
        usual = problem.setting.name == EVERY_DTYPE and case.storage in storages(problem.dtype, "default")
        if problem.rule.name not in FAMILY and not usual:
            return "compiling takes a second a case; name the backend with --backend compiled"
        return super().refuses(case)

    def refuses_codings(self, case: CodingCase) -> str | None:
        return None if case.quick else "compiling takes a second a case; name the backend with --backend compiled"
