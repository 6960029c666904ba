"""What the PyTorch tests share: small models, seeded batches, and comparisons."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from penstock.core.rules import RULES, Rule
from penstock.torch_frontend import SGD, Adam, AdamW, Adan, Lion, Muon, RAdam, Ranger, StableAdamW, release_gradients
from penstock.torch_frontend.backends.compiled import CompiledBackend
from penstock.torch_frontend.release import is_released

ADAM_FAMILY = [StableAdamW, AdamW, Adam]


class MomentumSGD(SGD):
    """SGD as it is mostly used."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, **settings: Any) -> None:
        super().__init__(params, lr, momentum, **settings)


class NesterovSGDW(SGD):
    """SGD with other settings that choose a rule."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, **settings: Any) -> None:
        super().__init__(params, lr, momentum, nesterov=True, decoupled_weight_decay=True, **settings)


class MuonWithAdamW(Muon):
    """Muon of matrices, and AdamW of the rest: two groups for each that is given."""

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        given = list(params)
        split = []
        for group in given if isinstance(given[0], dict) else [{"params": given}]:
            for rule, is_matrix in (("muon", True), ("adamw", False)):
                part = [p for p in group["params"] if ((p[1] if isinstance(p, tuple) else p).dim() == 2) is is_matrix]
                split.append({**group, "params": part, "rule": rule})
        super().__init__([group for group in split if group["params"]], lr, **settings)


OPTIMIZERS = [*ADAM_FAMILY, Lion, SGD, MomentumSGD, NesterovSGDW, RAdam, Adan, Ranger, MuonWithAdamW]


def layers(count: int = 4, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Equal layers with a bias each."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return model.to(dtype)


def batches(count: int, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, width, generator=generator).to(dtype) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().pow(2).mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: list[Tensor],
    *,
    after_step: Callable[[], Any] = lambda: None,
    loss: Callable[[Tensor], Tensor] = lambda value: value,
) -> None:
    """The loop that everybody writes; `loss` may wrap it, as guard() does."""
    for batch in given:
        loss(loss_of(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def plain_and_released(
    loop: Callable[[Any, Any, Callable[[Tensor], Tensor]], Any],
    optimizer_class: Callable[..., Any] = StableAdamW,
    make: Callable[[], Any] = layers,
    **arguments: Any,
) -> list[Any]:
    """Two models, each after `loop(model, optimizer, guard)`: the first with a plain optimizer, the second under release."""
    models = [make(), make()]
    for number, model in enumerate(models):
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, **arguments) if number else None
        loop(model, optimizer, release.guard if release else lambda loss: loss)
    return models


def with_betas(optimizer_class: Any, *betas: float) -> dict[str, Any]:
    """The argument `betas`, as many as the optimizer has."""
    return {"betas": betas[: len(optimizer_class.rule.betas)]} if optimizer_class.rule.betas else {}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of its first group, which settings may have chosen."""
    return RULES[optimizer.param_groups[0]["rule"]]


def spoil(parameter: Tensor) -> None:
    """Its gradients are NaN from now on."""
    parameter.register_hook(lambda gradient: gradient * float("nan"))


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs)


def gone(parameters: Iterable[Tensor]) -> bool:
    """Whether no gradient is left, but for the markers of released ones, which have no storage."""
    return all(p.grad is None or is_released(p.grad) for p in parameters)


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that NaN equals NaN and 0.0 is not -0.0."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(widths[x.element_size()])


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The bits of every parameter and of every tensor of its state."""
    state = itertools.chain.from_iterable(optimizer.state[p].values() for p in model.parameters() if p in optimizer.state)
    return [bits(x).clone() for x in (*model.parameters(), *(x for x in state if isinstance(x, Tensor)))]


def unchanged(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- internals, of which tests use nothing else ---------------------------------------------------------------------------


def backend_of(optimizer: Any) -> Any:
    return optimizer._backend


def use_backend(optimizer: Any, backend: Any) -> Any:
    """Have the optimizer's updates made by another backend: one that counts, fails or cannot run here."""
    optimizer._backend = backend
    return backend


def slot_of(optimizer: Any, parameter: Tensor) -> Any:
    """What an update of the parameter reads and writes, as a backend gets it."""
    return optimizer._slot(parameter)


def leave_markers_on(release: Any, device: str) -> None:
    """Have the markers that the next gradients leave on another device, as if the parameters had come from there."""
    for member in release._pipeline.step.members.values():
        member.placeholder = member.marker = member.marker.like(member.parameter, device)


def perform_all(optimizer: Any, tasks: list[tuple[Tensor, Tensor | None, Any]]) -> None:
    """Perform (parameter, gradient, action) for each task, without a release."""
    with torch.no_grad():
        optimizer._refresh()
        optimizer._perform_all(tasks)


def all_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def compiling_small_tensors() -> Iterator[None]:
    """Compile the updates of small tensors, too. The compiled backend leaves them to the eager one: all that tests have."""
    with mock.patch.object(CompiledBackend, "small", 0):
        yield


@contextlib.contextmanager
def default_dtype_and_device(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Let torch make tensors of this dtype, on this device, where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
