"""Portable state in PyTorch: what comes out of a file is what went in, training goes on, and a misfit changes nothing."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.torch_models import (
    OPTIMIZERS,
    batches,
    bits,
    layers,
    loss_of,
    slot_of,
    snapshot,
    train,
    unchanged,
    with_betas,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from penstock.__main__ import main
from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.file import load, save
from penstock.core.portable.names import Transposed
from penstock.torch_frontend import (
    SGD,
    Adam,
    AdamW,
    Lion,
    Muon,
    StableAdamW,
    export_state,
    import_state,
    prepare_for_gradient_release,
    release_gradients,
)
from penstock.torch_frontend.portable import arrays, layouts

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def trained(optimizer_class=StableAdamW, dtype: torch.dtype = torch.float32, steps: int = 3, seed: int = 0, **arguments):
    model = layers(2, dtype=dtype, seed=seed)
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **arguments)
    train(model, optimizer, batches(steps, dtype=dtype))
    return model, optimizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def kind_of(value: Any) -> Any:
    """The dtype of a tensor; a key itself."""
    return getattr(value, "dtype", value)


@pytest.mark.parametrize("compensation", ["auto", "kahan", "none", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(path: Path, optimizer_class, dtype: torch.dtype, compensation: str) -> None:
    """From a released run into a released one, whose own parameters and state are others."""
    settings = {"compensation": compensation, "weight_decay": 0.1, **with_betas(optimizer_class, 0.9, 0.98, 0.98)}
    model, optimizer = trained(optimizer_class, dtype, **settings)
    release_gradients(model, optimizer)
    train(model, optimizer, batches(2, dtype=dtype, seed=5))
    export_state(path, optimizer, model, parameters=True)
    again, fresh = trained(optimizer_class, dtype, seed=7, **settings)
    release_gradients(again, fresh)
    fresh.state[again[0][0].bias]["left over"] = torch.ones(())
    import_state(path, fresh, again, parameters=True)
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        ours, theirs = optimizer.state[p], fresh.state[q]
        assert {key: kind_of(value) for key, value in ours.items()} == {key: kind_of(value) for key, value in theirs.items()}
    for one, other in ((model, optimizer), (again, fresh)):
        train(one, other, batches(3, dtype=dtype, seed=9))
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))


def test_settings_that_are_no_numbers_come_back(path: Path) -> None:
    """And SGD's momentum, a sum, is refused as Muon's, a mean."""
    chosen: dict[str, Any] = {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
    model = nn.Linear(4, 3, bias=False)
    for settings in ({**chosen, "nesterov": True, "output_axis": 1}, {"adjust_lr_fn": None, "ns_dtype": "float32"}):
        optimizer, fresh = Muon(model.parameters(), **settings), Muon(model.parameters())
        train(model, optimizer, batches(2, 4))
        export_state(path, optimizer, model)
        import_state(path, fresh, model, hyperparameters=True)
        assert slot_of(fresh, model.weight).hyperparameters == slot_of(optimizer, model.weight).hyperparameters
        train(model, fresh, batches(1, 4))
    with pytest.raises(InvalidArgumentError, match=r"'muon', and the optimizer's is 'sgd_momentum'.*different fields"):
        import_state(path, SGD(model.parameters(), momentum=0.9), model)


def test_the_file_holds_the_optimizer_as_it_is(path: Path) -> None:
    model, optimizer = trained(AdamW, torch.bfloat16, betas=(0.9, 0.95), decouple_lr=True, max_lr=0.5, weight_decay=1e-5)
    export_state(path, optimizer, model, parameters=True)
    state = load(path)
    assert state.groups[0].rule == "adamw"
    assert state.groups[0].hyperparameters == {
        "learning_rate": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 1e-5,
        "decouple_lr": True,
        "max_lr": 0.5,
        "maximize": False,
    }
    for name, parameter in model.named_parameters():
        entry, kept = state.parameters[name], optimizer.state[parameter]
        assert (entry.dtype, entry.compensated, entry.step) == ("bfloat16", "split", 3)
        assert entry.parameter is not None
        assert np.array_equal(entry.parameter.astype(np.float64), parameter.detach().double().numpy())
        assert np.array_equal(entry.compensation, kept["compensation"].numpy())
        for key in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(entry.fields[key].astype(np.float64), kept[f"debiased_{key}"].double().numpy())
    export_state(path, optimizer, model)
    assert not load(path).holds_parameters


def test_a_parameter_that_was_never_updated_is_as_a_new_one(path: Path) -> None:
    """Here: frozen, never used, a new optimizer. An import makes the state that the first update would have made."""
    model, optimizer = trained(dtype=torch.bfloat16, steps=0)
    frozen = model[0][0].weight.requires_grad_(False)
    train(model, optimizer, batches(2, dtype=torch.bfloat16))
    assert frozen not in optimizer.state
    export_state(path, optimizer, model)
    assert frozen not in optimizer.state
    again, fresh = trained(dtype=torch.bfloat16, steps=0)
    import_state(path, fresh, again)
    assert [int(fresh.state[p]["step"]) for p in again.parameters()] == [0, 2, 2, 2]
    again.load_state_dict(model.state_dict())
    for one, other in ((model, optimizer), (again, fresh)):
        one.requires_grad_()
        train(one, other, batches(2, dtype=torch.bfloat16, seed=3))
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))


def test_layouts_scalars_and_empty_tensors_are_kept(path: Path) -> None:
    """Dense permuted parameters keep their layout, and the file has the tensor's own order."""

    def build(seed: int) -> tuple[nn.Module, StableAdamW]:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Module()
        model.scalar = nn.Parameter(torch.randn((), generator=generator).bfloat16())
        model.empty = nn.Parameter(torch.empty(0, 3).bfloat16())
        model.permuted = nn.Parameter(torch.randn(2, 3, 4, generator=generator).bfloat16().permute(2, 0, 1))
        model.cut = nn.Parameter(torch.randn(6, 4, generator=generator).bfloat16()[::2, 1:])
        optimizer = StableAdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (again, fresh) = build(0), build(1)
    export_state(path, optimizer, model, parameters=True)
    assert load(path).parameters["permuted"].shape == (4, 2, 3)
    import_state(path, fresh, again, parameters=True)
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))
    kept = fresh.state[again.permuted]
    assert kept["debiased_exp_avg"].stride() == kept["compensation"].stride() == again.permuted.stride() == (1, 12, 4)


