"""Calls that go wrong: an error names the argument and the remedy, before anything is changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.torch_models import batches, layers, loss_of, snapshot, train, unchanged
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import AdamW, release_gradients

CONVERSIONS = [
    (torch.float32, torch.bfloat16, "no compensation"),
    (torch.float32, torch.float16, "no compensation"),
    (torch.bfloat16, torch.float32, "a compensation of dtype int16"),
    (torch.float16, torch.bfloat16, "a compensation of dtype float16"),
]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(("before", "after", "has"), CONVERSIONS)
def test_a_model_that_is_converted_after_the_first_step_is_refused(before, after, has: str, released: bool) -> None:
    """Its compensation would be taken for something else, or lost."""
    model = layers(2).to(before)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if released:
        release_gradients(model, optimizer)
    train(model, optimizer, [batches(1)[0].to(before)])
    model.to(after)
    seen = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=f"dtype {str(after).partition('.')[2]} .*has {has}.*Convert the model first"):
        train(model, optimizer, [batches(1)[0].to(after)])
    assert unchanged(seen, snapshot(model, optimizer))
    if released:
        optimizer.zero_grad()
        optimizer.release.remove()
    train(model, AdamW(model.parameters(), lr=1e-2), [batches(1)[0].to(after)])


def test_a_model_may_be_converted_before_the_first_step() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model.bfloat16(), optimizer, [batch.bfloat16() for batch in batches(2)])


def test_a_compensation_that_changes_between_steps_is_refused() -> None:
    model = layers(2).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, [batches(1)[0].bfloat16()])
    optimizer.param_groups[0]["compensation"] = "none"
    with pytest.raises(RefusedError, match="or compensation= of the group changed, after the first step"):
        train(model, optimizer, [batches(1)[0].bfloat16()])


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    """A plain step would update it twice, a released one once."""
    parameter = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(InvalidArgumentError, match="more than once"):
        AdamW([parameter, parameter])
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(InvalidArgumentError, match="more than once"):
        optimizer.add_param_group({"params": [parameter, parameter]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lr", torch.ones(2), r"lr is a tensor of shape \(2,\)"),
        ("weight_decay", np.ones(2), r"weight_decay is a tensor of shape \(2,\)"),
        ("betas", (torch.ones(2), 0.9), r"betas\[0\] is a tensor of shape \(2,\)"),
        ("betas", 0.9, "betas=0.9 must be a pair of numbers"),
    ],
)
def test_a_setting_changed_to_a_non_number_is_refused(name: str, value, said: str) -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, batches(1))
    optimizer.param_groups[0][name] = value
    seen = snapshot(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=said):
        train(model, optimizer, batches(1))
    assert unchanged(seen, snapshot(model, optimizer))


@pytest.mark.parametrize("loss", [1.0, {"loss": torch.ones(())}, None])
def test_guard_takes_the_loss_and_not_what_holds_it(loss) -> None:
    model = layers(2)
    for arguments in ({"max_norm": 1.0}, {}):
        release = release_gradients(model, AdamW(model.parameters()), **arguments)
        with pytest.raises(InvalidArgumentError, match=rf"loss is a {type(loss).__name__}; guard\(\) takes the 0-d tensor"):
            release.guard(loss)
        release.remove()


def test_max_norm_must_be_a_positive_number() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for norm in (torch.tensor(float("nan")), torch.tensor(-1.0), torch.tensor(0.0), torch.ones(2)):
        with pytest.raises(InvalidArgumentError, match="max_norm"):
            release_gradients(model, optimizer, max_norm=norm)
    with release_gradients(model, optimizer, max_norm=torch.tensor(1e-3)) as release:
        release.guard(loss_of(model, batches(1)[0])).backward()
        optimizer.step()


def test_gradient_release_must_be_a_bool() -> None:
    with pytest.raises(InvalidArgumentError, match="gradient_release='yes' must be True or False"):
        AdamW([nn.Parameter(torch.ones(3))], gradient_release="yes")
