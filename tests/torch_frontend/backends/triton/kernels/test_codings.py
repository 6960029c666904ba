"""States in 8 bits, stochastic bfloat16 and stochastic parameters: the kernels have every bit of the specification in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rows import covering, rows
from tests.support.torch_models import ADAM_FAMILY, all_parameters, backend_of, bits, slot_of
from torch import Tensor, nn

from penstock.core import random_bits
from penstock.core.array_ops import numpy_ops
from penstock.core.codings import EightBit
from penstock.core.errors import RefusedError, UnsupportedTensorError
from penstock.core.update import accumulate, apply, init_state, update
from penstock.parity.backends.torch_arguments import to_numpy
from penstock.torch_frontend import Adam, AdamW, StableAdamW
from penstock.torch_frontend.backends.backend import scale_key
from penstock.torch_frontend.backends.triton import eight_bit, phases, rounding
from penstock.torch_frontend.backends.triton.availability import interpreted

SMALLEST, COMPACT = {"compensation": "stochastic", "state_dtype": "8bit"}, {"compensation": "split8", "state_dtype": "8bit"}
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "smallest": (torch.bfloat16, SMALLEST),
    "compact": (torch.bfloat16, COMPACT),
    "kahan and codes": (torch.float16, {"compensation": "kahan", "state_dtype": "8bit"}),
    "stochastic float16": (torch.float16, {"compensation": "stochastic"}),
    "float32 and codes": (torch.float32, {"state_dtype": "8bit"}),
    "split8": (torch.bfloat16, {"compensation": "split8"}),
    "stochastic v": (torch.bfloat16, {"compensation": "split", "state_dtype": torch.bfloat16}),
    "stochastic v of float32": (torch.float32, {"state_dtype": torch.bfloat16}),
}
SHAPES = [(66, 128), (33, 200), (30, 9, 4, 4), (5, 9), ()]
"""Whole blocks, rows with a short last block, a convolution where that is a multiple of 16, and small ones without codes.
Compiled, the first two have two items."""

FEW = [(21, 200), (5, 9)]


def optimizer_of(name: str, optimizer_class: Any = AdamW, shapes: list[tuple[int, ...]] = SHAPES, **options: Any) -> Any:
    dtype, storage = STORAGES[name]
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, **storage, **options}
    return optimizer_class(parameters, backend="triton", **options)


def gradients_of(optimizer: Any, number: int) -> list[Tensor]:
    """Over several powers of ten, and each half of the last: no update is clipped, so that no bit depends on a sum's order."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(p.shape, generator=generator) ** 5 * 0.5**number).to(p.dtype) for p in all_parameters(optimizer)]


def step(optimizer: Any, gradients: list[Tensor]) -> None:
    for p, gradient in zip(all_parameters(optimizer), gradients, strict=True):
        p.grad = gradient
    optimizer.step()


def each(optimizer: Any, gradients: list[Tensor]) -> None:
    """As release updates them: a launch for each tensor."""
    for p, gradient in zip(all_parameters(optimizer), gradients, strict=True):
        with torch.no_grad():
            backend_of(optimizer).update(slot_of(optimizer, p), gradient, first=True)
        optimizer.state[p]["step"] += 1


