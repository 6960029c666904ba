"""A parameter group may name its rule: several rules are one optimizer, with one release, one norm and one state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.torch_models import batches, layers, loss_of, same_parameters, snapshot, train, unchanged
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import SGD, AdamW, Lion, StableAdamW, release_gradients


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three rules; the others' settings are their own defaults, but for the learning rate and the decay of one."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices[:2], "rule": "lion", "lr": 1e-3},
        {"params": matrices[2:]},
        {"params": vectors, "rule": "sgd", "momentum": 0.9, "weight_decay": 0.0},
    ]


def one_optimizer(model: nn.Module) -> AdamW:
    return AdamW(groups(model), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)


def an_optimizer_each(model: nn.Module) -> list[Any]:
    lion, adamw, sgd = (group["params"] for group in groups(model))
    return [
        Lion(lion, lr=1e-3, weight_decay=0.1),
        AdamW(adamw, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
        SGD(sgd, lr=1e-2, momentum=0.9),
    ]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_an_optimizer_for_each_bit_for_bit(dtype: torch.dtype, released: bool) -> None:
    models = [layers(dtype=dtype), layers(dtype=dtype)]
    optimizer, others = one_optimizer(models[0]), an_optimizer_each(models[1])
    assert [group["rule"] for group in optimizer.param_groups] == ["lion", "adamw", "sgd_momentum"]
    if released:
        release_gradients(models[0], optimizer)
    train(models[0], optimizer, batches(6, dtype=dtype))
    for batch in batches(6, dtype=dtype):
        loss_of(models[1], batch).backward()
        for other in others:
            other.step()
            other.zero_grad()
    assert same_parameters(*models)


def test_one_norm_clips_all_rules() -> None:
    models = [layers(dtype=torch.float64), layers(dtype=torch.float64)]
    optimizers = [one_optimizer(model) for model in models]
    release = release_gradients(models[1], optimizers[1], max_norm=0.1)
    for batch in batches(5, dtype=torch.float64):
        loss_of(models[0], batch).backward()
        norm = nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
        release.guard(loss_of(models[1], batch)).backward()
        assert release.last_norm == pytest.approx(float(norm), rel=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_one_state_dict_resumes_bit_for_bit() -> None:
    model, given = layers(dtype=torch.bfloat16), batches(8, dtype=torch.bfloat16)
    optimizer = one_optimizer(model)
    train(model, optimizer, given[:4])
    again = copy.deepcopy(model)
    resumed = one_optimizer(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied_model, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, given[4:])
    for one, other in ((again, resumed), (copied_model, copied)):
        train(one, other, given[4:])
        assert unchanged(snapshot(model, optimizer), snapshot(one, other))
    with pytest.raises(InvalidArgumentError, match=r"group 0 of state_dict is of the rule 'lion', .* 'adamw'"):
        AdamW([{"params": group["params"]} for group in groups(again)]).load_state_dict(optimizer.state_dict())


def test_settings_that_a_rule_lacks_are_refused_before_anything_changes() -> None:
    def parameters() -> list[torch.Tensor]:
        return [torch.zeros(3, requires_grad=True)]

    model = layers()
    optimizer = AdamW(model.parameters())
    for group, said in (
        ({"rule": "lyon"}, r"rule='lyon' is not known; it must be one of stable_adamw, "),
        ({"rule": ["lion"]}, r"rule=\['lion'\] is not known; it must be one of stable_adamw, "),
        ({"rule": "lion", "eps": 1e-3}, r"a parameter group of rule='lion' has eps, which that rule does not have"),
        ({"rule": "sgd", "nesterov": True}, r"nesterov=True is not possible with momentum=0.0"),
        ({"rule": "lion", "betas": (0.9, 0.9, 0.9)}, r"betas=.* must be a pair of numbers"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            optimizer.add_param_group({"params": parameters(), **group})
    assert len(optimizer.param_groups) == 1
    for rule, error, said in (
        ("sgd_momentum", InvalidArgumentError, r"rule='sgd_momentum' lacks momentum, dampening, .*where the group is made"),
        ("lion", RefusedError, r"has no exp_avg, which lion keeps: the key 'rule' of its group changed"),
    ):
        optimizer.param_groups[0]["rule"] = rule
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(error, match=said):
            optimizer.step()
        optimizer.param_groups[0]["rule"] = "adamw"
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RefusedError, match=r"this rule's step needs the whole gradient"):
        release_gradients(model := layers(), one_optimizer(model), accumulation="state")
    release_gradients(model := layers(), optimizer := StableAdamW(model.parameters()), accumulation="state")
    with pytest.raises(RefusedError, match=r"'state' is not possible for sgd, which keeps no state; .*'hold'"):
        optimizer.add_param_group({"params": parameters(), "rule": "sgd"})
    optimizer.add_param_group({"params": parameters(), "rule": "sgd_momentum"})
