"""The fused back pass of OneTrainer, sd-scripts and musubi-tuner trains the model that their other loop trains, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.calls import calls_in
from tests.support.rows import covering
from tests.support.torch_models import OPTIMIZERS, batches, layers, loss_of, snapshot, spoil, train, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import InvalidArgumentError, PenstockError, RefusedError, UnsupportedTensorError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients


def hooked(optimizer: Any, use: Callable[[Tensor, dict[str, Any], int], None]) -> Any:
    """Have autograd call `use(parameter, group, index)` after each gradient, as these trainers do."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            parameter.register_post_accumulate_grad_hook(lambda p, group=group, index=index: use(p, group, index))
    return optimizer


def fused(optimizer: Any) -> Any:
    """The shortest fused back pass: it leaves freeing the gradient to the optimizer."""
    return hooked(optimizer, lambda p, group, index: optimizer.step_parameter(p, group, index))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    return [{"params": matrices}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]


def clip_each(parameters: list[Tensor], norm: float | None) -> None:
    for parameter in parameters if norm is not None else []:
        nn.utils.clip_grad_norm_(parameter, norm)


class ScalerOfOneTrainer(torch.amp.GradScaler):
    """A GradScaler that also unscales and judges one parameter at a time."""

    def unscale_parameter(self, parameter: Tensor, optimizer: Any) -> bool:
        only = types.SimpleNamespace(param_groups=[{"params": [parameter]}])
        found = self._unscale_grads_(only, self._scale.double().reciprocal().float(), torch.zeros(()), False)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return not any(map(bool, found.values()))


def one_trainer(
    model: nn.Module,
    optimizer: Any,
    given: list[Tensor],
    *,
    fused: bool,
    micro_batches: int = 1,
    clip: float | None = None,
    scaler: ScalerOfOneTrainer | None = None,
) -> None:
    """OneTrainer's loop; without the fused back pass it would clip the global norm, and here it clips each tensor, too."""
    cycles = optimizer.param_groups[0].get("momentum") != 0  # which chooses SGD's rule
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-2, 1e-2], total_steps=20, cycle_momentum=cycles)
    last = False

    def hook(parameter: Tensor, group: dict[str, Any], index: int) -> None:
        if not last:
            return
        finite = scaler is None or scaler.unscale_parameter(parameter, optimizer)
        clip_each([parameter], clip)
        if finite:
            optimizer.step_parameter(parameter, group, index)
        parameter.grad = None

    if fused:
        hooked(optimizer, hook)
    for number, batch in enumerate(given):
        last = (number + 1) % micro_batches == 0
        loss = loss_of(model, batch) / micro_batches
        (loss if scaler is None else scaler.scale(loss)).backward()
        if not last:
            continue
        if scaler is not None and not fused:
            scaler.unscale_(optimizer)
        if not fused:
            clip_each(list(model.parameters()), clip)
        if scaler is None:
            optimizer.step()
        elif not fused:
            scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("optimizer_class", "micro_batches", "clip", "dtype"),
    covering(OPTIMIZERS, [1, 3], [None, 0.05], [torch.float32, torch.bfloat16]),
)
def test_fused_and_unfused_train_the_same_model_bitwise(optimizer_class, micro_batches, clip, dtype) -> None:
    found = []
    for in_hooks in (False, True):
        model = layers(dtype=dtype)
        optimizer = optimizer_class(two_groups(model), lr=1e-2)
        one_trainer(model, optimizer, batches(9, dtype=dtype), fused=in_hooks, micro_batches=micro_batches, clip=clip)
        found.append(snapshot(model, optimizer))
    assert unchanged(*found)
    assert not unchanged(found[0][:8], snapshot(layers(dtype=dtype), optimizer)[:8])


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_scaler_of_single_parameters_gives_the_same_model_bitwise(spoilt: bool) -> None:
    given = batches(6)
    if spoilt:  # every gradient: where only some are not finite, OneTrainer skips those alone
        given[2] = given[2] * float("inf")
    found, scales = [], []
    for in_hooks in (False, True):
        model, scaler = layers(), ScalerOfOneTrainer("cpu", init_scale=2.0**10)
        optimizer = AdamW(two_groups(model), lr=1e-2)
        one_trainer(model, optimizer, given, fused=in_hooks, scaler=scaler)
        found.append(snapshot(model, optimizer))
        scales.append(scaler.get_scale())
    assert unchanged(*found)
    assert scales == [2.0 ** (9 if spoilt else 10)] * 2


