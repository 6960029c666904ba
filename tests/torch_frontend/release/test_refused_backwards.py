"""A backward that is refused leaves everything as it was: `.grad`, the ledger, what waits, the parameters and the moments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from tests.support.counting_backend import WIDTH, Counting, blocks, optimizer_of
from tests.support.torch_models import batches, bits, gone, layers, loss_of, snapshot, train, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import InvalidArgumentError, PenstockError, RefusedError, UnsupportedTensorError
from penstock.torch_frontend import AdamW, microbatch_blocks, release_gradients


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, state, and what lies in `.grad`, with its place."""
    held = [torch.zeros(0) if gone([p]) else p.grad for p in model.parameters()]
    return [*snapshot(model, optimizer), *(bits(gradient).clone() for gradient in held)]


def refused(
    model: nn.Module, loss: Callable[[], Tensor], kind: type[PenstockError] = RefusedError, match: str | None = None
) -> None:
    """This backward is refused, and nothing of it is left."""
    release = model.released  # type: ignore[assignment]
    before, alive = everything(model, release.optimizer), release.ledger.live
    with pytest.raises(kind, match=match):
        loss().backward()
    assert unchanged(before, everything(model, release.optimizer))
    assert release.ledger.live == alive


def released(model: nn.Module, **options) -> nn.Module:
    object.__setattr__(model, "released", release_gradients(model, AdamW(model.parameters(), lr=1e-2), **options))
    return model


def two_heads(**options) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """The second loss reaches its own head first, which the first has not updated."""
    torch.manual_seed(0)
    trunk, heads = layers(2), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
    model = released(nn.ModuleList([trunk, heads]), **options)
    return model, lambda which: heads[which](trunk(batches(1)[0])).pow(2).mean()


def test_an_undeclared_second_backward_is_refused_and_not_used() -> None:
    model, loss = two_heads()
    optimizer, norm = model.released.optimizer, model.released.last_norm
    loss(0).backward()
    refused(model, lambda: loss(1), match=r"'1\.1\.\w+': a second backward.*optimizer\.step\(\)")
    refused(model, lambda: loss(0), match=r"a second backward.*accumulation='hold'")
    optimizer.step()
    other, again = two_heads()
    again(0).backward()
    other.released.optimizer.step()
    assert unchanged(everything(model, optimizer), everything(other, other.released.optimizer)), "the refused one was used"
    assert norm is None


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=["a second backward", "without guard"])
def test_a_held_gradient_that_a_refused_backward_was_added_to_is_not_used(options) -> None:
    """What release.paused() has left in `.grad` is mixed with it, which step() refuses until zero_grad() has discarded it."""
    model, loss = two_heads(**options)
    optimizer = model.released.optimizer
    with model.released.paused():
        loss(1).backward()
    if not options:
        model[1][0](batches(1)[0]).pow(2).mean().backward()  # updates the other head only
    with pytest.raises(RefusedError, match="a second backward" if not options else r"release\.guard"):
        loss(1).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match="a backward that was refused may have added to its gradient"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    assert model.released.ledger.live == 0


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("unfrozen", [False, True])
def test_a_gradient_without_hook_that_a_refused_backward_was_added_to_is_not_used(unfrozen: bool, overflow: bool) -> None:
    """One of a parameter outside the model, or of one that was unfrozen in this step; zero_grad() discards it."""
    model, outside = layers(2), nn.Parameter(torch.ones(()))
    late = model[0][0].weight.requires_grad_(False) if unfrozen else outside
    optimizer = AdamW([*model.parameters(), outside], lr=1e-2)
    release_gradients(model, optimizer)
    (outside * loss_of(model, batches(1)[0]) * (float("inf") if overflow else 1.0)).backward()
    late.requires_grad_()
    loss = outside * model(batches(1)[0].requires_grad_()).pow(2).mean() + late.pow(2).sum()
    with pytest.raises(RefusedError, match="a second backward"):
        loss.backward()
    before = [late.detach().clone(), *optimizer.state[late].values()]
    with pytest.raises(RefusedError, match="a backward that was refused may have added to its gradient"):
        optimizer.step()
    with pytest.raises(RefusedError, match="hold infinities") if overflow else contextlib.nullcontext():
        optimizer.zero_grad()
    assert outside.grad is None
    assert gone(model.parameters())
    optimizer.step()
    assert unchanged(before, [late, *optimizer.state[late].values()])


