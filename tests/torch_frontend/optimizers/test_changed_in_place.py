"""What others change in place, settings, groups and `.grad`, counts as it does for any optimizer of torch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.torch_models import batches, layers, loss_of, plain_and_released, same_parameters, snapshot, train, unchanged
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

WRITES = {
    "a list of betas": ("betas", lambda: [0.9, 0.99], lambda betas: betas.__setitem__(0, 0.5), [0.5, 0.99]),
    "a tensor among the betas": ("betas", lambda: (torch.tensor(0.9), 0.99), lambda betas: betas[0].fill_(0.5), (0.5, 0.99)),
    "data of a tensor": ("lr", lambda: torch.tensor(0.1), lambda lr: lr.data.fill_(0.0), 0.0),
    "an array": ("lr", lambda: np.array(0.1), lambda lr: lr.fill(0.0), 0.0),
}


@pytest.mark.parametrize(("name", "first", "write", "then"), WRITES.values(), ids=WRITES)
def test_settings_are_read_as_they_are_now(name: str, first, write, then) -> None:
    """Written to where they are, or put anew into the group: the same numbers."""
    models = [layers(), layers()]
    optimizers = [StableAdamW(model.parameters(), **{"lr": 1e-2, name: first()}) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(2))
    write(optimizers[0].param_groups[0][name])
    optimizers[1].param_groups[0][name] = then
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(2))
    assert same_parameters(*models)


def test_a_setting_written_to_after_its_use_is_refused() -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), betas=[0.9, 0.99])
    release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["betas"][0] = 0.5
    with pytest.raises(RefusedError, match="betas of parameter group 0 changed"):
        optimizer.step()


def test_parameters_follow_their_present_group() -> None:
    """Appended, moved to another group, put in the place of another one: updated with the settings of its group."""
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = AdamW([{"params": [first], "lr": 0.0}, {"params": [second], "lr": 1e-2}], weight_decay=0.0)

    def moved(*parameters: nn.Parameter) -> list[bool]:
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
        return [not torch.equal(old, parameter) for old, parameter in zip(before, parameters, strict=True)]

    frozen, trained = (group["params"] for group in optimizer.param_groups)
    assert moved(first, second) == [False, True]
    trained.append(third)
    assert moved(first, third) == [False, True]
    trained.pop()
    frozen.append(third)
    assert moved(third, second) == [False, True]
    frozen[0] = replacement = nn.Parameter(torch.ones(3))
    assert moved(replacement, second) == [False, True]
    trained[0], frozen[0] = replacement, second
    assert moved(replacement, second) == [True, False]


def changed_while_training(max_norm: float | None, change: Callable[[nn.Module, AdamW], None]) -> list[nn.Module]:
    """Two models, trained, changed and trained on, the second under release."""

    def loop(model: nn.Module, optimizer: AdamW, guard: Callable) -> None:
        train(model, optimizer, batches(2), loss=guard)
        change(model, optimizer)
        train(model, optimizer, batches(2), loss=guard)

    return plain_and_released(loop, AdamW, max_norm=max_norm)


@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_a_parameter_that_is_taken_out_of_its_group_is_left_alone_under_release(max_norm) -> None:
    def take_out(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.param_groups[0]["params"] = list(model.parameters())[2:]

    models = changed_while_training(max_norm, take_out)
    assert same_parameters(*models)
    first, others = [[p.grad for p in model.parameters()] for model in models]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, others, strict=True))
    assert others[0] is not None


@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_a_parameter_may_be_replaced_in_the_model_and_in_its_group(max_norm) -> None:
    def replace(model: nn.Module, optimizer: AdamW) -> None:
        (name, old), *_ = model.named_parameters()
        new = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones_like(old))
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, new)

    assert same_parameters(*changed_while_training(max_norm, replace))


@pytest.mark.parametrize("shape", [(3, 4), (4,)])
def test_elements_that_share_memory_are_refused(shape) -> None:
    expanded = nn.Parameter(torch.ones(1).expand(shape))
    with pytest.raises(UnsupportedTensorError, match=r"share memory.*clone"):
        AdamW([expanded])
    with pytest.raises(UnsupportedTensorError, match="share memory"):
        AdamW([nn.Parameter(torch.ones(8).as_strided((3, 4), (2, 1)))])
    optimizer = AdamW([nn.Parameter(torch.ones(shape).mT if len(shape) > 1 else torch.ones(shape))])
    with pytest.raises(UnsupportedTensorError, match="share memory"):
        optimizer.add_param_group({"params": [expanded]})
    assert len(optimizer.param_groups) == 1
    AdamW([nn.Parameter(torch.ones(1).expand(0, 4)), nn.Parameter(torch.ones(3, 4)[:, ::2]), nn.Parameter(torch.ones(3, 1))])


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1e9}, {"max_norm": 1e9, "clipping": "per_tensor"}])
@pytest.mark.parametrize("taken", [1, None], ids=["one", "all"])
def test_a_held_gradient_that_is_taken_out_is_not_used(arguments, taken) -> None:
    models = [layers(), layers()]
    for number, model in enumerate(models):
        optimizer = StableAdamW(model.parameters(), lr=1e-2)
        if number:
            release_gradients(model, optimizer, accumulation="hold", **arguments)
        for batch in batches(3):
            loss_of(model, batch).backward()
            for parameter in list(model.parameters())[:taken]:
                parameter.grad = None
            optimizer.step()
            if number:
                assert optimizer.release.ledger.live == 0
            optimizer.zero_grad()
    assert same_parameters(*models)


@pytest.mark.parametrize("how", ["a refused backward", "a failed backward", "paused"])
def test_zero_grad_leaves_no_gradient_in_the_ledger(how: str) -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer)
    losses = [loss_of(model, batch) for batch in batches(2)]
    before = snapshot(model, optimizer)
    if how == "a failed backward":
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(InvalidArgumentError, match="lr"):
            losses[0].backward()
        assert unchanged(before, snapshot(model, optimizer))
        optimizer.param_groups[0]["lr"] = 1e-2
    else:
        losses[0].backward()
        if how == "paused":
            with release.paused():
                loss_of(model, batches(1)[0]).backward()
        else:
            with pytest.raises(RuntimeError, match=r"second backward|inplace"):
                losses[1].backward()
    if how == "a failed backward":
        optimizer.zero_grad()
    else:  # the first backward has updated the parameters, and no step() followed
        with pytest.raises(RefusedError, match=r"without optimizer.step\(\)"):
            optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert release.ledger.live == 0
    train(model, optimizer, batches(2))


def test_a_parameter_that_was_resized_is_refused_before_anything_is_changed() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter])
    for size in (3, 1):
        parameter.grad, parameter.data = None, torch.ones(size)
        parameter.grad = torch.ones(size)
        if size == 3:
            optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    with pytest.raises(RefusedError, match="resized"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in optimizer.state[parameter].items())


@pytest.mark.parametrize("move", ["shared", "replaced"])
def test_the_number_of_updates_is_counted_where_its_memory_is(move: str) -> None:
    p = torch.ones(4, requires_grad=True)
    optimizer = AdamW([p])
    for expected in range(1, 5):
        p.grad = torch.ones(4)
        optimizer.step()
        step = optimizer.state[p]["step"]
        assert step.item() == expected
        if move == "shared":
            step.share_memory_()
        else:
            step.data = step.detach().clone()


@pytest.mark.parametrize("rule", [AdamW, StableAdamW])
def test_a_learning_rate_on_another_device_is_refused_again_until_it_is_repaired(rule: type) -> None:
    """The meta device stands for it: there is no number to be read."""
    p = torch.ones(4, requires_grad=True)
    optimizer = rule([p])
    p.grad = torch.ones(4)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"lr is a tensor on meta, and a parameter .* is on cpu; give a number"):
            optimizer.step()
    assert torch.equal(p, before)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(p, before)