class Expected:
    """What is kept of one parameter of an optimizer, by the specification in numpy."""

    def __init__(self, optimizer: Any, p: Tensor, first_index: int = 0) -> None:
        slot = slot_of(optimizer, p)
        self.key, self.random, self.compensation, self.keys = slot.random_key, slot.random, slot.compensation, slot.keys
        self.rule, self.current = slot.rule, slot.hyperparameters
        self.parameter = to_numpy(p).copy()
        self.state = init_state(numpy_ops, self.rule, self.parameter, slot.dtypes, self.compensation)
        self.index = first_index + np.arange(p.numel(), dtype=np.int64).reshape(p.shape)
        self.number, self.batch = 1, 0

    def bits(self, number: int) -> Any:
        if number not in self.random:
            return None
        place = random_bits.place(self.key, random_bits.when(self.number, number, self.batch if number else 0))
        return random_bits.bits_at(place, self.index)

    @property
    def common(self) -> tuple[Any, ...]:
        corrections = self.rule.corrections(self.current, self.number, np)
        return numpy_ops, self.rule, self.current, corrections, self.compensation, self.parameter

    def update(self, gradient: Tensor, *, first: bool = True) -> None:
        self.parameter, self.state = update(*self.common, to_numpy(gradient), self.state, first=first, bits=self.bits)
        self.number, self.batch = self.number + 1, 0

    def accumulate(self, gradient: Tensor, *, first: bool) -> None:
        self.state = accumulate(*self.common, to_numpy(gradient), self.state, first=first, bits=self.bits)
        self.batch += 1

    def apply(self) -> None:
        self.parameter, self.state = apply(*self.common, self.state, bits=self.bits)
        self.number, self.batch = self.number + 1, 0

    def differs(self, p: Tensor, state: dict[str, Any]) -> list[str]:
        """The names of what has other bits."""
        expected = {"parameter": self.parameter}
        for key, field in zip(self.keys, self.state.fields, strict=True):
            expected |= {key: field.codes, scale_key(key): field.scale} if isinstance(field, EightBit) else {key: field}
        if self.state.compensation is not None:
            expected["compensation"] = self.state.compensation
        found = {"parameter": p, **state}
        return [f"{name} of {tuple(p.shape)}" for name, x in expected.items() if to_numpy(found[name]).tobytes() != x.tobytes()]


def differing(optimizer: Any, expected: list[Expected]) -> list[str]:
    pairs = zip(all_parameters(optimizer), expected, strict=True)
    return [name for p, one in pairs for name in one.differs(p, optimizer.state[p])]


def expected_of(optimizer: Any, first_index: int = 0) -> list[Expected]:
    return [Expected(optimizer, p, first_index) for p in all_parameters(optimizer)]


def both_step(way: Callable[..., None], optimizer: Any, expected: list[Expected], number: int = 0) -> None:
    gradients = gradients_of(optimizer, number)
    way(optimizer, gradients)
    for one, gradient in zip(expected, gradients, strict=True):
        one.update(gradient)


def stored(optimizer: Any) -> list[Tensor]:
    kept = [
        x for p in all_parameters(optimizer) for key, x in optimizer.state[p].items() if isinstance(x, Tensor) and key != "step"
    ]
    return [bits(x).clone() for x in (*all_parameters(optimizer), *kept)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("optimizer_class", "name"),
    rows(
        itertools.product(ADAM_FAMILY, STORAGES),
        lambda row: (
            (row[0] is StableAdamW and row[1] == "smallest") or (row[0] is Adam and row[1] in ("compact", "stochastic float16"))
        ),
    ),
)
def test_every_coding_has_the_bits_of_the_specification(optimizer_class: Any, name: str) -> None:
    """Several tensors in one launch, and one after the other."""
    optimizer = optimizer_of(name, optimizer_class)
    expected = expected_of(optimizer)
    for number, way in enumerate((step, each)):
        both_step(way, optimizer, expected, number)
        assert differing(optimizer, expected) == []


def test_numbers_below_float16s_smallest_normal_one_are_rounded_as_specified() -> None:
    """Where its spacing is constant. Both signs, in steps of some spacings."""
    optimizer = optimizer_of("stochastic float16", Adam, [(5, 9)], lr=1e-6)
    (p,) = all_parameters(optimizer)
    with torch.no_grad():
        p.mul_(2.0**-16)
    expected = expected_of(optimizer)
    both_step(step, optimizer, expected)
    assert p.abs().max() < 2.0**-14
    assert differing(optimizer, expected) == []


