"""Saving and loading: training resumes bit for bit, and a state that does not fit changes nothing."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.support.torch_models import (
    OPTIMIZERS,
    batches,
    layers,
    loss_of,
    same_parameters,
    snapshot,
    train,
    unchanged,
    with_betas,
)
from torch.optim.lr_scheduler import CosineAnnealingLR

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import Adam, AdamW, Lion, StableAdamW, release_gradients


def test_state_dict_in_the_middle_of_a_step_raises() -> None:
    for accumulation in (None, "state"):
        model = layers()
        optimizer = AdamW(model.parameters())
        release_gradients(model, optimizer, accumulation=accumulation)
        whole = copy.deepcopy(optimizer.state_dict())
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(RefusedError, match=r"state_dict\(\) in the middle of a step.*optimizer\.step\(\)"):
            optimizer.state_dict()
        with pytest.raises(RefusedError, match=r"load_state_dict\(\) in the middle of a step"):
            optimizer.load_state_dict(whole)
        optimizer.step()
        assert optimizer.state_dict()["state"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_released_training_resumes_bit_for_bit(optimizer_class, dtype: torch.dtype) -> None:
    """Through torch.save and a weights_only load; every state dtype is kept; a schedule goes on."""

    def build():
        model = layers(dtype=dtype)
        optimizer = optimizer_class(
            model.parameters(), lr=1e-2, weight_decay=0.1, **with_betas(optimizer_class, 0.9, 0.999, 0.999)
        )
        release_gradients(model, optimizer)
        return model, optimizer, CosineAnnealingLR(optimizer, 20)

    given = batches(12, dtype=dtype)
    model, optimizer, scheduler = build()
    train(model, optimizer, given[:5], after_step=scheduler.step)
    saved = io.BytesIO()
    torch.save([x.state_dict() for x in (model, optimizer, scheduler)], saved)
    train(model, optimizer, given[5:], after_step=scheduler.step)
    saved.seek(0)
    resumed = build()
    for part, state in zip(resumed, torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state)
    for p, q in zip(model.parameters(), resumed[0].parameters(), strict=True):
        ours, theirs = optimizer.state[p], resumed[1].state[q]
        assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    train(*resumed[:2], given[5:], after_step=resumed[2].step)
    assert unchanged(snapshot(model, optimizer), snapshot(*resumed[:2]))


def test_settings_changed_after_a_load_are_used() -> None:
    """The hooks look groups up live: lr = 0 and weight_decay = 0 after load_state_dict freeze the weights."""
    model = layers()
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    train(model, optimizer, batches(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = layers(2)
    optimizer = StableAdamW(model.parameters())
    train(model, optimizer, batches(1))
    foreign = torch.optim.AdamW(model.parameters())
    train(model, foreign, batches(1))
    before = snapshot(model, optimizer)
    wrong_shape, incomplete, fewer = (copy.deepcopy(optimizer.state_dict()) for _ in range(3))
    wrong_shape["state"][0]["debiased_exp_avg"] = torch.ones(3)
    del incomplete["state"][1]["debiased_exp_avg_sq"]
    del fewer["param_groups"][0]["params"][0]
    for bad, said in [
        (foreign.state_dict(), r"another optimizer than penstock's.*export_state and import_state"),
        (wrong_shape, r"debiased_exp_avg of parameter 0 of group 0 has shape \(3,\)"),
        (incomplete, r"lacks debiased_exp_avg_sq"),
        (fewer, r"3 parameters"),
        ({"param_groups": [], "state": {}}, r"0 parameter groups"),
        ({}, r"no 'param_groups'"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            optimizer.load_state_dict(bad)
        assert unchanged(before, snapshot(model, optimizer))


def test_a_state_of_another_precision_or_rule_is_refused() -> None:
    def stepped(optimizer_class, dtype=torch.float32, **arguments):
        model = layers(2, dtype=dtype)
        optimizer = optimizer_class(model.parameters(), **arguments)
        train(model, optimizer, batches(1, dtype=dtype))
        return optimizer

    wide, low = stepped(StableAdamW), stepped(StableAdamW, torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=r"compensation of parameter 0.*bfloat16.*int16"):
        low.load_state_dict(wide.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"compensation of parameter 0.*int16.*float32"):
        wide.load_state_dict(low.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"group 0 of state_dict is of the rule 'stable_adamw', .* 'adam'"):
        stepped(Adam).load_state_dict(stepped(StableAdamW).state_dict())
    for one, other in ((Lion, AdamW), (AdamW, Lion)):
        with pytest.raises(InvalidArgumentError, match=f"of the rule '{other.rule.name}', .*'{one.rule.name}'.* start afresh"):
            stepped(one).load_state_dict(stepped(other).state_dict())
    with pytest.raises(InvalidArgumentError, match=r"precision='exact', the optimizer's has precision='smallest'; construct"):
        stepped(StableAdamW, torch.bfloat16, precision="smallest").load_state_dict(low.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"compensation='auto', the optimizer's has compensation='kahan'; construct"):
        stepped(StableAdamW, torch.bfloat16, compensation="kahan").load_state_dict(low.state_dict())
    bad = copy.deepcopy(wide.state_dict())
    bad["param_groups"][0]["lr"] = -1.0
    with pytest.raises(InvalidArgumentError, match=r"lr=-1\.0"):
        wide.load_state_dict(bad)


@pytest.mark.parametrize("number", [int, float])
def test_a_step_that_was_saved_as_a_number_is_loaded_as_a_tensor(number: type) -> None:
    """As torch's optimizers load it: old files have numbers."""
    models = [layers(), layers()]
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    train(models[0], optimizers[0], batches(2))
    saved = copy.deepcopy(optimizers[0].state_dict())
    for state in saved["state"].values():
        state["step"] = number(state["step"])
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(saved)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(2))
    assert same_parameters(*models)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("change", ["replaced", "moved", "written"])
def test_a_number_of_updates_that_was_set_between_steps_is_used(change: str, released: bool) -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    if released:
        release_gradients(model, optimizer)
    train(model, optimizer, batches(2))
    for state in optimizer.state.values():
        if change == "replaced":
            state["step"] = torch.tensor(7.0)
        elif change == "moved":
            state["step"].data = torch.tensor(7.0)
        else:
            state["step"].fill_(7.0)
    train(model, optimizer, batches(2))
    assert {state["step"].item() for state in optimizer.state.values()} == {9.0}


@pytest.mark.parametrize("compensation", ["none", "split"])
def test_torch_optim_fails_loudly_on_a_penstock_state(compensation: str) -> None:
    """Its moments are debiased: as torch's own they would train wrongly."""
    model = layers(dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), compensation=compensation)
    train(model, optimizer, batches(2, dtype=torch.bfloat16))
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())  # torch looks at no key
    with pytest.raises(KeyError, match="exp_avg"):
        train(model, other, batches(1, dtype=torch.bfloat16))


def test_a_state_dict_with_the_keys_of_earlier_versions_is_loaded() -> None:
    model, again = layers(), layers()
    optimizer, fresh = AdamW(model.parameters()), AdamW(again.parameters())
    train(model, optimizer, batches(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state.pop(f"debiased_{key}")
    del saved["param_groups"][0]["rule"]
    with pytest.raises(InvalidArgumentError, match="of an earlier version, which did not have 'lion'"):
        Lion(again.parameters()).load_state_dict(saved)
    again.load_state_dict(model.state_dict())
    fresh.load_state_dict(saved)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert optimizer.state[one].keys() == fresh.state[other].keys()
    for pair in ((model, optimizer), (again, fresh)):
        train(*pair, batches(2))
    assert same_parameters(model, again)
