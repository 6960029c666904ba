"""torchtune's and TorchTitan's shapes of an optimizer in backward train as the plain optimizer does, bit for bit."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tests.support.examples import examples
from tests.support.torch_models import batches, layers, loss_of, same_parameters, snapshot, train, unchanged
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR

from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

EXAMPLE = examples("trainers.md")["torchtune and TorchTitan: the optimizer in backward"]


@pytest.fixture(scope="module")
def wrapper_class() -> Any:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLE, "docs/trainers.md", "exec"), names)
    return names["OptimizerInBackward"]


def plain(count: int) -> nn.Module:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, batches(count), after_step=CosineAnnealingLR(optimizer, T_max=10).step)
    return model


def wrapped(wrapper_class: Any, model: nn.Module) -> Any:
    wrapper = wrapper_class(model, AdamW(model.parameters(), lr=1e-2, gradient_release=True))
    wrapper.set_lr_scheduler(CosineAnnealingLR(next(iter(wrapper.optim_map.values())), T_max=10))
    return wrapper


def backwards(model: nn.Module, given: list[torch.Tensor], after: Any) -> None:
    for batch in given:
        loss_of(model, batch).backward()
        after()


def test_the_wrapper_trains_and_resumes_by_parameter_name(wrapper_class: Any) -> None:
    model, given = layers(), batches(6)
    wrapper = wrapped(wrapper_class, model)
    backwards(model, given[:3], wrapper.step_lr_scheduler)
    assert wrapper.get_optim_key("lr") == wrapper.get_last_lr() < 1e-2
    state = copy.deepcopy(wrapper.state_dict())
    assert set(state["state"]) == dict(model.named_parameters()).keys()
    again = layers()
    again.load_state_dict(model.state_dict())
    resumed = wrapped(wrapper_class, again)
    resumed.load_state_dict(state)
    resumed.lr_scheduler.load_state_dict(wrapper.lr_scheduler.state_dict())
    backwards(again, given[3:], resumed.step_lr_scheduler)
    assert same_parameters(again, plain(6))
    state["state"]["another"] = {}
    with pytest.raises(RuntimeError, match="another"):
        resumed.load_state_dict(state)


def test_an_optimizer_for_each_parameter_in_torchtunes_hooks_trains_the_same_model() -> None:
    model = layers()
    optimizers = {p: AdamW([p], lr=1e-2) for p in model.parameters()}
    scheduler = CosineAnnealingLR(next(iter(optimizers.values())), T_max=10)

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def schedule() -> None:  # as its set_lr_scheduler does
        scheduler.step()
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    backwards(model, batches(6), schedule)
    assert same_parameters(model, plain(6))


class Container:
    """TorchTitan's OptimizersContainer: an optimizer for each part, and one state by parameter name."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [StableAdamW(part.parameters(), lr=1e-2) for part in model_parts]
        self._options = StateDictOptions(flatten_optimizer_state_dict=True)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        read = functools.partial(get_optimizer_state_dict, options=self._options)
        return {key: value for found in map(read, self.model_parts, self.optimizers) for key, value in found.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state, options=self._options)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Two parts, whose parameters have different names, as those of TorchTitan."""
    named = list(model.named_children())
    return [nn.ModuleDict({f"layer{name}": child for name, child in half}) for half in (named[:2], named[2:])]


def started(*, released: bool) -> tuple[nn.Module, Container]:
    model = layers()
    optimizers = Container(parts_of(model))
    for part, optimizer in zip(optimizers.model_parts, optimizers.optimizers, strict=True):
        if released:
            release_gradients(part, optimizer)
    return model, optimizers


def test_a_container_of_released_parts_trains_and_resumes_as_without_release() -> None:
    given = batches(6)
    whole, plain_optimizers = started(released=False)
    train(whole, plain_optimizers, given)
    model, optimizers = started(released=True)
    train(model, optimizers, given[:3])
    again, resumed = started(released=True)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    train(again, resumed, given[3:])
    for one, other in zip(plain_optimizers.optimizers, resumed.optimizers, strict=True):
        assert unchanged(snapshot(whole, one), snapshot(again, other))