def test_wrappers_tied_parameters_and_others_do_not_change_the_names(path: Path) -> None:
    model = layers(2)
    model.tied = model[0]
    model[1] = checkpoint_wrapper(model[1])
    optimizer = AdamW([p for name, p in model.named_parameters() if "bias" not in name])
    wrapped = torch.compile(model, backend="eager")
    for outer in (wrapped, nn.DataParallel(wrapped)):
        export_state(path, optimizer, outer)
        assert list(load(path).parameters) == ["0.0.weight", "1.0.weight"]


def test_names_are_mapped_both_ways(path: Path) -> None:
    model, optimizer = trained(dtype=torch.bfloat16)
    names = {
        ("0.0.weight", "1.0.weight"): Transposed("layers.kernel"),
        ("0.0.bias", "1.0.bias"): "layers.bias",
    }
    export_state(path, optimizer, model, parameters=True, names=names)
    state = load(path)
    assert {name: entry.shape for name, entry in state.parameters.items()} == {
        "layers.kernel": (2, 8, 8),
        "layers.bias": (2, 8),
    }
    kernel = state.parameters["layers.kernel"].fields["exp_avg"].astype(np.float64)
    assert np.array_equal(kernel[1], optimizer.state[model[1][0].weight]["debiased_exp_avg"].double().numpy().T)
    again, fresh = trained(dtype=torch.bfloat16, seed=5)
    import_state(path, fresh, again, parameters=True, names=names)
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))
    export_state(path, optimizer, model, names=lambda name: f"model.{name}")
    assert set(load(path).parameters) == {f"model.{name}" for name, _ in model.named_parameters()}


