"""What the kernels compute is the specification: in the interpreter bit for bit, and within the suite's bounds of float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.support.rows import covering, rows
from tests.support.torch_models import ADAM_FAMILY, backend_of, bits, slot_of

from penstock.core.array_ops import numpy_ops
from penstock.core.rules.adam_family import LARGEST, AdamHyperparameters, Corrections, bias_corrections
from penstock.core.update import TensorState, accumulate, apply, update
from penstock.parity.backends.torch_arguments import to_numpy
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.cases import select
from penstock.parity.updates import run_cases
from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.backend import EXP_AVG, EXP_AVG_SQ
from penstock.torch_frontend.backends.numbers import GroupSettings
from penstock.torch_frontend.backends.triton.backend import TritonBackend
from penstock.torch_frontend.backends.triton.configuration import TABLE
from penstock.torch_frontend.groups import hyperparameters

STORAGES = [
    (torch.float64, "none", None),
    (torch.float32, "none", None),
    (torch.bfloat16, "none", None),
    (torch.bfloat16, "kahan", None),
    (torch.bfloat16, "split", None),
    (torch.bfloat16, "split", torch.float32),
    (torch.float16, "none", None),
    (torch.float16, "kahan", None),
]
SHAPES = [(), (0,), (1,), (3,), (17,), (5, 0), (127,), (128,), (129,), (3, 1, 7), (1023,), (1025,)]
"""Around a masked tile (64; compiled 128), a tile (128; 1024), and in the interpreter an item (1024)."""


def shrinking_gradients(shape: tuple[int, ...], dtype: torch.dtype, steps: int = 3) -> list[torch.Tensor]:
    """Each half of the last, so that no update is clipped: a sum that is rounded otherwise then makes no difference."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    return [(first * 0.5**step).to(dtype) for step in range(steps)]


