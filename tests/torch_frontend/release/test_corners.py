"""Corners of autograd and of modules: each keeps the plain loop's numbers, or raises before anything wrong is done."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from tests.support.rows import rows
from tests.support.torch_models import (
    batches,
    gone,
    layers,
    loss_of,
    plain_and_released,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import nn

from penstock.core.errors import RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

# -- hooks that are lost ------------------------------------------------------------------------------------------------


def test_to_empty_after_set_up_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    model(batches(1)[0]).pow(2).mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RefusedError, match=r"replaced after release_gradients.*to_empty"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_copy_trains_alike_and_leaves_the_original_alone() -> None:
    model = layers()
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    train(model, optimizer, batches(2))
    other, its_optimizer = copy.deepcopy((model, optimizer))
    assert its_optimizer.release is None
    before = snapshot(model, optimizer)
    train(other, its_optimizer, batches(3))
    assert unchanged(before, snapshot(model, optimizer))
    train(model, optimizer, batches(3))
    assert same_parameters(model, other)


def test_no_copy_is_made_in_the_middle_of_a_step() -> None:
    """The copy would take the published norm for a gradient."""
    model = layers()
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RefusedError, match=r"copy.*in the middle of a step"):
        copy.deepcopy((model, optimizer))
    optimizer.step()
    copy.deepcopy((model, optimizer))


def test_release_again_after_remove_continues_bit_for_bit() -> None:
    """Taking release off and putting it on again, also between two optimizers, goes on with the same numbers."""

    def run(model, optimizer, guard) -> None:
        train(model, optimizer, batches(2), loss=guard)
        if optimizer.release:
            optimizer.release.remove()
            model.load_state_dict(model.state_dict(), assign=False)
            release_gradients(model, optimizer)
        train(model, optimizer, batches(2))

    assert same_parameters(*plain_and_released(run))


# -- autograd -----------------------------------------------------------------------------------------------------------


def test_concurrent_backwards_raise_and_leave_every_parameter_updated_once_at_most() -> None:
    """One of the threads is told; no update is made twice or half."""
    model = layers(6, 32)
    plain = copy.deepcopy(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    losses = [loss_of(model, batch) for batch in batches(2, 32)]
    start, outcomes = threading.Barrier(2), []

    def backward(loss: torch.Tensor) -> None:
        start.wait()
        try:
            loss.backward()
            outcomes.append(None)
        except RuntimeError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [outcome for outcome in outcomes if outcome is not None]
    assert errors  # a second backward, or a parameter modified in place under the other's graph
    assert all(isinstance(error, RefusedError) or "modified by an inplace operation" in str(error) for error in errors)
    assert all(float(optimizer.state[p]["step"]) == 1 for p in model.parameters() if optimizer.state[p])
    optimizer.step()
    optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        p.data.copy_(q)
    train(model, optimizer, batches(2, 32))


def test_create_graph_equals_the_plain_loop_and_keeps_no_graph() -> None:
    def run(model, optimizer, guard) -> None:
        for batch in batches(3):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
                loss_of(model, batch).backward(create_graph=True)
            assert not optimizer.release or gone(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad_fn is None and p.is_leaf for p in model.parameters())
        assert not any(x.requires_grad for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x))

    assert same_parameters(*plain_and_released(run))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1.0, "clipping": "per_tensor"}])
def test_norms_under_create_graph_hold_no_graph(arguments, skips: bool) -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), on_nonfinite="skip" if skips else "propagate")
    release = release_gradients(model, optimizer, **arguments)
    loss_of(model, batches(1)[0]).backward(create_graph=True)
    assert not any(p.grad.norm().requires_grad for p in model.parameters())
    assert not release.last_norm.requires_grad


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1e9}, {"max_norm": 1e9, "keep_bytes": 500}])
def test_a_compiled_model_is_compiled_once_and_equals_itself_without_release(arguments) -> None:
    compilations = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        compilations[-1] += 1
        return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward))(graph, inputs)

    def run(model, optimizer, guard) -> None:
        compilations.append(0)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        for batch in batches(4):
            guard(compiled(batch).pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert same_parameters(*plain_and_released(run, **arguments))
    assert compilations == [1, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch, without release too
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # by the compiler, which traces a Function
@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1e9}], ids=["release", "guard"])
def test_a_compiled_function_may_call_backward(arguments) -> None:
    """Which the compiler leaves to the engine, and so all that release asks of the engine."""

    def run(model, optimizer, guard) -> None:
        torch._dynamo.reset()

        @torch.compile(backend="aot_eager")
        def train_on(batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, batch)
            guard(loss).backward()
            return loss

        for batch in batches(3):
            train_on(batch)
            optimizer.step()
            optimizer.zero_grad()

    assert same_parameters(*plain_and_released(run, **arguments))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch, without release too
@pytest.mark.parametrize("arguments", rows([{}, {"max_norm": 1e9}], [{}].__contains__), ids=["release", "guard"])
def test_compiled_autograd_equals_the_plain_loop(arguments) -> None:
    norms = []

    def run(model, optimizer, guard) -> None:
        torch._dynamo.reset()
        for batch in batches(3):
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                guard(loss_of(model, batch)).backward()
            assert not optimizer.release or gone(model.parameters())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()
            optimizer.zero_grad()

    assert same_parameters(*plain_and_released(run, **arguments))
    torch.testing.assert_close(norms[:3], norms[3:])


def test_a_loss_without_released_parameters_and_an_empty_step_do_nothing() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1.0)
    x = torch.ones(3, requires_grad=True)
    release.guard(x.sum()).backward()
    assert torch.equal(x.grad, torch.ones(3))
    assert float(release.last_norm) == 0.0
    before = snapshot(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert unchanged(before, snapshot(model, optimizer))


# -- memory -------------------------------------------------------------------------------------------------------------

LAYER_BYTES = (32 * 32 + 32) * 4
EVERY_PATH = {
    "release": ({}, 1),
    "guard": ({"max_norm": 1.0}, 1),
    "guard, two layers kept": ({"max_norm": 1.0, "keep_bytes": 2 * LAYER_BYTES}, 3),
    "scaler": ({"scaler": torch.amp.GradScaler("cpu", init_scale=2.0)}, 1),
    "per tensor": ({"max_norm": 1.0, "clipping": "per_tensor"}, 1),
    "state": ({"accumulation": "state"}, 1),
    "hold": ({"accumulation": "hold"}, 8),
    "hold, last micro-batch": ({"accumulation": "hold", "sync": lambda: True}, 1),
}


@pytest.mark.parametrize(("arguments", "layers_alive"), EVERY_PATH.values(), ids=EVERY_PATH)
def test_the_live_gradients_measured_are_those_of_the_ledger(arguments, layers_alive: int) -> None:
    model = layers(8, 32)
    optimizer = StableAdamW(model.parameters())
    scaler = arguments.get("scaler") or torch.amp.GradScaler("cpu", enabled=False)
    with (
        LiveGradientMeter(model.named_parameters()) as measured,
        release_gradients(model, optimizer, **arguments) as release,
    ):
        for batch in batches(3, 32):
            scaler.scale(release.guard(loss_of(model, batch))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert release.ledger.live == 0
    assert (layers_alive - 1) * LAYER_BYTES < measured.peak <= layers_alive * LAYER_BYTES
    assert release.ledger.peak == measured.peak


# -- slices of one tensor -----------------------------------------------------------------------------------------------


class Slices(nn.Module):
    """Two matrices, one after the other in one tensor's memory."""

    def __init__(self, *, share_writes: bool) -> None:
        super().__init__()
        whole = torch.arange(32.0).reshape(2, 4, 4) / 32
        if share_writes:
            self.a, self.b = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        else:
            self.a, self.b = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4, 4))
            self.a.data, self.b.data = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.b