def two_groups(lr: float | torch.Tensor, seed: int = 0, **arguments) -> tuple[nn.Module, StableAdamW]:
    model = layers(2, seed=seed)
    groups = [
        {"params": list(model[1].parameters()), "weight_decay": 0.5, "betas": (0.8, 0.9)},
        {"params": list(model[0].parameters()), "eps": 1e-3},
    ]
    return model, StableAdamW(groups, lr=lr, **arguments)


def test_hyperparameters_come_along_when_asked_for(path: Path) -> None:
    """By name, not by position; a tensor lr stays the tensor it is. Otherwise the optimizer keeps its own."""
    model, optimizer = two_groups(torch.tensor(0.25), maximize=True)
    train(model, optimizer, batches(1))
    export_state(path, optimizer, model)
    lr = torch.tensor(0.5)
    other = layers(2)
    fresh = StableAdamW(
        [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(other, (lr, 1.0), strict=True)]
    )
    before = [{key: value for key, value in group.items() if key != "params"} for group in fresh.param_groups]
    import_state(path, fresh, other)
    assert before == [{key: value for key, value in group.items() if key != "params"} for group in fresh.param_groups]
    import_state(path, fresh, other, hyperparameters=True)
    first, second = fresh.param_groups
    assert first["lr"] is lr
    assert lr == 0.25
    assert (second["lr"], second["weight_decay"], second["betas"], second["eps"]) == (0.25, 0.5, (0.8, 0.9), 1e-6)
    assert (first["weight_decay"], first["betas"], first["eps"], first["maximize"]) == (1e-2, (0.9, 0.99), 1e-3, True)
    one = StableAdamW(other.parameters())
    with pytest.raises(InvalidArgumentError, match=r"group 0 have different hyperparameters.*2 groups"):
        import_state(path, one, other, hyperparameters=True)
    import_state(path, one, other)


def test_a_lower_beta2_that_comes_along_decides_what_is_kept(path: Path) -> None:
    """The second moment's dtype follows from beta2: that of the file, where it is imported."""
    model, optimizer = trained(dtype=torch.bfloat16, betas=(0.9, 0.9))
    export_state(path, optimizer, model, parameters=True)
    again, fresh = trained(dtype=torch.bfloat16, betas=(0.9, 0.999), seed=2)
    import_state(path, fresh, again, parameters=True)
    assert {fresh.state[p]["debiased_exp_avg_sq"].dtype for p in again.parameters()} == {torch.float32}
    import_state(path, fresh, again, parameters=True, hyperparameters=True)
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))


def test_moments_are_widened_exactly_and_never_rounded(path: Path) -> None:
    model, optimizer = trained(AdamW, torch.bfloat16, compensation="none")
    export_state(path, optimizer, model)
    again, wide = trained(AdamW, torch.bfloat16, state_dtype=torch.float32, compensation="split")
    import_state(path, wide, again)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert wide.state[q]["debiased_exp_avg"].dtype is torch.float32
        assert torch.equal(wide.state[q]["debiased_exp_avg"], optimizer.state[p]["debiased_exp_avg"].float())
        assert not wide.state[q]["compensation"].any()
    export_state(path, wide, again)
    before = snapshot(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"exp_avg of '0.0.weight' is float32.*state_dtype=float32"):
        import_state(path, optimizer, model)
    assert unchanged(before, snapshot(model, optimizer))


def test_in_the_middle_of_a_step_it_is_refused(path: Path) -> None:
    for accumulation in (None, "hold", "state"):
        model, optimizer = trained(AdamW)
        export_state(path, optimizer, model)
        release_gradients(model, optimizer, accumulation=accumulation)
        loss_of(model, batches(1)[0]).backward()
        before, earlier = snapshot(model, optimizer), path.read_bytes()
        with pytest.raises(RefusedError, match=r"export_state\(\) in the middle of a step.*call optimizer\.step\(\) first"):
            export_state(path, optimizer, model)
        with pytest.raises(RefusedError, match=r"import_state\(\) in the middle of a step"):
            import_state(path, optimizer, model)
        assert unchanged(before, snapshot(model, optimizer))
        assert path.read_bytes() == earlier
        optimizer.step()
        import_state(path, optimizer, model)