@pytest.mark.parametrize(("optimizer_class", "dtype", "compensation", "state_dtype"), covering(ADAM_FAMILY, STORAGES))
def test_a_step_is_the_specification_bit_for_bit(optimizer_class, dtype, compensation, state_dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [*SHAPES, (TABLE["cpu", None].item + 1,)]
    parameters = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    optimizer = optimizer_class(
        parameters, lr=1e-2, weight_decay=0.1, compensation=compensation, state_dtype=state_dtype, backend="triton"
    )
    current = hyperparameters(optimizer.param_groups[0])
    expected: dict[int, tuple[np.ndarray, TensorState]] = {}
    for step in range(3):
        for p in parameters:
            p.grad = shrinking_gradients(tuple(p.shape), dtype)[step]
        if step == 0:
            starts = [to_numpy(p) for p in parameters]
        given = [p.grad.clone() for p in parameters]
        optimizer.step()
        for i, p in enumerate(parameters):
            assert torch.equal(bits(p.grad), bits(given[i])), "the caller's gradient was changed"
            state = optimizer.state[p]
            if step == 0:
                kept = np.zeros_like(to_numpy(state["compensation"])) if "compensation" in state else None
                moments = [np.zeros_like(to_numpy(state[name])) for name in (EXP_AVG, EXP_AVG_SQ)]
                expected[i] = (starts[i], TensorState(tuple(moments), kept))
            corrections = bias_corrections(current, step + 1, np)
            expected[i] = update(
                numpy_ops, optimizer.rule, current, corrections, compensation, expected[i][0], to_numpy(p.grad), expected[i][1]
            )
            assert_same(p, state, *expected[i])
            if step == 1:  # the user prunes: remainders of zeros are to be ignored
                with torch.no_grad():
                    p.view(-1)[::2] = 0
                expected[i] = (to_numpy(p).copy(), expected[i][1])


def assert_same(p: torch.Tensor, state: dict, expected: np.ndarray, after: TensorState) -> None:
    assert to_numpy(p).tobytes() == expected.tobytes()
    assert to_numpy(state["debiased_exp_avg"]).tobytes() == after.fields[0].tobytes()
    assert to_numpy(state["debiased_exp_avg_sq"]).tobytes() == after.fields[1].tobytes()
    if after.compensation is not None:
        assert to_numpy(state["compensation"]).tobytes() == after.compensation.tobytes()


@pytest.mark.parametrize(
    "pattern",
    rows(
        [
            *[f"B/{rule}/*/state-default" for rule in ("adam", "adamw", "stable_adamw")],  # those that have kernels
            *["B/*/bfloat16/*/state-float32", "decay/*/split/*", "shapes/*/bfloat16/*"],
        ],
        lambda pattern: pattern == "B/*/bfloat16/*/state-float32",
    ),
)
def test_the_kernels_are_within_every_bound(pattern: str) -> None:
    found = run_cases([TorchBackend("triton")], select(pattern), [1, 8])
    assert found
    assert [row for row in found if not row.within] == []


@pytest.mark.exhaustive
def test_seventy_steps_with_clipping_are_within_every_bound() -> None:
    """Gradients of thirty times the usual size come at step 61."""
    found = run_cases([TorchBackend("triton")], select("B/stable_adamw/bfloat16/split/state-default"), [1, 70])
    assert [row for row in found if not row.within] == []


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("optimizer_class", "dtype", "compensation"),
    covering(ADAM_FAMILY, [(torch.bfloat16, "split"), (torch.float32, "none"), (torch.float16, "kahan")]),
)
def test_micro_batches_in_the_moments_are_the_specification(optimizer_class, dtype, compensation) -> None:
    """accumulate, accumulate, update; then accumulate, apply. The mean square is summed in another order."""
    p = torch.randn(1100, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    optimizer = optimizer_class([p], lr=1e-2, weight_decay=0.1, compensation=compensation, backend="triton")
    backend, state = backend_of(optimizer), optimizer.state
    current = hyperparameters(optimizer.param_groups[0])
    slot = slot_of(optimizer, p)
    wide = to_numpy(p)
    kept = to_numpy(state[p]["compensation"]) if compensation != "none" else None
    expected = TensorState(tuple(to_numpy(state[p][key]) for key in (EXP_AVG, EXP_AVG_SQ)), kept)
    common = (numpy_ops, optimizer.rule, current)
    gradients = shrinking_gradients((1100,), dtype, 4)
    corrections = bias_corrections(current, 1, np)
    with torch.no_grad():
        for i in (0, 1):
            backend.accumulate(slot, gradients[i], first=i == 0)
            g = to_numpy(gradients[i])
            expected = accumulate(*common, corrections, compensation, wide, g, expected, first=i == 0)
            np.testing.assert_allclose(float(state[p]["mean_square"]), expected.mean_square, rtol=1e-6)
        expected = expected._replace(mean_square=np.float32(state[p]["mean_square"]))
        backend.update(slot, gradients[2], first=False)
        assert "mean_square" not in state[p]
        wide, expected = update(*common, corrections, compensation, wide, to_numpy(gradients[2]), expected, first=False)
        close_to(p, state[p], wide, expected)
        state[p]["step"] += 1
        slot, corrections = slot_of(optimizer, p), bias_corrections(current, 2, np)
        wide, expected = (
            to_numpy(p),
            TensorState(tuple(to_numpy(state[p][n]) for n in (EXP_AVG, EXP_AVG_SQ)), None),
        )
        if compensation != "none":
            expected = expected._replace(compensation=to_numpy(state[p]["compensation"]))
        backend.accumulate(slot, gradients[3], first=True)
        expected = accumulate(*common, corrections, compensation, wide, to_numpy(gradients[3]), expected, first=True)
        backend.apply(slot)
        assert "mean_square" not in state[p]
        close_to(p, state[p], *apply(*common, corrections, compensation, wide, expected))


def close_to(p: torch.Tensor, state: dict, expected: np.ndarray, after: TensorState) -> None:
    """The moments bit for bit; the parameter up to the rounding of the learning rate, which is one of the parameter's."""
    assert to_numpy(state["debiased_exp_avg"]).tobytes() == after.fields[0].tobytes()
    assert to_numpy(state["debiased_exp_avg_sq"]).tobytes() == after.fields[1].tobytes()
    eps = torch.finfo(p.dtype).eps
    np.testing.assert_allclose(to_numpy(p).astype(np.float64), expected.astype(np.float64), rtol=2 * eps, atol=1e-2 * eps)


@pytest.mark.compiled
@pytest.mark.parametrize("changes", [{"maximize": True}, {"weight_decay": 0.0}, {"decouple_lr": True, "max_lr": 0.5}])
@pytest.mark.parametrize("optimizer_class", ADAM_FAMILY)
def test_options_are_the_specification(optimizer_class, changes: dict) -> None:
    if "decouple_lr" in changes and optimizer_class.rule.l2:
        pytest.skip("refused at set-up: L2 has no decoupled decay")
    arguments = {"lr": 1e-2, "weight_decay": 1e-4, **changes}
    p = torch.randn(200, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start = to_numpy(p)
    optimizer = optimizer_class([p], backend="triton", **arguments)
    p.grad = shrinking_gradients((200,), torch.float32)[0]
    optimizer.step()
    current = hyperparameters(optimizer.param_groups[0])
    state = TensorState((np.zeros(200, np.float32), np.zeros(200, np.float32)), None)
    corrections = bias_corrections(current, 1, np)
    expected = update(numpy_ops, optimizer.rule, current, corrections, "none", start, to_numpy(p.grad), state)
    assert_same(p, optimizer.state[p], *expected)


@pytest.mark.parametrize("optimizer_class", [AdamW, StableAdamW])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_finite_gradient_above_the_bound_enters_as_the_bound_and_another_is_loud(dtype: torch.dtype, optimizer_class) -> None:
    top, bound = torch.finfo(dtype).max, LARGEST[64 if dtype is torch.float64 else 32]
    pairs = [((top, -top, 1.0), (bound, -bound, 1.0)), ((torch.inf, -torch.inf, torch.nan), (torch.nan,) * 3)]
    for loud, pair in enumerate(pairs):
        after = []
        for values in pair:
            p = torch.ones(3, dtype=dtype, requires_grad=True)
            optimizer = optimizer_class([p], backend="triton")
            p.grad = torch.tensor(values, dtype=dtype)
            optimizer.step()
            after.append([p.detach(), *(optimizer.state[p][name] for name in (EXP_AVG, EXP_AVG_SQ))])
        for number, (found, expected) in enumerate(zip(*after, strict=True)):
            assert torch.isfinite(found).all() != loud
            if number or optimizer_class is AdamW:  # update clipping sees the whole gradient
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_moments_whose_beta_is_zero_are_those_of_the_gradient_alone() -> None:
    """m + (g-m) would keep the rounding errors of the spike that came before."""
    p = torch.zeros(200).requires_grad_()
    optimizer = AdamW([p], lr=1e-2, betas=(0.0, 0.0), backend="triton")
    for size in (1e4, 1e-4):
        p.grad = torch.full((200,), size)
        optimizer.step()
    assert torch.equal(optimizer.state[p]["debiased_exp_avg"], p.grad)
    assert torch.equal(optimizer.state[p]["debiased_exp_avg_sq"], p.grad.square())


@pytest.mark.parametrize(
    ("dtype", "betas"),
    rows(
        itertools.product([torch.float64, torch.float32, torch.bfloat16], [(0.9, 0.999), (0.0, 0.99)]),
        lambda row: (row[0] is torch.bfloat16) == (row[1][0] > 0),
    ),
)
def test_the_number_of_updates_is_read_and_the_betas_are_debiased_on_the_device(dtype: torch.dtype, betas) -> None:
    """c1 and c2 are computed in float64 there: what differs is less than a rounding of them."""
    results = []
    for capturable in (False, True):
        p = torch.randn(70, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        optimizer = StableAdamW([p], lr=1e-2, betas=betas, capturable=capturable, backend="triton")
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            p.grad = torch.randn(70, generator=generator).to(dtype)
            optimizer.step()
        assert optimizer.state[p]["step"] == 6
        results.append([p.detach(), optimizer.state[p]["debiased_exp_avg"], optimizer.state[p]["debiased_exp_avg_sq"]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=16 * torch.finfo(a.dtype).eps, atol=16 * torch.finfo(a.dtype).eps)


def test_scalars_on_the_device_are_the_same_numbers() -> None:
    """A learning rate, decay, or betas that only the device knows go through a buffer; it holds float32, as arguments do."""
    results = []
    for make in (float, torch.tensor):
        p = torch.linspace(-1, 1, 300).requires_grad_()
        optimizer = AdamW([p], backend="triton")
        current = AdamHyperparameters(learning_rate=make(1e-2), beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=make(0.1))
        slot = slot_of(optimizer, p)
        slot.settings = GroupSettings(slot.rule, current)
        slot.settings.corrections = lambda step, make=make: Corrections(make(0.25), make(0.5))
        with torch.no_grad():
            TritonBackend().update_all([(slot, torch.linspace(1, 2, 300))])
        results.append(p.detach())
    assert torch.equal(*results)
