"""Laws of the launches: deterministic whatever the grid, all or nothing, in place in every layout, and seen by autograd."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.support.rows import covering
from tests.support.torch_models import ADAM_FAMILY, backend_of, batches, bits, layers, loss_of, slot_of, snapshot, unchanged
from tests.support.triton_launches import watched
from tests.support.triton_tensors import give_gradients, group

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.parity.backends.triton_interpreter import to_bfloat16
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton import tables
from penstock.torch_frontend.backends.triton.configuration import TABLE
from penstock.torch_frontend.backends.triton.kernels import update_group
from penstock.torch_frontend.backends.triton.launch import Program


def stepped(steps: int = 2, dtype: torch.dtype = torch.bfloat16, optimizer_class=StableAdamW) -> list[torch.Tensor]:
    """The bits of everything after some steps; the later ones are clipped."""
    parameters = group(dtype=dtype)
    optimizer = optimizer_class(parameters, lr=1e-2, backend="triton")
    for seed in range(steps):
        give_gradients(parameters, seed)
        for p in parameters:
            p.grad *= 1 + 9 * seed
        optimizer.step()
    return [bits(x) for p in parameters for x in (p.detach(), *optimizer.state[p].values())]


def test_neither_grid_nor_waves_change_a_bit_and_a_repeat_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped()
    assert unchanged(expected, stepped())
    for programs, wave_bytes in ((1, 1), (4, 2**13), (1, 2**30)):
        changed = dataclasses.replace(TABLE["cpu", None], programs=programs, wave_bytes=wave_bytes)
        monkeypatch.setitem(TABLE, ("cpu", None), changed)
        assert unchanged(expected, stepped())


@pytest.mark.compiled
def test_a_pair_of_launches_gives_the_bits_of_one_with_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, launched = stepped(), []
    monkeypatch.setitem(TABLE, ("cpu", None), dataclasses.replace(TABLE["cpu", None], tickets=False))
    with watched(launched.append):
        assert unchanged(expected, stepped())
    assert launched == ["update_group"] * 4


@pytest.mark.parametrize("optimizer_class", ADAM_FAMILY)
def test_a_tensor_alone_gets_the_bits_that_it_gets_in_a_group(optimizer_class) -> None:
    expected = stepped(optimizer_class=optimizer_class)
    parameters = group(dtype=torch.bfloat16)
    optimizer = optimizer_class(parameters, lr=1e-2, backend="triton")
    for seed in range(2):
        give_gradients(parameters, seed)
        for p in parameters:
            with torch.no_grad():
                backend_of(optimizer).update(slot_of(optimizer, p), p.grad * (1 + 9 * seed), first=True)
            optimizer.state[p]["step"] += 1
    assert unchanged(expected, [bits(x) for p in parameters for x in (p.detach(), *optimizer.state[p].values())])


@pytest.mark.parametrize(("optimizer_class", "tickets"), covering(ADAM_FAMILY, [True, False]))
def test_a_gradient_is_measured_in_a_group_as_alone(optimizer_class, tickets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of its sum of squares, in the order of the call, and of everything that is written; 0 if it is empty."""
    monkeypatch.setitem(TABLE, ("cpu", None), dataclasses.replace(TABLE["cpu", None], tickets=tickets))
    results = []
    for alone in (True, False):
        parameters = [*group(), *group((1100,), torch.bfloat16), *group((0, 5))]
        optimizer = optimizer_class(parameters, lr=1e-2, backend="triton")
        backend = backend_of(optimizer)
        give_gradients(parameters)
        with torch.no_grad():
            pairs = [(slot_of(optimizer, p), p.grad) for p in parameters]
            if alone:
                squares = [backend.update(slot, gradient, first=True, measure=True) for slot, gradient in pairs]
            else:
                squares = backend.update_all(pairs, measure=True)
        for p, square in zip(parameters, squares, strict=True):
            torch.testing.assert_close(square.double(), p.grad.double().square().sum(), rtol=1e-6, atol=0.0)
        for scratch in backend._scratch._by_stream.values():
            assert torch.count_nonzero(scratch.counters(1)) == 0
        state = [x for p in parameters for x in (p.detach(), *optimizer.state[p].values())]
        results.append([bits(x) for x in (*squares, *state)])
    assert unchanged(*results)