def test_parameters_that_are_slices_of_one_tensor_are_released() -> None:
    x, models = torch.ones(3, 4), [Slices(share_writes=False) for _ in range(2)]
    for model in models:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if model is models[0]:
            release_gradients(model, optimizer)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_parameters_that_count_their_writes_together_raise_in_the_backward_pass() -> None:
    model = Slices(share_writes=True)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    x = torch.ones(3, 4, requires_grad=True)  # whose gradient reads a after b is updated
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).square().sum().backward()


def test_parameters_with_an_element_in_common_are_refused_and_the_remedies_work() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model[0].weight.data = model[2].weight.data  # a way to tie weights that autograd does not know of
    with pytest.raises(RefusedError, match=r"'0\.weight' and '2\.weight' share memory"):
        release_gradients(model, AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(RefusedError, match=r"'0\.weight' and '2\.weight' share memory"):  # of which one alone is updated
        release_gradients(model, AdamW(model[1:].parameters(), lr=1e-2))
    optimizer = AdamW(model[1:2].parameters(), lr=1e-2)
    release = release_gradients(model, optimizer)
    with pytest.raises(RefusedError, match="share memory"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1
    release.remove()

    model[0].weight = model[2].weight
    release_gradients(model, AdamW(model.parameters(), lr=1e-2)).remove()
    model[0].weight = nn.Parameter(model[2].weight.data)
    model[0].weight.data = model[2].weight.data.clone()
    release_gradients(model, AdamW(model.parameters(), lr=1e-2))


def test_columns_of_one_matrix_share_no_memory() -> None:
    model, whole = nn.ParameterList([torch.zeros(4, 3), torch.zeros(4, 5)]), torch.zeros(4, 8)
    model[0].data, model[1].data = whole[:, :3], whole[:, 3:]
    release_gradients(model, AdamW(model.parameters())).remove()
    model[1].data = whole[:, 2:7]
    with pytest.raises(RefusedError, match="'0' and '1' share memory"):
        release_gradients(model, AdamW(model.parameters()))