def test_a_stock_scaler_raises_at_its_step() -> None:
    model = layers()
    optimizer = fused(AdamW(model.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    for state in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
        state._reset_state()


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_sd_scripts_and_musubi_train_the_same_model_bitwise(max_norm: float, accelerator: Any) -> None:
    """Their fused loop calls neither step() nor zero_grad(), and patches the optimizer that Accelerate has wrapped."""
    found = []
    for in_hooks in (False, True):
        model = layers()
        inner = AdamW(two_groups(model), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=3e-2, total_steps=20)
        optimizer, scheduler = accelerator.prepare(inner, scheduler)
        if in_hooks:
            optimizer.step_param = optimizer.optimizer.step_parameter

            def hook(parameter: Tensor, group: dict[str, Any], _: int, optimizer: Any = optimizer) -> None:
                if accelerator.sync_gradients and max_norm != 0.0:
                    accelerator.clip_grad_norm_([parameter], max_norm)  # it takes a tensor for a list of rows
                optimizer.step_param(parameter, group)
                parameter.grad = None

            hooked(optimizer, hook)
        for batch in batches(6):
            accelerator.backward(loss_of(model, batch))
            if not in_hooks:
                clip_each(list(model.parameters()), max_norm or None)
                optimizer.step()
            scheduler.step()
            if not in_hooks:
                optimizer.zero_grad(set_to_none=True)
        found.append(snapshot(model, inner))
    assert unchanged(*found)


def test_a_fused_run_resumes_bitwise_and_has_one_gradient_alive() -> None:
    given, model = batches(6), layers()
    plain = AdamW(two_groups(model), lr=1e-2)
    train(model, plain, given[:3])
    resumed = copy.deepcopy(model)
    optimizer = AdamW(two_groups(resumed))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    fused(optimizer)
    with LiveGradientMeter(resumed.named_parameters()) as meter:
        train(resumed, optimizer, given[3:])
    train(model, plain, given[3:])
    assert unchanged(snapshot(model, plain), snapshot(resumed, optimizer))
    assert meter.peak <= 2 * max(p.nbytes for p in model.parameters())


def test_a_gradient_that_is_not_finite_is_skipped_alone_as_under_release() -> None:
    found = []
    for released in (True, False):
        model = layers()
        spoil(model[1][0].weight)
        optimizer = StableAdamW(two_groups(model), lr=1e-2, on_nonfinite="skip")
        release = release_gradients(model, optimizer) if released else fused(optimizer)
        train(model, optimizer, batches(3))
        found.append(snapshot(model, optimizer))
        assert release.skipped == 3
    assert unchanged(*found)


def load_own_state(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def of(optimizer: Any, *position: int) -> tuple[Tensor, dict[str, Any]]:
    group, index = position
    return optimizer.param_groups[group]["params"][index], optimizer.param_groups[group]


MISUSES: dict[str, tuple[Callable[[nn.Module, Any], Any], type[PenstockError], str]] = {
    "under a release": (
        lambda m, o: (release_gradients(m, o), o.step_parameter(*of(o, 0, 0), 0)),
        RefusedError,
        "fused back pass off",
    ),
    "no gradient": (
        lambda m, o: (o.zero_grad(), o.step_parameter(*of(o, 0, 0), 0)),
        RefusedError,
        "has no gradient",
    ),
    "another group": (lambda m, o: o.step_parameter(of(o, 0, 0)[0], of(o, 1, 0)[1]), InvalidArgumentError, "in the group"),
    "another index": (lambda m, o: o.step_parameter(*of(o, 0, 0), 1), InvalidArgumentError, "number 1 of the group"),
    "an index from the end": (lambda m, o: o.step_parameter(*of(o, 0, -1), -1), InvalidArgumentError, "number -1"),
    "an index that is a name": (lambda m, o: o.step_parameter(*of(o, 0, 0), "weight"), InvalidArgumentError, "number weight"),
    "no tensor": (lambda m, o: o.step_parameter("weight", of(o, 0, 0)[1]), InvalidArgumentError, "parameter is a str"),
    "a copy of a group": (
        lambda m, o: o.step_parameter(of(o, 0, 0)[0], {**of(o, 0, 0)[1], "lr": 0.0}, 0),
        InvalidArgumentError,
        "a copy",
    ),
    "a group before load_state_dict": (
        lambda m, o: (pair := of(o, 0, 0), load_own_state(o), o.step_parameter(*pair, 0)),
        InvalidArgumentError,
        "after load_state_dict",
    ),
    "another optimizer's parameter": (
        lambda m, o: o.step_parameter(*of(AdamW(layers()(torch.ones(8)).sum().backward() or m.parameters()), 0, 0)),
        InvalidArgumentError,
        "optimizer.param_groups",
    ),
    "a released gradient": (
        lambda m, o: (
            o.zero_grad(),
            release_gradients(m, AdamW(m.parameters(), lr=0.0, weight_decay=0.0)),
            loss_of(m, batches(1)[0]).backward(),
            o.step_parameter(*of(o, 0, 0), 0),
        ),
        RefusedError,
        "another optimizer's",
    ),
    "a sparse gradient": (
        lambda m, o: (setattr(of(o, 0, 0)[0], "grad", torch.eye(8).to_sparse()), o.step_parameter(*of(o, 0, 0), 0)),
        UnsupportedTensorError,
        "sparse",
    ),
    "on_nonfinite='raise'": (
        lambda m, o: (setattr(o, "on_nonfinite", "raise"), o.step_parameter(*of(o, 0, 0), 0)),
        RefusedError,
        "on_nonfinite='skip'",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_before_anything_changes(name: str) -> None:
    misuse, error, message = MISUSES[name]
    model = layers()
    optimizer = AdamW(two_groups(model), lr=1e-2)
    train(model, optimizer, batches(2))
    loss_of(model, batches(1)[0]).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=message):
        misuse(model, optimizer)
    assert unchanged(before, snapshot(model, optimizer))


def test_a_gradient_that_comes_in_parts_is_refused_before_anything_changes() -> None:
    model = layers(1)
    optimizer = fused(AdamW(model.parameters()))
    before = snapshot(model, optimizer)
    x = batches(1)[0].requires_grad_()
    for _ in range(2):
        x = checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(RefusedError, match="use_reentrant=False"):
        x.sum().backward()
    assert unchanged(before, snapshot(model, optimizer))


@pytest.mark.parametrize("refused", [False, True])
def test_no_graph_is_kept_after_a_backward(refused: bool) -> None:
    """The nodes of a reentrant checkpoint that stay alive would make every release search its graphs for more."""
    model = layers()
    fused(AdamW(model.parameters()))
    x = batches(1)[0].requires_grad_()
    for layer in [*model, *[model[0]] * refused]:
        x = checkpoint(layer, x, use_reentrant=True)
    node = weakref.ref(x.grad_fn)
    with pytest.raises(RefusedError) if refused else contextlib.nullcontext():
        x.sum().backward()
    del x
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_a_parameter_do_not_grow_with_the_model(reentrant: bool) -> None:
    def calls(depth: int) -> float:
        model = layers(depth)
        fused(AdamW(model.parameters()))
        for _ in range(2):
            x = batches(1)[0].requires_grad_()
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            counted = calls_in(x.sum().backward)
        assert counted["_refresh"] == 1  # groups and settings are read once a backward
        return counted.total() / (2 * depth)

    assert calls(64) <= calls(8)


def test_an_optimizer_without_the_fused_back_pass_keeps_nothing_for_it() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, batches(2))
    assert optimizer.supports_fused_back_pass
    assert "_passes" not in vars(optimizer)