def test_a_gradient_set_by_hand_goes_with_the_refused_backward_that_was_added_to_it() -> None:
    model = released(layers(), max_norm=1.0)
    model[3][0].bias.grad = torch.full((8,), 0.1)
    before = snapshot(model, model.released.optimizer)
    with pytest.raises(RefusedError, match=r"release\.guard"):
        loss_of(model, batches(1)[0]).backward()
    assert model[3][0].bias.grad is None
    model.released.optimizer.step()
    assert unchanged(before, snapshot(model, model.released.optimizer))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_backward_without_guard_is_refused_and_not_used(scaled: bool) -> None:
    model = released(layers(), **({"scaler": torch.amp.GradScaler("cpu")} if scaled else {"max_norm": 1.0}))
    remedy = r"with a scaler.*scaler\.scale\(release\.guard\(loss\)\)" if scaled else r"max_norm=1.0.*release\.guard\(loss\)"
    refused(model, lambda: loss_of(model, batches(1)[0]), match=remedy)
    model.released.optimizer.step()
    assert not model.released.optimizer.state
    train(model, model.released.optimizer, batches(2), loss=model.released.guard)


def test_a_micro_batch_after_the_last_is_refused() -> None:
    last = [False]
    model = released(layers(), accumulation="hold", sync=lambda: last[0])
    loss_of(model, batches(1)[0]).backward()
    last[0] = True
    loss_of(model, batches(1)[0]).backward()
    last[0] = False
    refused(model, lambda: loss_of(model, batches(1)[0]), match="already updated")


@pytest.mark.parametrize("known", [False, True], ids=["none before", "one before"])
@pytest.mark.parametrize("accumulation", [None, "hold"])
def test_a_second_backward_is_refused_before_layers_that_only_it_uses_are_updated(accumulation, known: bool) -> None:
    """Behind a reentrant checkpoint their gradients come first, and from a pass of their own, be it the first such one."""
    model = released(layers(3), accumulation=accumulation, sync=None if accumulation is None else lambda: True)

    def loss(count: int) -> Tensor:
        x = model[0](batches(1)[0])
        for layer in model[1:count]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.pow(2).mean()

    if known:
        loss(3).backward()
        model.released.optimizer.step()
    loss(2 if known else 1).backward()
    refused(model, lambda: loss(3), match=r"'2\.0\.\w+': a second backward")
    model.released.optimizer.zero_grad()
    loss(3).backward()
    model.released.optimizer.step()


@pytest.mark.parametrize("options", [{}, {"max_norm": 1e9, "clipping": "per_tensor"}, {"accumulation": "state"}], ids=str)
def test_a_later_backward_that_fails_before_the_model_leaves_nothing_outside_of_it(options) -> None:
    """A parameter outside the model has got a gradient that was computed with updated ones, where the plain loop's was not."""
    model, outside = layers(2), nn.Parameter(torch.ones(()))
    optimizer = AdamW([*model.parameters(), outside], lr=1e-2)
    release = release_gradients(model, optimizer, **options, sync=(lambda: True) if "accumulation" in options else None)

    def loss(fails: bool) -> Tensor:
        x = model[0](batches(1)[0])
        y = checkpoint(model[1], x, use_reentrant=True)  # the end of the outer pass is not its last gradient
        if fails:
            y.register_hook(lambda gradient: 1 / 0)
        return outside * y.pow(2).mean() + 1e-3 * (x * outside).mean()

    for _ in range(2):
        loss(False).backward()
        with release.paused():
            loss(False).backward()
        with contextlib.suppress(RefusedError):  # what paused() has left
            optimizer.step()
        optimizer.zero_grad()
        loss(False).backward()
        with pytest.raises(RefusedError, match=r"second backward"):
            loss(True).backward()
        with pytest.raises(RefusedError, match="may have added to its gradient"):
            optimizer.step()
        optimizer.zero_grad()
    release.remove()
    assert not outside._post_accumulate_grad_hooks


def test_a_backward_after_a_failed_one_behind_a_reentrant_checkpoint_is_refused() -> None:
    """Which has updated a layer that the other one's graph is computed with."""
    model = released(layers(2))

    def fail(gradient: Tensor) -> None:
        raise MemoryError("planted")

    x = model[0](batches(1)[0])
    x.register_hook(fail)
    with pytest.raises(MemoryError, match="planted"):
        checkpoint(model[1], x, use_reentrant=True).pow(2).mean().backward()
    model[1].requires_grad_(False)
    refused(model, lambda: loss_of(model, batches(1)[0]), match=r"'0\.0\.\w+': a second backward")
    model.released.optimizer.zero_grad()
    train(model, model.released.optimizer, batches(1))