@pytest.mark.parametrize("optimizer_class", [StableAdamW, AdamW])
def test_every_item_has_slots_of_its_own(optimizer_class) -> None:
    """Programs that run at once would otherwise write over each other's partial sums; here they run one after the other."""
    for measure in (False, True):
        parameters = group()
        optimizer = optimizer_class(parameters, backend="triton")
        backend = backend_of(optimizer)
        give_gradients(parameters)
        partials = backend._scratch(torch.device("cpu"), False).partials(1, torch.float32).fill_(torch.nan)
        with torch.no_grad():
            backend.update_all([(slot_of(optimizer, p), p.grad) for p in parameters], measure=measure)
        items = sum(-(-p.numel() // TABLE["cpu", None].item) for p in parameters)
        sums = measure + (optimizer_class is StableAdamW)
        assert torch.isfinite(partials).sum() == sums * items == torch.isfinite(partials[: sums * items]).sum()


def test_counters_are_zero_after_every_launch() -> None:
    parameters = group()
    optimizer = StableAdamW(parameters, backend="triton")
    give_gradients(parameters)
    optimizer.step()
    backend = backend_of(optimizer)
    (scratch,) = backend._scratch._by_stream.values()
    assert torch.count_nonzero(scratch.counters(1)) == 0
    with torch.no_grad():
        for p in parameters:
            slot = slot_of(optimizer, p)
            for launch in (backend.update, backend.accumulate):
                launch(slot, p.grad, first=True)
                assert torch.count_nonzero(scratch.counters(1)) == 0
            backend.update_if_finite(slot, p.grad)
            assert torch.count_nonzero(scratch.counters(1)) == 0


@pytest.mark.parametrize(("optimizer_class", "bad"), covering(ADAM_FAMILY, [float("inf"), float("nan")]))
def test_a_non_finite_gradient_leaves_every_byte_of_every_tensor(optimizer_class, bad: float) -> None:
    """Two launches are needed for two dtypes, and the gradient that is bad is in the second."""
    parameters = group((1500, 3)) + group((40, 1100), torch.bfloat16)
    holder = torch.nn.ParameterList(parameters)
    optimizer = optimizer_class(holder.parameters(), backend="triton", on_nonfinite="skip", capturable=True)
    plain = optimizer_class([p.detach().clone().requires_grad_() for p in parameters], backend="triton", capturable=True)
    for seed, spoil in ((0, False), (1, True), (2, False)):
        parameters = list(holder.parameters())
        give_gradients(parameters, seed)
        before = snapshot(holder, optimizer)
        if spoil:
            parameters[-1].grad[1000] = bad
        optimizer.step()
        assert unchanged(before, snapshot(holder, optimizer)) == spoil
        if not spoil:
            for p, q in zip(plain.param_groups[0]["params"], parameters, strict=True):
                p.grad = q.grad
            plain.step()
    assert optimizer.skipped == 1
    for p, q in zip(plain.param_groups[0]["params"], parameters, strict=True):
        assert optimizer.state[q]["step"] == 2
        assert torch.equal(bits(p), bits(q))


@pytest.mark.parametrize("optimizer_class", ADAM_FAMILY)
def test_a_tensor_alone_is_updated_if_its_gradient_is_finite(optimizer_class) -> None:
    (p,) = group((1100,))
    (q,) = group((1100,))
    optimizer = optimizer_class([p, q], backend="triton", capturable=True)
    gradient = torch.linspace(-1, 1, 1100)
    backend = backend_of(optimizer)
    with torch.no_grad():
        assert backend.update_if_finite(slot_of(optimizer, p), gradient) == 1
        backend.update(slot_of(optimizer, q), gradient, first=True)
        assert torch.equal(p, q)
        before = [bits(x).clone() for x in (p, *optimizer.state[p].values())]
        gradient[1099] = float("nan")
        assert backend.update_if_finite(slot_of(optimizer, p), gradient) == 0
    assert unchanged(before, [bits(x) for x in (p, *optimizer.state[p].values())])


def test_a_non_finite_gradient_propagates_if_nothing_else_is_asked_for() -> None:
    for optimizer_class in ADAM_FAMILY:
        (p,) = group((200,))
        optimizer = optimizer_class([p], backend="triton")
        give_gradients([p])
        p.grad[7] = float("nan")
        optimizer.step()
        spread = optimizer_class is StableAdamW  # its learning rate is a function of all elements
        assert torch.isnan(p).sum() == (200 if spread else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permuted_layouts_stay_in_place_and_a_gradient_may_lie_otherwise(dtype: torch.dtype) -> None:
    values = torch.randn(6, 4, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = torch.randn(6, 4, 3, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    variants = [
        values.clone(),
        values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        values.clone(memory_format=torch.channels_last),
    ]
    results = []
    for variant in variants:
        p = variant.detach().requires_grad_()
        address, strides = p.data_ptr(), p.stride()
        optimizer = AdamW([p], lr=1e-2, backend="triton")
        for gradient in (given, given.transpose(0, 1).contiguous().transpose(0, 1), given[:1].expand(6, 4, 3, 2)):
            p.grad = gradient
            optimizer.step()
        assert (p.data_ptr(), p.stride()) == (address, strides)
        results.append(p.detach().contiguous())
    assert all(torch.equal(bits(results[0]), bits(other)) for other in results[1:])


def test_unaligned_addresses_give_the_same_bits() -> None:
    results = []
    for offset in (0, 1):
        memory = torch.linspace(-1, 1, 1501)
        p = memory[offset : 1500 + offset].copy_(torch.linspace(-1, 1, 1500)).detach().requires_grad_()
        optimizer = AdamW([p], lr=1e-2, backend="triton")
        p.grad = torch.linspace(1, 2, 1500)
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_a_parameter_with_gaps_is_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedError, match=r"gaps in memory.*contiguous"):
        AdamW([torch.zeros(4, 6)[:, ::2].requires_grad_()], backend="triton")


def test_step_counts_elsewhere_are_refused() -> None:
    (p,) = group((3,))
    optimizer = AdamW([p], backend="triton", capturable=True)
    slot_of(optimizer, p).state["step"] = torch.zeros((), device="meta")
    with pytest.raises(InvalidArgumentError, match=r"capturable=True needs the step counts on cpu, and one is on meta"):
        backend_of(optimizer).update_all([(slot_of(optimizer, p), torch.ones(3))])


def test_tables_of_items_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice of parameters with gradients at every step, as experts have them."""
    monkeypatch.setattr(tables, "ITEM_BYTES", 100)
    parameters = group((3,) * 4)
    optimizer = StableAdamW(parameters, backend="triton")
    for chosen in ((0, 1), (0, 2), (1, 2, 3), (0,), (0, 1)):
        give_gradients(parameters)
        for position, p in enumerate(parameters):
            if position not in chosen:
                p.grad = None
        optimizer.step()
        assert sum(items.table.tensor.nbytes for items in backend_of(optimizer)._tables._items.values()) <= 100
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [4, 3, 2, 1]


def test_tables_of_tensors_that_have_moved_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLES", 2)
    parameters = group((3, 4))
    optimizer = StableAdamW(parameters, backend="triton", capturable=True)
    moved = []
    for _ in range(4):
        give_gradients(parameters)
        optimizer.step()
        moved.append(parameters[0].data)  # kept, so that its address is not used again
        parameters[0].data = parameters[0].data.clone()
    made = backend_of(optimizer)._tables
    assert len(made._tensors) == len(made._upload._ready) == 2


def test_one_tensor_that_is_not_aligned_does_not_change_the_accesses_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    launch = Program.__call__
    monkeypatch.setattr(
        Program, "__call__", lambda self, *given: seen.append(self.options["ALIGNMENT"]) or launch(self, *given)
    )
    parameters = [*group((16, 32)), torch.zeros(9)[1:].requires_grad_()]
    optimizer = StableAdamW(parameters, backend="triton")
    give_gradients(parameters)
    optimizer.step()
    assert seen == [16, 4]


def test_autograd_notices_the_update() -> None:
    model = layers(2)
    optimizer = StableAdamW(model.parameters(), backend="triton")
    release_gradients(model, optimizer)
    first, second = (loss_of(model, batch) for batch in batches(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_loaded_state_goes_on_alike() -> None:
    parameters, others = group((300, 40)), group((300, 40))
    optimizer, other = (StableAdamW(ps, lr=1e-2, backend="triton") for ps in (parameters, others))
    give_gradients(parameters)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(parameters, others, strict=True):
            q.copy_(p)
            q.grad = p.grad
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, others, strict=True))


@pytest.mark.compiled
def test_offsets_are_wider_than_32_bits() -> None:
    """The last item of a tensor of more than 2^31 elements; memory that is not touched is never there."""
    n = 2**31 + 1000
    try:
        p, g, m, v = (torch.empty(n, dtype=torch.bfloat16) for _ in range(4))
    except RuntimeError as error:
        pytest.skip(f"no room for 4 x {2 * n} bytes of addresses: {error}")
    chosen = TABLE["cpu", None]
    last = -(-n // chosen.item) - 1
    start = last * chosen.item
    assert start > 2**31 - 1
    for x, value in ((p, 1.0), (g, 0.5), (m, 0.0), (v, 0.0)):
        x[start:] = value
    row = [[x.data_ptr() for x in (g, m, v, p, p)] + [0, n, 0, last + 1]]
    items = torch.tensor([[1, 0, last]], dtype=torch.int32)
    scratch = torch.zeros(4, dtype=torch.int32)
    update_group[(1,)](
        items, torch.tensor(row), torch.zeros(1), torch.zeros(1), None, None, scratch, 1, 1, None, None,
        1.0, 0.0, 1.0, 0.0, 0.25, 1e-6, 1e-12, 0.0, None,
        PHASES="write", CLIP=False, ZERO1=False, ZERO2=False, L2=False, MAXIMIZE=False, COMPENSATION="none", STOCHASTIC=False,
        ROWS=0,
        EACH=False,
        ALIGNMENT=16, HINTS=True, G=tl.bfloat16, M=tl.bfloat16, V=tl.bfloat16, P=tl.bfloat16, K=tl.bfloat16, COMPUTE=tl.float32,
        TILES=chosen.tiles, BLOCK=chosen.block, TAIL=chosen.tail, UNROLL=1, STAGES=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    assert torch.all(p[start:] == 0.75)
    assert torch.all(m[start:] == 0.5)
    assert torch.all(v[start:] == 0.25)


def test_the_interpreter_rounds_to_the_nearest_bfloat16() -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    got = torch.from_numpy(to_bfloat16(x).view(np.int16)).view(torch.bfloat16)
    finite = ~torch.isnan(expected)
    assert torch.equal(torch.isnan(got), ~finite)
    assert torch.equal(bits(got[finite]), bits(expected[finite]))


def test_a_step_is_one_launch_for_each_group_and_kind_of_tensor() -> None:
    launched: list[str] = []
    parameters = group((300, 3, 17))
    half = group((20, 40), torch.bfloat16)
    optimizer = StableAdamW([{"params": parameters}, {"params": half[:1]}, {"params": half[1:]}], backend="triton")
    give_gradients(parameters + half)
    with watched(launched.append):
        optimizer.step()
    assert launched == ["update_group"] * 3


def test_tables_follow_the_size_of_an_item() -> None:
    """With the number of items of another size a launch would wait for ever for the last one."""
    made = tables.GroupTables()
    for item_elements in (64, 128, 64):
        found = made(
            [[address] for address in (0, 16, 32, 48, 64, 0)],
            [256],
            item_elements,
            1024,
            "both",
            torch.device("cpu"),
            capturable=False,
        )
        assert found.slot_count == found.tensors[0, 8] == 256 // item_elements