def misfits() -> dict[str, tuple[dict, dict, str]]:
    """By name: what the exported optimizer is, what the importing one is, and what the refusal says."""
    plain: dict = {}
    return {
        "rule": ({"optimizer_class": Adam}, plain, r"rule 'adam'.*'stable_adamw'.*penstock convert --rule"),
        "fields": ({"optimizer_class": Lion}, plain, r"rule 'lion'.*'stable_adamw'.* start afresh"),
        "dtype": ({"dtype": torch.float64}, plain, r"'0.0.weight' is float64 in the state and float32"),
        "lost digits": (
            {"dtype": torch.bfloat16},
            {"dtype": torch.bfloat16, "compensation": "none"},
            r"'split' in the state and by 'none'.*--drop-compensation",
        ),
        "other digits": (
            {"dtype": torch.bfloat16, "compensation": "kahan"},
            {"dtype": torch.bfloat16},
            r"'kahan' in the state and by 'split'.*compensation='kahan'",
        ),
    }


@pytest.mark.parametrize("misfit", misfits())
def test_a_state_that_does_not_fit_changes_nothing(path: Path, misfit: str) -> None:
    there, here, said = misfits()[misfit]
    model, optimizer = trained(**there)
    export_state(path, optimizer, model, parameters=True)
    model, optimizer = trained(**here, seed=3)
    before = snapshot(model, optimizer), copy.deepcopy(optimizer.param_groups)
    for hyperparameters in (False, True):
        with pytest.raises(InvalidArgumentError, match=said):
            import_state(path, optimizer, model, parameters=True, hyperparameters=hyperparameters)
        assert unchanged(before[0], snapshot(model, optimizer))
        assert str(before[1]) == str(optimizer.param_groups)


def test_another_model_changes_nothing(path: Path) -> None:
    model, optimizer = trained()
    export_state(path, optimizer, model)
    before = snapshot(model, optimizer)
    more, wider = layers(3), layers(2, width=9)
    for other in (more, wider):
        export_state(path.with_suffix(".other"), StableAdamW(other.parameters()), other)
        said = r"has, and the optimizer has not, '2.0.bias', '2.0.weight'" if other is more else r"shape \(9, 9\).*\(8, 8\)"
        with pytest.raises(InvalidArgumentError, match=said):
            import_state(path.with_suffix(".other"), optimizer, model)
    renamed = nn.ModuleDict({"x": model})
    with pytest.raises(InvalidArgumentError, match=r"lacks 'x.0.0.bias', .* names="):
        import_state(path, optimizer, renamed)
    with pytest.raises(InvalidArgumentError, match="parameters=True needs a file that holds the parameters"):
        import_state(path, optimizer, model, parameters=True)
    with pytest.raises(InvalidArgumentError, match=r"shape \(8, 8\) of group 0 is not among model.named_parameters"):
        import_state(path, optimizer, more)
    with pytest.raises(InvalidArgumentError, match=r"not among model.named_parameters"):
        export_state(path, optimizer, more)
    with pytest.raises(InvalidArgumentError, match=r"is not a torch.nn.Module"):
        export_state(path, optimizer, list(model.parameters()))  # type: ignore[arg-type]
    assert unchanged(before, snapshot(model, optimizer))


def test_an_exact_run_goes_on_compactly_after_its_state_is_encoded(path: Path) -> None:
    def compact() -> tuple[nn.Module, AdamW]:
        model = nn.Linear(160, 64, dtype=torch.bfloat16)
        return model, AdamW(model.parameters(), precision="compact")

    torch.manual_seed(0)
    model = nn.Linear(160, 64, dtype=torch.bfloat16)
    optimizer, given = AdamW(model.parameters()), batches(3, 160, torch.bfloat16)
    train(model, optimizer, given)
    export_state(path, optimizer, model, parameters=True)
    with pytest.raises(InvalidArgumentError, match=r"keeps it in 8bit, which would round it; .* penstock convert --encode"):
        import_state(path, *reversed(compact()), parameters=True)
    assert main(["convert", str(path), str(path), "--encode", "--drop-compensation"]) == 0
    again, fresh = compact()
    import_state(path, fresh, again, parameters=True)
    found, held = fresh.state[again.weight], load(path).parameters["weight"].fields
    assert np.array_equal(found["debiased_exp_avg"], held["exp_avg"])
    assert np.array_equal(found["debiased_exp_avg_sq_scale"], held["exp_avg_sq_scale"])
    train(again, fresh, given)
    assert found["step"] == 6