@pytest.mark.parametrize(
    ("optimizer_class", "name"),
    rows(
        itertools.product(ADAM_FAMILY, ["smallest", "compact", "stochastic v"]),
        lambda row: row in ((AdamW, "smallest"), (StableAdamW, "stochastic v")),
    ),
)
def test_each_micro_batch_in_the_state_has_bits_of_its_own(optimizer_class: Any, name: str) -> None:
    """accumulate, accumulate, update; then accumulate, accumulate, apply. How much an update is clipped is summed elsewhere."""
    optimizer = optimizer_of(name, optimizer_class, [(33, 160)])
    backend, gradients = backend_of(optimizer), [gradients_of(optimizer, batch) for batch in range(5)]
    for number, p in enumerate(all_parameters(optimizer)):
        slot, state, expected = slot_of(optimizer, p), optimizer.state[p], Expected(optimizer, p)
        with torch.no_grad():
            for batch in (0, 1):
                backend.accumulate(slot, gradients[batch][number], first=batch == 0)
                expected.accumulate(gradients[batch][number], first=batch == 0)
            assert expected.differs(p, state) == []
            backend.update(slot, gradients[2][number], first=False)
            expected.update(gradients[2][number], first=False)
            assert "microbatches" not in state
            state["step"] += 1
            clipped = optimizer_class is StableAdamW
            assert [found for found in expected.differs(p, state) if not clipped or "exp_avg" in found] == []
            for batch in (3, 4):
                backend.accumulate(slot, gradients[batch][number], first=batch == 3)
                expected.accumulate(gradients[batch][number], first=batch == 3)
            if not clipped:
                backend.apply(slot)
                expected.apply()
            assert [found for found in expected.differs(p, state) if not clipped or "exp_avg" in found] == []
            assert ("microbatches" in state) is clipped