def test_a_setting_out_of_range_is_refused_until_it_is_repaired() -> None:
    """At the first gradient, guarded or not, and again until it is repaired."""
    for options in ({}, {"max_norm": 1.0}, {"accumulation": "state"}):
        model = released(layers(), **options)
        guard = model.released.guard
        model.released.optimizer.param_groups[0]["lr"] = -1.0
        for _ in range(2):
            refused(model, lambda model=model, guard=guard: guard(loss_of(model, batches(1)[0])), InvalidArgumentError, "lr")
        model.released.optimizer.param_groups[0]["lr"] = 1e-2
        train(model, model.released.optimizer, batches(2), loss=guard)


class Sparse(torch.autograd.Function):
    """x + w[:1], with a sparse gradient of w."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return x + weight[:1]

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (gradient,) = gradients
        values = gradient.sum(0, keepdim=True)
        return gradient, torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), values, ctx.shape, check_invariants=True)


def test_a_sparse_gradient_is_refused() -> None:
    model = released(layers(2))
    refused(model, lambda: Sparse.apply(batches(1)[0], model[0][0].weight).pow(2).mean(), UnsupportedTensorError, "sparse")


def test_a_second_backward_through_divided_blocks_is_refused() -> None:
    """Its parameters' gradients are booked together, before the first of them comes."""
    model = released(layers(2))
    blocks = microbatch_blocks(list(model), chunks=2)
    loss_of(model, batches(1)[0]).backward()
    refused(model, lambda: loss_of(model, batches(1)[0]), match="a second backward")
    blocks.remove()


def test_queued_gradients_of_a_refused_backward_are_discarded() -> None:
    """Layers are updated before the sparse gradient comes, which nothing can undo; what still waits then never is."""
    model = blocks()
    model.extra = nn.Parameter(torch.ones(3, WIDTH))
    optimizer = optimizer_of(model, True, AdamW, Counting)
    release = release_gradients(model, optimizer)
    x = model[0](batches(1, WIDTH)[0])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedTensorError):
        model[1:](Sparse.apply(x, model.extra)).pow(2).mean().backward()
    assert release.ledger.live == 0
    assert gone(model.parameters())
    same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    came = len(list(model[1:].parameters()))
    assert 0 < sum(same[-came:]) < came
    optimizer.step()
    assert same == [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]


def squares(model: nn.Module) -> Tensor:
    return sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


@pytest.mark.parametrize("order", ["before", "after", "inside a factor", "two guarded"])
@pytest.mark.parametrize("scaled", [False, True])
def test_terms_outside_guard_with_released_parameters_are_refused(order: str, scaled: bool) -> None:
    """A regulariser outside of guard(), whichever of the two autograd walks first: nothing is updated without it."""
    model = released(layers(), **({"scaler": torch.amp.GradScaler("cpu")} if scaled else {"max_norm": 1.0}))
    guard = model.released.guard

    def loss() -> Tensor:
        early = squares(model)
        one = guard(loss_of(model, batches(1)[0]))
        late = squares(model)
        others = {"before": early, "after": late, "inside a factor": (1 + late) * 3, "two guarded": guard(late)}
        return one + 0.1 * others[order]

    refused(model, loss, match=r"release\.guard\(")
    train(model, model.released.optimizer, batches(2), loss=guard)


def test_terms_outside_guard_without_released_parameters_are_accepted() -> None:
    """A factor, a constant, and a term of a leaf that is not the release's."""
    trained = []
    for guards in (False, True):
        model = released(layers(), **({"max_norm": float("inf")} if guards else {}))
        guard = model.released.guard if guards else lambda loss: loss
        leaf = torch.ones((), requires_grad=True)
        (guard(loss_of(model, batches(1)[0])) * 3 / 7 + leaf.pow(2) + 1).backward()
        model.released.optimizer.step()
        assert leaf.grad is not None
        assert leaf.grad.item() == 2.0
        trained.append(snapshot(model, model.released.optimizer))
    assert unchanged(*trained)