def test_arguments_in_another_order_are_named(path: Path) -> None:
    model, optimizer = trained(AdamW)
    for given in itertools.permutations((path, optimizer, model)):
        unfit: Any = given
        for function in (export_state, import_state):
            if given != (path, optimizer, model):
                third = type(given[2]).__name__
                with pytest.raises(InvalidArgumentError, match=rf"than \(path, optimizer, model\): .*, model is {third};"):
                    function(*unfit)
    for prepare in (release_gradients, prepare_for_gradient_release):
        with pytest.raises(InvalidArgumentError, match=r"than \(model, optimizer\): model is AdamW, optimizer is Sequential;"):
            prepare(optimizer, model)
    assert not path.exists()


def test_a_failure_on_the_way_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All new tensors are made before the first is put in place."""
    model, optimizer = trained()
    export_state(path, optimizer, model, parameters=True)
    again, fresh = trained(seed=4)
    before = snapshot(again, fresh)
    made = []

    def short_of_memory(parameter: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        made.append(array)
        if len(made) == 5:
            raise torch.OutOfMemoryError("the third parameter is too much")
        return arrays.laid_out_as(parameter, array)

    monkeypatch.setattr(layouts, "laid_out_as", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        import_state(path, fresh, again, parameters=True)
    assert unchanged(before, snapshot(again, fresh))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InvalidArgumentError):
        import_state(path, fresh, again, parameters=True)
    assert unchanged(before, snapshot(again, fresh))


def test_a_run_that_has_gone_wrong_does_not_replace_an_earlier_file(path: Path) -> None:
    model, optimizer = trained()
    export_state(path, optimizer, model)
    earlier = path.read_bytes()
    optimizer.state[model[1][0].bias]["debiased_exp_avg"][2] = float("nan")
    with pytest.raises(InvalidArgumentError, match=r"exp_avg of '1.0.bias' holds an infinity or a NaN"):
        export_state(path, optimizer, model)
    assert path.read_bytes() == earlier


def test_more_steps_than_torch_counts_are_refused(path: Path) -> None:
    model, optimizer = trained()
    export_state(path, optimizer, model)
    state = load(path)
    for step in (2**24, 2**24 + 1):
        object.__setattr__(state.parameters["0.0.bias"], "step", step)
        save(path, state)
        if step == 2**24:
            import_state(path, optimizer, model)
            assert int(optimizer.state[model[0][0].bias]["step"]) == step
    with pytest.raises(InvalidArgumentError, match=r"step of '0.0.bias' is 16777217; torch's optimizers count to 16777216"):
        import_state(path, optimizer, model)


def test_steps_are_counted_where_a_captured_step_looks_for_them(path: Path) -> None:
    """On the parameters' device; here the meta device stands for one."""
    model, optimizer = trained(capturable=True)
    export_state(path, optimizer, model)
    layout = layouts.layout_of(optimizer)
    (group,) = optimizer.param_groups
    there = torch.empty(3, device="meta")
    assert layout.step_place(group, there).type == "meta"
    assert layout.step_place({**group, "capturable": False}, there).type == "cpu"
    for theirs, place in ({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta"):
        layout = layouts.layout_of(torch.optim.AdamW(model.parameters(), **theirs))
        (group,) = torch.optim.AdamW(model.parameters(), **theirs).param_groups
        assert layout.step_place(group, there).type == place
    again, fresh = trained(capturable=True, steps=1)
    import_state(path, fresh, again)
    assert all(torch.equal(bits(fresh.state[q]["step"]), bits(torch.tensor(3.0))) for q in again.parameters())