@pytest.mark.parametrize(("near", "columns"), covering([2**16, 2**32, 5 * 2**32], [200, 256]))
def test_a_shard_has_the_bits_that_it_has_in_the_whole(near: int, columns: int) -> None:
    """Wherever its rows begin: its tiles reach over 2^16 and 2^32."""
    optimizer = optimizer_of("smallest", shapes=[(21, columns)])
    (p,), first_index = all_parameters(optimizer), (near // columns - 10) * columns
    expected = expected_of(optimizer, first_index)
    for way in (step, each):
        slot_of(optimizer, p).first_index = first_index
        both_step(way, optimizer, expected)
        assert differing(optimizer, expected) == []


def test_the_number_of_updates_is_read_from_the_device_at_each_launch() -> None:
    """Betas of 0 need no correction, so that no bit depends on where that is computed."""
    optimizer = optimizer_of("compact", StableAdamW, FEW, betas=(0.0, 0.0), capturable=True)
    expected = expected_of(optimizer)
    for way in (step, each, step):
        both_step(way, optimizer, expected)
        assert differing(optimizer, expected) == []


@pytest.mark.parametrize("name", ["update_all", "update_all_if_finite", "update_each_if_finite", "update_if_finite"])
def test_divided_and_checked_updates_have_the_same_bits(name: str) -> None:
    """In two launches, over shards or checked. A tensor whose gradient is not finite keeps every bit."""
    optimizer = optimizer_of("smallest", StableAdamW, FEW, betas=(0.0, 0.0), capturable=name != "update_all")
    backend, gradients, expected = backend_of(optimizer), gradients_of(optimizer, 0), expected_of(optimizer)
    pairs = list(zip([slot_of(optimizer, p) for p in all_parameters(optimizer)], gradients, strict=True))
    spoilt = [(slot, gradient * torch.nan) for slot, gradient in pairs]
    before = stored(optimizer)
    with torch.no_grad():
        if name == "update_all":
            backend.update_all(pairs, over_shards=list)
        else:
            for given, applied in ((spoilt, 0.0), (pairs, 1.0)):
                assert same(stored(optimizer), before)
                if name == "update_if_finite":
                    found = [backend.update_if_finite(*pair) for pair in given]
                else:
                    found = list(torch.as_tensor(getattr(backend, name)(given)).reshape(-1))
                assert all(flag == applied for flag in found)
    for one, gradient in zip(expected, gradients, strict=True):
        one.update(gradient)
    assert differing(optimizer, expected) == []


@pytest.mark.parametrize(
    ("name", "value"),
    rows(
        itertools.product(["smallest", "compact"], [torch.nan, torch.inf, -torch.inf, 3e38]),
        lambda row: row in (("smallest", torch.inf), ("compact", 3e38)),
    ),
)
def test_an_infinity_or_nan_is_that_of_its_block(name: str, value: float) -> None:
    optimizer = optimizer_of(name, shapes=[(21, 200)])
    (p,), (expected,) = all_parameters(optimizer), expected_of(optimizer)
    for number in range(3):
        (gradient,) = gradients_of(optimizer, number)
        if number == 1:
            gradient[3, 150] = value
        step(optimizer, [gradient])
        expected.update(gradient)
    spoilt = torch.isnan(optimizer.state[p]["debiased_exp_avg_sq_scale"])
    assert spoilt.nonzero().tolist() == ([] if value == 3e38 else [[3, 1]])
    assert torch.isnan(p).sum() == 72 * bool(spoilt.any())
    assert expected.differs(p, optimizer.state[p]) in ([], ["parameter of (21, 200)"])  # one NaN may not be another
    np.testing.assert_array_equal(to_numpy(p).astype(np.float32), expected.parameter.astype(np.float32))


def test_a_quotient_above_one_does_not_wrap_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's may be, of numbers next to the largest, which have the code 256 then."""
    right = eight_bit._rounded_squares
    monkeypatch.setattr(eight_bit, "_rounded_squares", lambda z, words: right(z, words) + 1.0)
    optimizer = optimizer_of("compact", shapes=[(21, 200)])
    (gradient,) = gradients_of(optimizer, 0)
    step(optimizer, [gradient])
    codes = optimizer.state[all_parameters(optimizer)[0]]["debiased_exp_avg_sq"]
    assert (codes > 0)[gradient.float().square() > 0].all()
    assert codes.max() == 255


def test_updates_are_clipped_by_the_mean_over_elements() -> None:
    """Not over positions, which count a row's last block as a whole one."""
    optimizer = optimizer_of("float32 and codes", StableAdamW, [(21, 200), (11, 400)], weight_decay=0.0)
    parameters, expected = all_parameters(optimizer), expected_of(optimizer)
    for number, way in enumerate((step, step, each)):
        both_step(way, optimizer, expected, -7 * number)
        for p, one in zip(parameters, expected, strict=True):
            np.testing.assert_allclose(to_numpy(p), one.parameter, rtol=0, atol=1e-6)
    p, one, gradient = parameters[0], expected[0], gradients_of(optimizer, 0)[0]
    backend_of(optimizer).accumulate(slot_of(optimizer, p), gradient, first=True)
    one.accumulate(gradient, first=True)
    np.testing.assert_allclose(to_numpy(optimizer.state[p]["mean_square"]), one.state.mean_square, rtol=1e-5)


@pytest.mark.parametrize("columns", [128, 300])
def test_nothing_is_written_behind_a_tensor(columns: int) -> None:
    optimizer = optimizer_of("compact", shapes=[(33, columns)])
    (p,) = all_parameters(optimizer)
    behind = []

    def with_more(x: Tensor) -> Tensor:
        memory = torch.full((x.numel() + 4096,), 77, dtype=x.dtype)
        memory[: x.numel()] = x.detach().reshape(-1)
        behind.append(memory[x.numel() :])
        return memory[: x.numel()].view(x.shape)

    state = slot_of(optimizer, p).state
    state |= {key: with_more(x) for key, x in state.items() if isinstance(x, Tensor) and x.dim()}
    p.data = with_more(p)
    for number, way in enumerate((step, each)):
        way(optimizer, gradients_of(optimizer, number))
    assert len(behind) == 6
    assert all((memory == 77).all() for memory in behind)


def test_codes_in_another_order_are_put_in_that_of_the_parameter_which_must_be_of_rows() -> None:
    optimizer = optimizer_of("compact", shapes=[(21, 200)])
    (p,), expected = all_parameters(optimizer), expected_of(optimizer)
    both_step(step, optimizer, expected)
    state = optimizer.state[p]
    for key in ("debiased_exp_avg", "debiased_exp_avg_sq", "debiased_exp_avg_scale", "compensation"):
        state[key] = state[key].t().contiguous().t()
    both_step(step, optimizer, expected, 1)
    assert differing(optimizer, expected) == []
    transposed = nn.Parameter(torch.randn(200, 40).t())
    with pytest.raises(RefusedError, match=r"backend='triton': .*contiguous parameters only.* strides \(1, 40\).*'auto'"):
        AdamW([transposed], backend="triton", state_dtype="8bit")
    with pytest.raises(RefusedError, match="contiguous parameters only"):
        optimizer.add_param_group({"params": [transposed]})
    AdamW([transposed], backend="triton")
    p.data = p.data.t().contiguous().t()
    before = stored(optimizer)
    with pytest.raises((RefusedError, UnsupportedTensorError), match="contiguous parameters only"):
        step(optimizer, gradients_of(optimizer, 2))
    assert same(stored(optimizer), before)


def test_scales_of_other_blocks_are_refused() -> None:
    optimizer = optimizer_of("compact", shapes=[(21, 200)])
    (p,) = all_parameters(optimizer)
    for way in (step, each):
        way(optimizer, gradients_of(optimizer, 0))
        state = optimizer.state[p]
        kept = state["debiased_exp_avg_scale"]
        state["debiased_exp_avg_scale"] = kept[:, :1].clone()
        before = stored(optimizer)
        with pytest.raises(UnsupportedTensorError, match=r"needs 42 float32 scales .* debiased_exp_avg_scale has 21"):
            way(optimizer, gradients_of(optimizer, 1))
        assert same(stored(optimizer), before)
        state["debiased_exp_avg_scale"] = kept


def wrong_place(key: Any, update: Any, field: int, microbatch: Any) -> Any:
    return RIGHT["place_of"](key, update, 1, microbatch)


def wrong_indices(index: Any, offset: Any, starts: Any) -> Any:
    return RIGHT["mixed_indices"](index * 0, offset, starts)


def wrong_words(place: Any, index: Any, mixed: Any, wrapped: Any) -> Any:
    return RIGHT["random_words"](place, index, mixed, wrapped & (mixed < 0))


RIGHT = {name: getattr(phases, name) for name in ("place_of", "mixed_indices", "random_words")}
RIGHT["highest"] = rounding.highest
FAULTS = {
    "the bits of another field": (phases, "place_of", wrong_place),
    "a tile's indices begin at 0": (phases, "mixed_indices", wrong_indices),
    "one high word for a tile": (phases, "random_words", wrong_words),
    "other bits of a word": (rounding, "highest", lambda words, COUNT: RIGHT["highest"](words << 1, COUNT)),
    "squares are rounded down": (eight_bit, "_rounded_squares", lambda z, words: eight_bit.tl.floor(eight_bit.tl.sqrt(z))),
}


@pytest.mark.skipif(not interpreted(), reason="a compiled kernel does not look functions up")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_bits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the laws above can fail."""
    module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    optimizer = optimizer_of("smallest", shapes=[(21, 200)])
    first_index = (2**16 // 200 - 10) * 200
    slot_of(optimizer, *all_parameters(optimizer)).first_index = first_index
    expected = expected_of(optimizer, first_index)
    both_step(step, optimizer, expected)
    assert differing(optimizer, expected)
