"""What a released gradient leaves in `.grad`: it tells its norm, lets through what changes nothing, refuses everything else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
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
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, StableAdamW, prepare_for_gradient_release, release_gradients

EVERY_WAY = {
    "one pass": {},
    "guard": {"max_norm": 0.05},
    "guard, kept": {"max_norm": 0.05, "keep_bytes": 500},
    "per tensor": {"max_norm": 0.05, "clipping": "per_tensor"},
    "last micro-batch": {"accumulation": "hold", "sync": lambda: True},
}


def after_backward(**arguments):
    """A model after one released backward, with its optimizer and its release."""
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, **arguments)
    release.guard(loss_of(model, batches(1)[0])).backward()
    return model, optimizer, release


def true_norm(model: nn.Module, batch: torch.Tensor, of: nn.Module | None = None) -> torch.Tensor:
    gradients = torch.autograd.grad(loss_of(model, batch), list((of or model).parameters()))
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in gradients]))


@pytest.mark.parametrize("arguments", EVERY_WAY.values(), ids=EVERY_WAY)
def test_the_true_norm_is_known_for_all_and_for_a_part(arguments) -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, **arguments)
    assert release.last_norm is None
    for batch in batches(3):
        expected, of_part = true_norm(model, batch), true_norm(model, batch, model[1])
        release.guard(loss_of(model, batch)).backward()
        torch.testing.assert_close(release.last_norm, expected, rtol=1e-6, atol=0)
        assert release.last_norm.shape == ()
        assert gone(model.parameters())
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        torch.testing.assert_close(clip_grad_norm_(model[1].parameters(), 1e6).double(), of_part, rtol=1e-6, atol=0)
        torch.testing.assert_close(get_total_norm([p.grad for p in model.parameters()]).double(), expected, rtol=1e-6, atol=0)
        norms = [p.grad.data.norm(2) for p in model.parameters()]
        torch.testing.assert_close(torch.stack(norms).norm().double(), expected, rtol=1e-6, atol=0)
        # What trainers log: the norm that clipping reports. A clip above the norm, and the declared one, change nothing.
        reported = clip_grad_norm_(model.parameters(), arguments.get("max_norm", 1e6) if "clipping" not in arguments else 1e6)
        torch.testing.assert_close(reported.double(), expected, rtol=1e-6, atol=0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        torch.testing.assert_close(release.last_norm, expected, rtol=1e-6, atol=0)
        optimizer.zero_grad()


@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_declared_clip_may_be_repeated(foreach: bool | None) -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1e-3)
    for repeats, batch in enumerate(batches(4)):
        release.guard(loss_of(model, batch)).backward()
        for _ in range(repeats):
            clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
        optimizer.step()


def test_held_gradients_are_real_and_their_norm_is_known_after_step() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, accumulation="hold")
    expected = true_norm(model, batches(1)[0])
    loss_of(model, batches(1)[0]).backward()
    assert not any(gone([p]) for p in model.parameters())
    optimizer.step()
    torch.testing.assert_close(release.last_norm, expected, rtol=1e-6, atol=0)


def test_a_parameter_that_only_an_earlier_micro_batch_used_is_part_of_the_norm() -> None:
    model, extra = layers(2), nn.Parameter(torch.ones(3))
    optimizer = AdamW([*model.parameters(), extra])
    now = {"last": False}
    release = release_gradients(
        nn.ParameterList([*model.parameters(), extra]), optimizer, accumulation="hold", sync=lambda: now["last"]
    )
    extra.pow(2).sum().backward()
    now["last"] = True
    loss_of(model, batches(1)[0]).backward()
    plain = layers(2)
    loss_of(plain, batches(1)[0]).backward()
    expected = torch.cat([torch.full((3,), 2.0), *(p.grad.flatten() for p in plain.parameters())]).norm()
    torch.testing.assert_close(clip_grad_norm_([*model.parameters(), extra], 1e6), expected)
    optimizer.step()
    torch.testing.assert_close(release.last_norm.float(), expected)


CHANGES = {
    "clipping": lambda model: clip_grad_norm_(model.parameters(), 1e-3),
    "clipping, foreach": lambda model: clip_grad_norm_(model.parameters(), 1e-3, foreach=True),
    "clipping a part": lambda model: clip_grad_norm_(model[2].parameters(), 1e-3),
    "clipping by value": lambda model: clip_grad_value_(model.parameters(), 1e-3),
    "another norm": lambda model: clip_grad_norm_(model.parameters(), 1e6, norm_type=float("inf")),
    "a norm of each row": lambda model: model[0][0].weight.grad.norm(dim=1),
    "in place": lambda model: model[0][0].weight.grad.mul_(0.5),
    "by a tensor": lambda model: model[0][0].weight.grad.mul_(torch.full((8, 8), 0.5)),
    "through .data": lambda model: model[0][0].weight.grad.data.div_(4),
    "multiplied": lambda model: model[0][0].weight.grad * 0.5,
    "a part of it": lambda model: model[0][0].weight.grad[1:].add_(1.0),
    "centralised": lambda model: model[0][0].weight.grad.sub_(model[0][0].weight.grad.mean()),
    "decayed": lambda model: model[0][0].weight.grad.add_(model[0][0].weight, alpha=0.1),
    "added elsewhere": lambda model: torch.ones(8, 8).add_(model[0][0].weight.grad),
    "another optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "another optimizer, fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True).step(),
    "copied": lambda model: model[0][0].weight.grad.clone(),
    "judged": lambda model: torch.isfinite(model[0][0].weight.grad).all(),
    "a hook's clamp": lambda model: model[0][0].weight.grad.clamp_(-1, 1),
    "a number of it": lambda model: model[0][0].bias.grad.tolist(),
    "numpy": lambda model: model[0][0].weight.grad.numpy(),
    "its address": lambda model: model[0][0].weight.grad.data_ptr(),
    "dlpack": lambda model: torch.utils.dlpack.to_dlpack(model[0][0].weight.grad),
    "another framework": lambda model: torch.from_dlpack(model[0][0].weight.grad),
    "pickle": lambda model: pickle.dumps(model[0][0].weight.grad),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "zeroed, one": lambda model: model[0][0].weight.grad.zero_(),
    "replaced": lambda model: setattr(model[0][0].weight.grad, "data", torch.zeros(8, 8)),
    "a second backward": lambda model: loss_of(model, batches(1)[0]).backward(),
    "a second backward with a graph": lambda model: loss_of(model, batches(1)[0]).backward(create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("arguments", [{}, {"max_norm": 0.05}], ids=["one pass", "guard"])
def test_an_undeclared_use_raises_at_its_own_line(change, arguments) -> None:
    model, optimizer, release = after_backward(**arguments)
    before = snapshot(model, optimizer)
    with pytest.raises((RefusedError, RuntimeError), match=r"parameter '.*'|data pointer"):
        change(model)
    assert unchanged(before, snapshot(model, optimizer))
    assert release.ledger.live == 0
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, batches(1), loss=release.guard)


def test_an_error_says_which_norm_is_known_and_which_clipping_was_declared() -> None:
    model, optimizer, _ = after_backward(max_norm=0.05)
    with pytest.raises(RefusedError, match=r"its norm of a part of it \(known is that of order 2, of the whole gradient\)"):
        model[0][0].weight.grad.norm(dim=1)
    with pytest.raises(RefusedError, match=r"multiplication by .* \(max_norm=0.05 was declared, and is applied already\)"):
        clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


PASSES = {
    "times one": lambda model: [p.grad.mul_(1.0) for p in model.parameters()],
    "times a tensor of one": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], torch.ones(())),
    "divided by one": lambda model: [p.grad.div_(1) for p in model.parameters()],
    "its shape": lambda model: [(p.grad.shape, p.grad.dtype, p.grad.device, p.grad.numel()) for p in model.parameters()],
    "detached": lambda model: [p.grad.detach() for p in model.parameters()],
    "printed": lambda model: str(model[0][0].weight.grad),
    "a copy of the model": lambda model: copy.deepcopy(model),
    "shared memory": lambda model: model.share_memory(),
    "of no gradient": lambda model: clip_grad_norm_([], 1.0),
}


@pytest.mark.parametrize("action", PASSES.values(), ids=PASSES)
def test_a_use_that_changes_nothing_passes(action) -> None:
    model, optimizer, release = after_backward()
    other, plain, _ = after_backward()
    action(model)
    optimizer.step()
    plain.step()
    train(model, optimizer, batches(2))
    train(other, plain, batches(2))
    assert same_parameters(model, other)
    assert release.ledger.live == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_converted_takes_its_markers_along(dtype: torch.dtype) -> None:
    model, optimizer, _ = after_backward()
    model.to(dtype)
    assert all(p.dtype is dtype and p.grad.dtype is dtype for p in model.parameters())
    with pytest.raises(RefusedError, match=r"without optimizer.step\(\)"):
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_copied_model_has_no_gradients_and_can_be_trained() -> None:
    model, _, _ = after_backward()
    copied = copy.deepcopy(model)
    assert all(p.grad is None for p in copied.parameters())
    loss_of(copied, batches(1)[0]).backward()
    assert not any(gone([p]) for p in copied.parameters())


def test_an_undeclared_scaler_is_refused_where_it_unscales() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    scale = torch.amp.GradScaler("cpu", init_scale=4.0)
    release_gradients(model, optimizer)
    scale.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(RefusedError, match=r"unscaling by 0.25 .*scaler="):
        scale.step(optimizer)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_checkpointing_equals_the_plain_loop_and_reports_its_norm(reentrant: bool, head: bool) -> None:
    """Reentrant, a pass inside the pass ends before all gradients are there."""
    norms = []

    def loop(model, optimizer, guard) -> None:
        for batch in batches(3):
            x = batch.clone().requires_grad_()
            for layer in model[:-1]:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x = model[-1](x) if head else checkpoint(model[-1], x, use_reentrant=reentrant)
            x.pow(2).mean().backward()
            norms.append(clip_grad_norm_(model.parameters(), 1e9))
            if optimizer.release:
                torch.testing.assert_close(optimizer.release.last_norm.float(), norms[-1])
            optimizer.step()
            optimizer.zero_grad()

    assert same_parameters(*plain_and_released(loop))
    torch.testing.assert_close(norms[:3], norms[3:])


def test_a_paused_backward_leaves_real_gradients() -> None:
    model, other = layers(), layers()
    optimizer = AdamW(model.parameters(), lr=0.0)
    release = release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    loss_of(other, batches(1)[0]).backward()
    with release.paused():
        loss_of(model, batches(1)[0]).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(RefusedError, match=r"left by release\.paused"):
        optimizer.step()


def test_a_nonfinite_norm_is_reported() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer)
    model[0][0].weight.register_hook(lambda g: g * float("nan"))
    loss_of(model, batches(1)[0]).backward()
    assert not torch.isfinite(release.last_norm)
    assert not torch.isfinite(model[0][0].weight.grad.norm())
    with pytest.raises(RefusedError, match="multiplication by nan"):  # the other gradients were used as they were
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RefusedError, match="to be skipped"):
        optimizer.zero_grad()


def test_an_undeclared_scaler_of_scale_one_finds_an_overflow() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    scale = torch.amp.GradScaler("cpu", init_scale=1.0)
    model[0][0].weight.register_hook(lambda g: g * float("inf"))
    scale.scale(loss_of(model, batches(1)[0])).backward()
    scale.step(optimizer)
    scale.update()
    assert scale.get_scale() == 0.5
    with pytest.raises(RefusedError, match="to be skipped"):
        optimizer.zero_grad()


def test_the_norm_is_that_of_its_own_step() -> None:
    """Gradients that no backward of this step brought are not clipped by what an earlier step has left."""
    p, q = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    model = nn.ParameterList([p, q])
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0, eps=1.0)
    release = release_gradients(model, optimizer, accumulation="hold", max_norm=0.1)
    (p.sum() + 1000 * q.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    p.grad = torch.full((2,), 0.01, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(release.last_norm, torch.tensor(0.01 * 2**0.5, dtype=torch.float64))


def test_nothing_is_added_to_a_marker_outside_of_a_backward() -> None:
    model, optimizer, _ = after_backward(accumulation="state")
    for add in (
        lambda g: g.add_(torch.ones_like(model[0][0].weight)),
        lambda g: g + torch.ones_like(model[0][0].weight),
        lambda g: g.add_(torch.ones_like(model[0][0].weight), alpha=2),
    ):
        with pytest.raises(RefusedError, match="an addition"):
            add(model[0][0].weight.grad)
    optimizer.step()


def test_a_marker_of_another_parameter_is_refused() -> None:
    model, _, _ = after_backward()
    other = layers()
    optimizer = AdamW(other.parameters())
    release_gradients(other, optimizer)
    other[0][0].weight.grad = model[0][0].weight.grad
    with pytest.raises(RefusedError, match="another parameter"):
        optimizer.step()


@pytest.mark.parametrize("lenient", [False, True])
def test_the_norm_is_refused_while_micro_batches_are_in_the_moments(lenient: bool) -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), gradient_release=lenient)
    if lenient:
        prepare_for_gradient_release(model, optimizer)
    else:
        assert release_gradients(model, optimizer, accumulation="state").last_norm is None
    for batch in batches(2):
        loss_of(model, batch).backward()
        with pytest.raises(RefusedError, match="not known with micro-batches in the moments"):
            clip_grad_norm_(model.parameters(), 1.0)
    if lenient:
        model.zero_grad(set_to_none=False)  # there is nothing left to clear
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("lenient", [False, True])
def test_micro_batches_after_the_first_go_through_the_marker(lenient: bool) -> None:
    """The same numbers as where another hook has `.grad` cleared, so that autograd never adds to a marker."""
    models = []
    for clears in (False, True):
        model = layers()
        if clears:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: None)
        optimizer = StableAdamW(model.parameters(), gradient_release=lenient)
        if lenient:
            prepare_for_gradient_release(model, optimizer)
            optimizer.optimizer_accumulation = True
        else:
            release_gradients(model, optimizer, accumulation="state", max_norm=0.1, clipping="per_tensor")
        for number, batch in enumerate(batches(6)):
            if lenient:
                optimizer.optimizer_accumulation = number % 3 < 2
            loss_of(model, batch).backward()
            assert all(p.grad is None for p in model.parameters()) == clears
            if number % 3 == 2:
                optimizer.step()
        models.append(model)
    assert same_parameters(*models)


def test_a_gradient_that_two_parameters_share_is_not_changed_for_the_other() -> None:
    """(p + q) hands the same tensor to both, and a marker takes it as it is."""
    p, q, r = (nn.Parameter(torch.ones(4)) for _ in range(3))
    model = nn.ParameterList([p, q])
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer, accumulation="state", max_norm=0.1, clipping="per_tensor")
    for _ in range(2):
        seen = []
        handle = r.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        (p + q + r).sum().backward()
        handle.remove()
        assert torch.equal(seen[0], torch.ones(4))
    assert torch.equal(r.grad, torch.full((4,), 2.0))
    optimizer.step()
    assert torch.equal(p, q)


def test_remove_clears_markers_and_hooks() -> None:
    model, _, release = after_backward()
    release.remove()
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
