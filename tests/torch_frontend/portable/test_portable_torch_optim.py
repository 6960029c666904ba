"""To and from torch.optim's own state: AdamW and Adam, whose moments are biased."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.torch_models import batches, layers, snapshot, train, unchanged
from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.file import load
from penstock.torch_frontend import Adam, AdamW, StableAdamW, export_state, import_state, release_gradients

SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.1, "eps": 1e-7}
PAIRS = [(torch.optim.AdamW, AdamW), (torch.optim.Adam, Adam)]
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def run(
    optimizer_class: Callable[..., Optimizer], dtype: torch.dtype, steps: slice, **arguments
) -> tuple[nn.Module, Optimizer]:
    """A model of the same values each time, its optimizer, and some of the 100 steps. One layer sits out the first ten."""
    model = layers(2, dtype=dtype)
    optimizer = optimizer_class(model.parameters(), **{**SETTINGS, **arguments})
    proceed(model, optimizer, steps)
    return model, optimizer


def proceed(model: nn.Module, optimizer: Optimizer, steps: slice) -> None:
    dtype = next(model.parameters()).dtype
    for number, batch in list(enumerate(batches(100, dtype=dtype)))[steps]:
        model[0].requires_grad_(number >= 10)
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS["lr"] * (1 - number / 200)
        train(model, optimizer, [batch])


def assert_close(one: nn.Module, other: nn.Module, bound: float) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert (p - q).norm() <= bound * q.norm()


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_import_from_torch_optim_continues_its_run(path: Path, theirs, ours, released: bool) -> None:
    """50 steps of torch's and 50 of penstock's are 100 of torch's, in float64 to 1e-12."""
    model, optimizer = run(theirs, torch.float64, slice(50))
    export_state(path, optimizer, model, parameters=True)
    again, fresh = run(ours, torch.float64, slice(0))
    import_state(path, fresh, again, parameters=True)
    if released:
        release_gradients(again, fresh)
    proceed(again, fresh, slice(50, 100))
    assert_close(again, run(theirs, torch.float64, slice(100))[0], 1e-12)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_export_to_torch_optim_continues_the_run(path: Path, theirs, ours) -> None:
    """50 steps of penstock's and 50 of torch's are 100 of torch's, in float64 to 1e-12."""
    model, optimizer = run(ours, torch.float64, slice(50))
    export_state(path, optimizer, model, parameters=True)
    again, fresh = run(theirs, torch.float64, slice(5))
    import_state(path, fresh, again, parameters=True)
    assert [int(fresh.state[p]["step"]) for p in again.parameters()] == [40, 40, 50, 50]
    proceed(again, fresh, slice(50, 100))
    assert_close(again, run(theirs, torch.float64, slice(100))[0], 1e-12)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"decoupled_weight_decay": True}], ids=str)
def test_all_of_torchs_variants_go_on_from_the_file(path: Path, options: dict) -> None:
    """There and back: its moments to two roundings, so its next steps to 1e-14 of those without a file."""
    if not set(options) <= set(inspect.signature(torch.optim.Adam).parameters):
        pytest.skip(f"this version of torch.optim.Adam does not take {options}")
    model, optimizer = run(torch.optim.Adam, torch.float64, slice(20), **options)
    again, fresh = run(torch.optim.Adam, torch.float64, slice(0), **options)
    export_state(path, optimizer, model, parameters=True)
    assert load(path).groups[0].rule == ("adamw" if "decoupled_weight_decay" in options else "adam")
    import_state(path, fresh, again, parameters=True, hyperparameters=True)
    for kept, expected in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert {key: (value.dtype, value.device) for key, value in kept.items()} == {
            key: (value.dtype, value.device) for key, value in expected.items()
        }
    for one, other in ((model, optimizer), (again, fresh)):
        proceed(one, other, slice(20, 22))
    assert_close(again, model, 1e-14)


@pytest.mark.parametrize("dtype", list(ROUNDOFF), ids=str)
def test_a_round_trip_through_a_file_costs_two_roundings(path: Path, dtype: torch.dtype) -> None:
    """|m - m'| <= 2u|m|: u for the division, u for the product. A second moment in float32 comes back as it was."""
    model, optimizer = run(torch.optim.AdamW, dtype, slice(15), betas=(0.9, 0.999))
    export_state(path, optimizer, model, parameters=True)
    low = dtype in (torch.bfloat16, torch.float16)
    assert {entry.fields["exp_avg_sq"].dtype.name for entry in load(path).parameters.values()} == {
        "float32" if low else str(dtype).removeprefix("torch.")
    }
    again, fresh = run(torch.optim.AdamW, dtype, slice(0), betas=(0.9, 0.999))
    import_state(path, fresh, again, parameters=True)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        before, after = optimizer.state[p], fresh.state[q]
        assert torch.equal(p, q)
        assert after["exp_avg"].dtype is dtype
        error = (before["exp_avg"].double() - after["exp_avg"].double()).abs()
        smallest = torch.finfo(dtype).smallest_normal * ROUNDOFF[dtype]  # half a spacing below the normal numbers
        bound = 2 * ROUNDOFF[dtype] * before["exp_avg"].double().abs() * (1 + 2 * ROUNDOFF[dtype]) + 2 * smallest
        assert (error <= bound).all()
        if low:
            assert torch.equal(before["exp_avg_sq"], after["exp_avg_sq"])


