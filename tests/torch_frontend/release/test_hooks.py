"""Setting release up, what its hooks are on, and what happens when they or their parameters go away."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from tests.support.torch_models import batches, gone, layers, loss_of, same_parameters, snapshot, train, unchanged
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients, remove_gradient_release
from penstock.torch_frontend.release import is_released


def test_hooks_that_were_there_stay_and_run_first() -> None:
    model = layers(2)
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad is not None))
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer)
    train(model, optimizer, batches(1))
    release.remove()
    train(model, optimizer, batches(1))
    assert seen == [True] * 8


@pytest.mark.parametrize("guarded", [False, True])
def test_a_hook_registered_after_release_that_changes_a_gradient_is_refused(guarded: bool) -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1.0 if guarded else None)
    model[0][0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.1, 0.1) and None)
    with pytest.raises(RefusedError, match=r"'0\.0\.weight'.*hooks on the parameters before release_gradients"):
        release.guard(loss_of(model, batches(1)[0])).backward()


@pytest.mark.parametrize("arguments", [{}, {"max_norm": float("inf")}, {"accumulation": "hold"}])
def test_a_lazy_module_may_be_released_before_its_first_forward(arguments) -> None:
    """Its first gradient waits for step(): a lazy parameter cannot have a hook."""
    models = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, **arguments) if released else None
        train(model, optimizer, batches(4), loss=release.guard if release else lambda loss: loss)
        models.append(model)
    assert same_parameters(*models)
    loss_of(model, batches(1)[0]).backward() if not arguments else None
    assert gone(model.parameters())


def test_the_plain_optimizer_of_released_parameters_is_refused() -> None:
    model = layers()
    released, other = AdamW(model.parameters()), AdamW(model.parameters(), backend="eager")
    release_gradients(model, released)
    loss_of(model, batches(1)[0]).backward()
    before = snapshot(model, other)
    with pytest.raises(RefusedError, match=r"another optimizer's release. Give each parameter to one optimizer"):
        other.step()
    assert unchanged(before, snapshot(model, other))
    assert not other.state


def test_parameters_replaced_after_set_up_are_refused() -> None:
    for replace in (
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        lambda m: setattr(m[0][0], "weight", nn.Parameter(torch.ones(8, 8))),
        lambda m: m.__setitem__(0, layers(1)[0]),
    ):
        model = layers()
        optimizer = AdamW(model.parameters())
        release_gradients(model, optimizer)
        train(model, optimizer, batches(1))
        replace(model)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(RefusedError, match=r"'0\.0\.weight'.*replaced.*release\.remove\(\)"):
            optimizer.step()


def test_added_groups_are_hooked_at_once() -> None:
    model = layers()
    optimizer = AdamW(model[0].parameters())
    release = release_gradients(model, optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    loss_of(model, batches(1)[0]).backward()
    assert gone([*model[0].parameters(), *model[1].parameters()])
    assert all(p.grad is not None for p in model[2:].parameters())
    assert release.ledger.live == 0


def test_set_up_refuses_what_cannot_work() -> None:
    model, other = layers(), layers()
    optimizer = AdamW(model.parameters())
    with pytest.raises(InvalidArgumentError, match=r"accumulation='sum'.*'hold' or 'state'"):
        release_gradients(model, optimizer, accumulation="sum")
    with pytest.raises(InvalidArgumentError, match=r"clipping='norm'.*exact, per_tensor"):
        release_gradients(model, optimizer, clipping="norm")
    with pytest.raises(InvalidArgumentError, match=r"max_norm=-1.*\(0, inf\)"):
        release_gradients(model, optimizer, max_norm=-1)
    with pytest.raises(InvalidArgumentError, match=r"clipping='per_tensor' needs max_norm"):
        release_gradients(model, optimizer, clipping="per_tensor")
    with pytest.raises(InvalidArgumentError, match=r"sync.*accumulation"):
        release_gradients(model, optimizer, sync=lambda: True)
    with pytest.raises(InvalidArgumentError, match=r"optimizer is a torch\.optim\.adamw\.AdamW; .*penstock"):
        release_gradients(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(InvalidArgumentError, match=r"model is a list"):
        release_gradients(list(model.parameters()), optimizer)
    with pytest.raises(RefusedError, match=r"no trainable parameter of this model"):
        release_gradients(other, optimizer)
    with pytest.raises(RefusedError, match=r"on_nonfinite='raise'.*on_nonfinite='skip'"):
        release_gradients(model, AdamW(model.parameters(), on_nonfinite="raise"))
    for arguments in ({"max_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}):
        with pytest.raises(RefusedError, match=r"accumulation='state'.*use accumulation='hold'"):
            release_gradients(model, optimizer, accumulation="state", **arguments)
    with pytest.raises(InvalidArgumentError, match=r"scaler is a float.*torch\.amp\.GradScaler"):
        release_gradients(model, optimizer, scaler=1.0)
    half = layers(dtype=torch.float16)
    with pytest.raises(RefusedError, match=r"float16 ones; use float32 parameters under torch\.autocast"):
        release_gradients(half, AdamW(half.parameters()), scaler=torch.amp.GradScaler("cpu"))
    for keep_bytes in (-1, 1.5, True):
        with pytest.raises(InvalidArgumentError, match=r"keep_bytes=.*\[0, inf\)"):
            release_gradients(model, optimizer, max_norm=1.0, keep_bytes=keep_bytes)
    with pytest.raises(InvalidArgumentError, match=r"keep_bytes=10 shortens the second pass"):
        release_gradients(model, optimizer, keep_bytes=10)
    if hasattr(nn.Parameter, "grad_dtype"):
        mixed = layers(dtype=torch.bfloat16)
        mixed[0][0].weight.grad_dtype = torch.float32
        with pytest.raises(UnsupportedTensorError, match=r"'0\.0\.weight' has grad_dtype torch\.float32.*leave grad_dtype"):
            release_gradients(mixed, AdamW(mixed.parameters()))
    assert optimizer.release is None
    release_gradients(model, optimizer)
    with pytest.raises(RefusedError, match=r"released already.*remove\(\)"):
        release_gradients(model, optimizer)
    with pytest.raises(RefusedError, match=r"another optimizer's release"):
        release_gradients(model, StableAdamW(model[0].parameters()))
    optimizer.release.remove()
    release_gradients(model, StableAdamW(model[0].parameters()))


def test_sparse_gradients_are_refused_at_set_up_and_never_half_way() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(UnsupportedTensorError, match=r"module '0'.*sparse=False"):
        release_gradients(model, AdamW(model.parameters()))
    release_gradients(model, AdamW(model[1].parameters()))  # the embedding is somebody else's


def test_model_and_optimizer_are_collected_when_nobody_holds_them() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    train(model, optimizer, batches(1))
    references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(model.parameters()))]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("after_a_backward", [False, True])
def test_a_backward_after_the_optimizer_is_collected_is_refused(after_a_backward: bool) -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    if after_a_backward:
        loss_of(model, batches(1)[0]).backward()
        model.zero_grad()
    del optimizer
    gc.collect()
    with pytest.raises(RefusedError, match=r"no longer exists.*remove_gradient_release\(model\)"):
        loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())
    remove_gradient_release(model)
    model.zero_grad()
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def swapped_to_double(model: nn.Module) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_hooks_lost_by_a_swapping_conversion_never_change_the_numbers() -> None:
    """The parameters stay the same objects: step() then updates them as a plain one, and guard() refuses."""
    models = [layers(), layers()]
    optimizers = [StableAdamW(m.parameters(), lr=1e-2) for m in models]
    release_gradients(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        swapped_to_double(model)
        train(model, optimizer, batches(3, dtype=torch.float64))
    assert same_parameters(*models)
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1.0)
    swapped_to_double(model)
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"lost its hook.*release\.remove\(\)"):
        release.guard(loss_of(model, batches(1, dtype=torch.float64)[0])).backward()
    assert unchanged(before, snapshot(model, optimizer))


def test_ownership_is_checked_when_groups_are_added() -> None:
    model = layers()
    first, second = AdamW(model[0].parameters()), AdamW(model[1].parameters())
    for optimizer in (first, second):
        release_gradients(model, optimizer)
    with pytest.raises(RefusedError, match="another optimizer's release"):
        second.add_param_group({"params": list(model[0].parameters())})
    assert len(second.param_groups) == 1


def test_release_of_a_part_leaves_the_rest_to_step() -> None:
    models = [layers(), layers()]
    optimizers = [StableAdamW(m.parameters(), lr=1e-2) for m in models]
    release_gradients(models[1][1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        for batch in batches(3):
            loss_of(model, batch).backward()
            if optimizer.release:
                assert gone(model[1].parameters())
                assert all(p.grad is not None for p in [*model[0].parameters(), *model[2:].parameters()])
            optimizer.step()
            optimizer.zero_grad()
    assert same_parameters(*models)
    with pytest.raises(RefusedError, match="outside this model"):
        release_gradients(models[0][1], optimizers[0], max_norm=1.0)


def test_two_releases_on_one_model_and_one_optimizer_gone() -> None:
    model = layers(2)
    first, second = AdamW(model[0].parameters()), AdamW(model[1].parameters())
    for optimizer in (first, second):
        release_gradients(model, optimizer)
    del first, optimizer
    gc.collect()
    with pytest.raises(RefusedError, match="no longer exists"):
        loss_of(model, batches(1)[0]).backward()
    second.zero_grad()
    remove_gradient_release(model)
    assert second.release is None
    loss_of(model, batches(1)[0]).backward()
    assert not any(p.grad is None or is_released(p.grad) for p in model.parameters())


def test_the_hooks_of_a_part_are_removed_from_the_whole_model_once_its_optimizer_is_gone() -> None:
    model = layers(2)
    release_gradients(model[:1], AdamW(model[0].parameters()))
    remove_gradient_release(model)
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


@dataclasses.dataclass
class Unhashable:
    """A hook, counted. A dataclass with fields that are compared has no hash."""

    calls: int = 0

    def __call__(self, _: torch.Tensor) -> None:
        self.calls += 1


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 0.1}, {"accumulation": "hold"}], ids=str)
def test_the_next_optimizer_takes_over_from_one_that_is_gone(arguments: dict[str, object]) -> None:
    """In the middle of a step, too: the next one trains on like the next one of an optimizer that was removed.

    Hooks that are not of a release stay, those without a hash among them.
    """
    models, (first, second) = [layers(), layers()], batches(2)
    others = [Unhashable(), Unhashable()]
    for removes, model in enumerate(models):
        next(model.parameters()).register_post_accumulate_grad_hook(others[removes])
        for _ in range(2):
            optimizer = AdamW(model.parameters(), lr=1e-2)
            release_gradients(model, optimizer, **arguments)
            for batch in (first, second):
                optimizer.release.guard(loss_of(model, batch)).backward()
                if batch is first:
                    optimizer.step()
                    optimizer.zero_grad()
            if removes:
                optimizer.release.remove()
            del optimizer
    assert same_parameters(*models)
    assert others[0] == others[1] != Unhashable()
