"""`torch_optimizer`: registers a torch optimizer as a backend, from a function that makes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InvalidArgumentError
from ...core.hyperparameters import Hyperparameters
from ..cases import Case
from .declaration import Declaration, check
from .protocol import Held, converted
from .torch_arguments import betas_of, to_numpy, to_torch

if TYPE_CHECKING:
    import torch

    Make = Callable[[list[torch.nn.Parameter], Hyperparameters], torch.optim.Optimizer]
    Kept = Callable[[torch.optim.Optimizer, torch.nn.Parameter], Mapping[str, torch.Tensor]]


class OptimizerRun:
    """An optimizer with plain `step()` calls, whose groups follow the hyperparameters of the case.

    keeps_gradients: whether to see that they are what they were after a step.
    """

    def __init__(self, case: Case, make: Make, kept: Kept | None, device: str, keeps_gradients: bool) -> None:
        import torch

        self.keeps_gradients = keeps_gradients
        self.case, self.kept, self.device = case, kept, device
        start = case.problem.initial_parameters()
        self.parameters = {name: torch.nn.Parameter(to_torch(value).to(device)) for name, value in start.items()}
        self.count = 0
        given = case.problem.hyperparameters_at(1)
        self.groups = [list(names) for _, names in itertools.groupby(start, key=lambda name: given[name])]
        self.optimizer: torch.optim.Optimizer
        for number, names in enumerate(self.groups):
            made = make([self.parameters[name] for name in names], given[names[0]])
            if number == 0:
                self.optimizer = made
            else:  # as `make` spells its hyperparameters, so that they need no name here
                self.optimizer.add_param_group(made.param_groups[0])

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.count += 1
        if "schedules" in self.case.problem.needs:
            given = self.case.problem.hyperparameters_at(self.count)
            for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
                group["lr"] = given[names[0]].learning_rate
                group["weight_decay"] = given[names[0]].weight_decay
                if self.case.problem.changes_betas:
                    group["betas"] = betas_of(given[names[0]])
        given_gradients = {name: to_torch(gradients[name]).to(self.device) for name in self.parameters}
        for name, parameter in self.parameters.items():
            parameter.grad = given_gradients[name]
        self.optimizer.step()
        for name, gradient in given_gradients.items():
            if self.keeps_gradients and to_numpy(gradient).tobytes() != gradients[name].tobytes():
                raise InvalidArgumentError(f"the optimizer has changed the gradient of {name!r}; work on a copy of it.")

    def held(self) -> dict[str, Held]:
        return {name: converted(tensors, to_numpy) for name, tensors in self.arrays().items()}

    def arrays(self) -> dict[str, dict[str, Any]]:
        """Return its torch tensors by tensor name, then by field of `Held`."""
        return {
            name: {"parameter": parameter.detach(), **({} if self.kept is None else self.kept(self.optimizer, parameter))}
            for name, parameter in self.parameters.items()
        }


class OptimizerBackend(Declaration):
    """The backend that `torch_optimizer` registers."""

    def __init__(self, make: Mapping[str, Make], kept: Kept | None, device: str, **declared: Any) -> None:
        super().__init__(rules=make, **declared)
        self._make, self._kept, self._device = make, kept, device
        self.flushes_subnormals = device != "cpu"

    def start(self, case: Case) -> OptimizerRun:
        make = self._make[case.problem.rule.name]
        return OptimizerRun(case, make, self._kept, self._device, keeps_gradients=not self.peer)  # optimi's change in place


def torch_optimizer(
    name: str,
    make: Mapping[str, Make],
    dtypes: Iterable[str] | Mapping[str, str] = ("float32",),
    *,
    kept: Kept | None = None,
    device: str = "cpu",
    requires: Collection[str] = ("torch",),
    abilities: Collection[str] = ("schedules", "groups"),
    peer: bool = False,
) -> OptimizerBackend:
    """Return a torch optimizer as a backend, for `register`.

        register(
            torch_optimizer(
                "mine",
                {
                    "adamw": lambda params, h: MyAdamW(
                        params, lr=h.learning_rate, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay
                    )
                },
            )
        )

    Args:
        name: as ``--backend`` takes it.
        make: by the name of the rule that it obeys ("adamw", "lion", "sgd_momentum"), a function (parameters,
            hyperparameters) -> optimizer. Where tensors have different hyperparameters it is called once for each group,
            and the groups are put into one optimizer.
        dtypes: of the parameters that it can update. A mapping also says with which compensation it updates each
            ("none", "kahan", "split"); one that is not "none" must be shown by `kept`.
        kept: (optimizer, parameter) -> tensors of the parameter's shape, by the name of the field in `Held`: the
            compensation, and the rule's fields if they are debiased as penstock's are. None: only parameters are compared.
        device: where the parameters are.
        requires: the modules without which it is not available.
        abilities: see `Backend`; a schedule is followed by `group["lr"]` and `group["weight_decay"]`, betas by
            `group["betas"]`, set before each step.
        peer: whether it is compared but not judged.

    Raises:
        InvalidArgumentError: an unknown rule or dtype, or a compensation that is not shown.
    """
    compensations = check(name, make, dtypes)
    if kept is None and set(compensations.values()) != {"none"}:
        raise InvalidArgumentError(f"kept=None, but {name!r} compensates; give a function that returns its compensation.")
    return OptimizerBackend(
        dict(make), kept, device, name=name, compensations=compensations, requires=requires, abilities=abilities, peer=peer
    )