def test_the_moments_in_the_file_are_debiased(path: Path) -> None:
    """After one step they are the gradient and its square, whatever the betas."""
    for betas in ((0.0, 0.0), (0.9, 0.999)):
        weight = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        optimizer = torch.optim.AdamW(weight.parameters(), betas=betas)
        weight.weight.grad = torch.tensor([[1.0, -2.0, 3.0], [0.0, 0.5, -0.25]], dtype=torch.float64)
        optimizer.step()
        export_state(path, optimizer, weight)
        entry = load(path).parameters["weight"]
        gradient = weight.weight.grad.numpy()
        assert np.allclose(entry.fields["exp_avg"], gradient, rtol=4 * 2.0**-53, atol=0)
        assert np.allclose(
            entry.fields["exp_avg_sq"], gradient**2, rtol=1e3 * 2.0**-53, atol=0
        )  # torch's 1-beta2 loses three digits
        import_state(path, optimizer, weight)
        assert np.allclose(optimizer.state[weight.weight]["exp_avg"], (1 - betas[0]) * gradient, rtol=8 * 2.0**-53, atol=0)


def test_low_precision_leaves_without_the_compensation_only(path: Path) -> None:
    model, optimizer = run(AdamW, torch.bfloat16, slice(15))
    export_state(path, optimizer, model)
    again, fresh = run(torch.optim.AdamW, torch.bfloat16, slice(15))
    before = snapshot(again, fresh)
    with pytest.raises(InvalidArgumentError, match=r"'split' in the state and by 'none'.*penstock convert --drop-compensation"):
        import_state(path, fresh, again)
    assert unchanged(before, snapshot(again, fresh))
    model, optimizer = run(AdamW, torch.bfloat16, slice(15), compensation="none")
    export_state(path, optimizer, model)
    import_state(path, fresh, again)
    assert {value.dtype for p in again.parameters() for key, value in fresh.state[p].items() if key != "step"} == {
        torch.bfloat16
    }
    proceed(again, fresh, slice(15, 17))


def test_a_float16_second_moment_that_would_vanish_is_refused(path: Path) -> None:
    """m/(0+eps) would explode."""
    line = nn.Linear(2, 2, bias=False, dtype=torch.float16)
    ours, theirs = AdamW(line.parameters(), compensation="none"), torch.optim.AdamW(line.parameters())
    line.weight.grad = torch.full((2, 2), 1e-3, dtype=torch.float16)
    ours.step()
    export_state(path, ours, line)
    with pytest.raises(InvalidArgumentError, match=r"exp_avg_sq of 'weight' does not fit into float16"):
        import_state(path, theirs, line)
    assert not theirs.state


class Lion(torch.optim.AdamW):
    """A subclass may do anything with its moments."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Not Adam's."""


class Named(torch.optim.AdamW):
    """Only adds a name."""


def test_an_optimizer_without_portable_state_is_refused(path: Path) -> None:
    model = layers(2)
    more = torch.optim.AdamW(model.parameters())
    more.state[model[1][0].bias] = {"step": torch.zeros(()), "exp_avg_slow": torch.zeros(8)}
    unlike = [torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax]
    for optimizer, error, said in [
        (torch.optim.AdamW(model.parameters(), amsgrad=True), RefusedError, r"amsgrad=True keeps a third moment"),
        *(
            (kind(model.parameters()), InvalidArgumentError, f"optimizer={kind.__name__} has no portable state")
            for kind in unlike
        ),
        (Lion(model.parameters()), RefusedError, r"optimizer=Lion has a step\(\) of its own"),
        (more, RefusedError, r"keeps 'exp_avg_slow', which a file has no place for"),
    ]:
        with pytest.raises(error, match=said):
            export_state(path, optimizer, model)
        with pytest.raises(error, match=said):
            import_state(path, optimizer, model)
    assert not path.exists()
    named = Named(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(named)  # which wraps step(), of this one
    export_state(path, named, model)
    assert load(path).groups[0].rule == "adamw"
    for group in named.param_groups:  # which torch's step looks at
        group["decoupled_weight_decay"] = False
    export_state(path, named, model)
    assert load(path).groups[0].rule == "adam"
    mixed = torch.optim.Adam(
        [{"params": model[0].parameters(), "decoupled_weight_decay": True}, {"params": model[1].parameters()}]
    )
    export_state(path, mixed, model)
    assert [group.rule for group in load(path).groups] == ["adamw", "adam"]


def test_fully_decoupled_decay_is_not_exported_to_torch_optim(path: Path) -> None:
    """torch.optim has no such thing: the state comes along, and the hyperparameters do not."""
    model, optimizer = run(AdamW, torch.float64, slice(12), decouple_lr=True, weight_decay=1e-5)
    export_state(path, optimizer, model)
    again, fresh = run(torch.optim.AdamW, torch.float64, slice(0))
    with pytest.raises(InvalidArgumentError, match="decouple_lr=True is penstock's alone"):
        import_state(path, fresh, again, hyperparameters=True)
    assert not fresh.state
    import_state(path, fresh, again)
    stable = StableAdamW(again.parameters())
    with pytest.raises(InvalidArgumentError, match=r"rule 'adamw'"):
        import_state(path, stable, again)
