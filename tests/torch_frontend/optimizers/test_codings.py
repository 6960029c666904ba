"""States in 8 bits and stochastic bfloat16, and split8: the same bits wherever and however a tensor is updated."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from tests.support.rows import rows
from tests.support.torch_models import (
    bits,
    compiling_small_tensors,
    default_dtype_and_device,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import Tensor, nn

from penstock.core import random_bits
from penstock.core.codings import EightBit, random_fields
from penstock.core.codings.eight_bit import decoded
from penstock.core.errors import InvalidArgumentError
from penstock.core.update import accumulate, apply, init_state, update
from penstock.torch_frontend import SGD, AdamW, Adan, Lion, Muon, RAdam, Ranger, StableAdamW, release_gradients
from penstock.torch_frontend.array_ops import dtype_name, torch_ops
from penstock.torch_frontend.backends import eager
from penstock.torch_frontend.backends.backend import scale_key, state_keys
from penstock.torch_frontend.groups import field_dtypes, hyperparameters, rule_of

SMALLEST, COMPACT = {"compensation": "stochastic", "state_dtype": "8bit"}, {"compensation": "split8", "state_dtype": "8bit"}
STORAGES = {
    "smallest": SMALLEST,
    "compact": COMPACT,
    "split8": {"compensation": "split8"},
    "bfloat16": {"compensation": "split", "state_dtype": torch.bfloat16},
}
RULES = [AdamW, StableAdamW, Lion, Adan, Ranger]
SHAPES = [(40, 200), (32, 128), (8, 20, 5, 7), (64, 64)]
EVERY_STORAGE = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def optimizer_of(parameters: Any, optimizer_class: Any = AdamW, **arguments: Any) -> Any:
    if optimizer_class is SGD:
        arguments = {"momentum": 0.9, **arguments}
    elif optimizer_class is Muon:
        arguments = {"nesterov": False, **arguments}  # as accumulation="state" needs it
    elif optimizer_class is Ranger:
        arguments = {"k": 2, **arguments}
    elif optimizer_class in (AdamW, StableAdamW):
        arguments = {"betas": (0.9, 0.999), **arguments}
    return optimizer_class(parameters, **{"lr": 1e-2, "weight_decay": 0.1, "backend": "eager", **arguments})


def start_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradients_of(start: Tensor, count: int) -> list[Tensor]:
    """Gradients over several powers of ten, whose numbers follow the shape and whose memory follows the layout of `start`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.empty_like(start).copy_(torch.randn(start.shape, generator=generator) ** 5) for _ in range(count)]


def trained(start: Tensor, optimizer_class: Any = AdamW, *, steps: int = 3, **arguments: Any) -> list[Tensor]:
    """One parameter and what is kept of it after a few steps."""
    parameter = nn.Parameter(start.clone())
    optimizer = optimizer_of([parameter], optimizer_class, **arguments)
    for gradient in gradients_of(start, steps):
        parameter.grad = gradient
        optimizer.step()
    kept = (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return [parameter.detach(), *kept]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 64), nn.Tanh(), nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 24)).to(dtype)


def given(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn((4, 160), generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize(
    ("optimizer_class", "shape"), [*itertools.product(RULES, SHAPES), *((Muon, shape) for shape in SHAPES if len(shape) == 2)]
)
@EVERY_STORAGE
def test_eager_is_the_specification_bit_for_bit(optimizer_class: Any, storage: dict[str, Any], shape: Any) -> None:
    start = start_of(*shape)
    parameter = nn.Parameter(start.clone())
    optimizer = optimizer_of([parameter], optimizer_class, **storage)
    group = optimizer.param_groups[0]
    rule, current = rule_of(group), hyperparameters(group)
    dtypes = field_dtypes(group, parameter, current)
    numbers = {0, *random_fields(rule.fields, dtypes, rule.decays(current))}
    expected, state = start.clone(), init_state(torch_ops, rule, start, dtypes, storage["compensation"])
    indices = torch.arange(start.numel()).view(shape)
    for step, gradient in enumerate(gradients_of(start, 3), 1):
        parameter.grad = gradient
        optimizer.step()
        key = random_bits.tensor_key(0, "0")
        words = {n: random_bits.bits_at(random_bits.place(key, random_bits.when(step, n)), indices) for n in numbers}
        arguments = (current, rule.corrections(current, step, torch), storage["compensation"], expected, gradient, state)
        expected, state = update(torch_ops, rule, *arguments, bits=words.get)
    assert torch.equal(parameter, expected)
    found = optimizer.state[parameter]
    for key, field, dtype in zip(state_keys(rule), state.fields, dtypes, strict=True):
        if isinstance(field, EightBit):
            assert same([found[key], found[scale_key(key)]], list(field))
        else:
            assert same([found[key]], [field])
            assert dtype_name(found[key].dtype) == dtype


@EVERY_STORAGE
@pytest.mark.parametrize("optimizer_class", [AdamW, Lion, Adan])
def test_a_tensor_in_pieces_has_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, optimizer_class: Any, storage: dict[str, Any]
) -> None:
    for start in (start_of(33, 200), start_of(33, 256)):  # by rows, and by blocks
        with monkeypatch.context() as patched:
            expected = trained(start, optimizer_class, **storage)
            patched.setattr(eager, "most_elements", lambda _: 600)
            assert same(trained(start, optimizer_class, **storage), expected)


@pytest.mark.parametrize("optimizer_class", rows([AdamW, StableAdamW, Lion], lambda row: row is AdamW))
def test_graphs_have_other_codes_only_where_their_arithmetic_rounds_otherwise(optimizer_class: Any) -> None:
    """Numbers that differ by d are rounded to other codes with probability d/spacing. Programs differ by at most 2^-20 of a
    number and spacings are at least 2^-8 of it: one in 2^12 for each of 3 steps and 3 arrays. Five deviations are allowed.
    """
    start = start_of(33, 256)
    expected = trained(start, optimizer_class, **SMALLEST)
    with compiling_small_tensors():
        found = trained(start, optimizer_class, backend="compiled", **SMALLEST)
    mean = 9 * start.numel() / 2**12
    other = 0
    for one, two in zip(found, expected, strict=True):
        if one.dtype is torch.float32:
            torch.testing.assert_close(one, two, rtol=1e-5, atol=0)
            continue
        codes = [(x.view(torch.int16) if x.dtype is torch.bfloat16 else x).int() for x in (one, two)]
        assert (codes[0] - codes[1]).abs().max() <= 1
        other += int((codes[0] != codes[1]).sum())
    assert other <= mean + 5 * mean**0.5


@EVERY_STORAGE
def test_every_memory_layout_has_the_same_bits(storage: dict[str, Any]) -> None:
    start = start_of(8, 20, 5, 7)
    expected = trained(start, **storage)
    for layout in (start.to(memory_format=torch.channels_last), start.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)):
        assert layout.stride() != start.stride()
        assert same(trained(layout, **storage), expected)
        if storage is SMALLEST:  # a graph has no blocks that end with a row: updated eagerly
            with compiling_small_tensors():
                assert same(trained(layout, backend="compiled", **storage), expected)


ROWS = [(c, name, "eager") for c in (*RULES, RAdam, SGD) for name in STORAGES] + [(AdamW, "smallest", "compiled")]


@pytest.mark.parametrize(
    ("optimizer_class", "name", "backend"),
    rows(ROWS, lambda row: row[2] == "eager" and (row[0] in (AdamW, StableAdamW) or row[1] == "compact")),
)
def test_released_equals_plain_and_resumed_equals_uninterrupted_bitwise(optimizer_class: Any, name: str, backend: str) -> None:
    storage = STORAGES[name]
    plain, released, resumed, copied = (model_of() for _ in range(4))
    with compiling_small_tensors():
        train(plain, optimizer_of(plain.parameters(), optimizer_class, backend=backend, **storage), given(6))
        optimizer = optimizer_of(released.parameters(), optimizer_class, backend=backend, **storage)
        with release_gradients(released, optimizer) as release:
            train(released, optimizer, given(6))
            release.verify(lambda: released(given(1)[0]).float().pow(2).mean())
        assert same_parameters(plain, released)

        first = optimizer_of(resumed.parameters(), optimizer_class, backend=backend, **storage)
        train(resumed, first, given(6)[:3])
        copied.load_state_dict(resumed.state_dict())
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = optimizer_of(copied.parameters(), optimizer_class, backend=backend, seed=9)  # the file has its storage, too
        second.load_state_dict(torch.load(file, weights_only=True))
        train(copied, second, given(6)[3:])
        resumed, first = copy.deepcopy((resumed, first))
        train(resumed, first, given(6)[3:])
    assert same_parameters(plain, resumed)
    assert same_parameters(plain, copied)


@pytest.mark.parametrize(
    ("optimizer_class", "backend"),
    rows(
        itertools.product([AdamW, StableAdamW, SGD, Ranger, Muon], ["eager", "compiled"]),
        lambda row: row[1] == "eager",
    ),
)
def test_each_micro_batch_in_the_state_has_bits_of_its_own(optimizer_class: Any, backend: str) -> None:
    """It is `accumulate` and `apply` of the specification, and the number of the micro-batch is gone afterwards."""
    start = start_of(40, 256)
    model = nn.Linear(256, 40, bias=False, dtype=start.dtype)
    model.weight.data.copy_(start)
    optimizer = optimizer_of(model.parameters(), optimizer_class, backend=backend, **SMALLEST)
    rule, current = rule_of(optimizer.param_groups[0]), hyperparameters(optimizer.param_groups[0])
    dtypes = field_dtypes(optimizer.param_groups[0], model.weight, current)
    numbers = (0, *random_fields(rule.fields, dtypes, rule.decays(current)))
    expected, state = start.clone(), init_state(torch_ops, rule, start, dtypes, "stochastic")
    key, indices = random_bits.tensor_key(0, "0"), torch.arange(start.numel()).view(start.shape)
    gradients = gradients_of(start, 6)
    with compiling_small_tensors(), release_gradients(model, optimizer, accumulation="state"):
        for step in (1, 2):
            corrections = rule.corrections(current, step, torch)

            def words(number: int, step: int = step, batch: int = 0) -> Tensor | None:
                if number not in numbers:
                    return None
                return random_bits.bits_at(random_bits.place(key, random_bits.when(step, number, batch)), indices)

            for batch, gradient in enumerate(gradients[3 * step - 3 : 3 * step]):
                (model.weight * gradient).sum().backward()
                arguments = (current, corrections, "stochastic", expected, gradient, state)
                state = accumulate(
                    torch_ops, rule, *arguments, first=batch == 0, bits=lambda n, b=batch: words(n, batch=b if n else 0)
                )
            optimizer.step()
            expected, state = apply(torch_ops, rule, current, corrections, "stochastic", expected, state, bits=words)
    assert torch.equal(model.weight, expected)
    assert "microbatches" not in optimizer.state[model.weight]


@pytest.mark.parametrize(
    ("optimizer_class", "storage", "most"), [(AdamW, COMPACT, 5.07), (AdamW, SMALLEST, 4.07), (Lion, SMALLEST, 3.04)]
)
def test_bytes_a_parameter(optimizer_class: Any, storage: dict[str, Any], most: float) -> None:
    found = trained(start_of(64, 4096), optimizer_class, steps=1, **storage)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found if tensor.dim()}
    assert sum(storages.values()) / (64 * 4096) <= most


@EVERY_STORAGE
def test_a_learning_rate_of_zero_freezes_every_bit(storage: dict[str, Any]) -> None:
    model = model_of()
    optimizer = optimizer_of(model.parameters(), **storage)
    train(model, optimizer, given(3))
    optimizer.param_groups[0]["lr"] = 0.0

    def stored() -> list[Tensor]:
        kept = [[parameter, optimizer.state[parameter].get("compensation")] for parameter in model.parameters()]
        return [bits(tensor).clone() for row in kept for tensor in row if tensor is not None]

    before = stored()
    train(model, optimizer, given(3))
    assert same(stored(), before)


def test_changed_betas_are_those_of_the_decoded_state() -> None:
    """The scales carry the factor, so that no code is rounded again."""
    parameter = nn.Parameter(start_of(40, 128))
    optimizer = optimizer_of([parameter], **COMPACT)
    for gradient in gradients_of(parameter.detach(), 2):
        parameter.grad = gradient
        optimizer.step()
    state = optimizer.state[parameter]
    key = "debiased_exp_avg_sq"
    before = state[key].clone(), decoded(torch_ops, EightBit(state[key], state[scale_key(key)]))
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    parameter.grad = None
    optimizer.step()
    ratio = (1 - 0.999**2) / (1 - 0.99**2)
    assert torch.equal(state[key], before[0])
    after = decoded(torch_ops, EightBit(state[key], state[scale_key(key)]))
    torch.testing.assert_close(after, before[1] * ratio, rtol=1e-6, atol=0)


def test_a_second_moment_that_stops_decaying_is_rounded_stochastically_from_then_on() -> None:
    parameter = nn.Parameter(start_of(40, 50))
    optimizer = optimizer_of([parameter], betas=(0.9, 0.9), state_dtype=torch.bfloat16)
    steps = iter(gradients_of(parameter.detach(), 2))
    parameter.grad = next(steps)
    optimizer.step()
    assert "random_key" not in optimizer.state[parameter]
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    parameter.grad = next(steps)
    optimizer.step()
    assert "random_key" in optimizer.state[parameter]


@EVERY_STORAGE
@pytest.mark.parametrize("released", [False, True])
def test_the_default_dtype_and_device_of_torch_change_no_bit(storage: dict[str, Any], released: bool) -> None:
    """Many set a default for as long as they train."""
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")):
        model, data = model_of(), given(2)
        optimizer = optimizer_of(model.parameters(), **storage)
        with default_dtype_and_device(dtype, device):
            if released:
                release_gradients(model, optimizer)
            train(model, optimizer, data)
        found.append(snapshot(model, optimizer))
    assert unchanged(found[0], found[1])
    assert unchanged(found[0], found[2])


def test_small_and_narrow_tensors_keep_float32() -> None:
    kept = {
        shape: trained(start_of(*shape), **COMPACT)[2].dtype for shape in [(4096,), (64, 64), (31, 128), (32, 128), (16, 64, 4)]
    }
    assert [shape for shape, dtype in kept.items() if dtype is torch.int8] == [(32, 128), (16, 64, 4)]
    assert all(dtype in (torch.int8, torch.float32) for dtype in kept.values())


def test_codes_without_scales_are_refused_and_change_nothing() -> None:
    model = model_of()
    optimizer = optimizer_of(model.parameters(), **COMPACT)
    train(model, optimizer, given(1))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["debiased_exp_avg_scale"]
    before = snapshot(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"debiased_exp_avg of parameter 0 .*int8.*debiased_exp_avg_scale"):
        optimizer.load_state_dict(saved)
    assert unchanged(before, snapshot(model, optimizer))


@pytest.mark.parametrize(
    ("key", "dtype"), [("debiased_exp_avg_scale", torch.bfloat16), ("debiased_exp_avg_sq", torch.int8)], ids=str
)
def test_codes_and_scales_that_were_cast_are_refused_and_change_nothing(key: str, dtype: torch.dtype) -> None:
    """In a checkpoint, and in place; scales in bfloat16 would change every number of their blocks."""
    model = model_of()
    optimizer = optimizer_of(model.parameters(), **COMPACT)
    train(model, optimizer, given(1))
    good, cast = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    cast["state"][0][key] = cast["state"][0][key].to(dtype)
    before = snapshot(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"exp_avg\w* of parameter 0 .* codes and \w+ scales .* cast.*Load"):
        optimizer.load_state_dict(cast)
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.load_state_dict(good)
    state = optimizer.state[next(model.parameters())]
    state[key] = state[key].to(dtype)
    before = snapshot(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InvalidArgumentError, match=r"codes and \w+ scales .* cast"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))


OTHERS: list[dict[str, Any]] = [
    {"state_dtype": torch.float32},
    {"state_dtype": "8bit"},
    {"state_dtype": None},
    {"compensation": "kahan"},
    {"compensation": "auto"},
    {"precision": "exact"},
]


@pytest.mark.parametrize("asked", OTHERS, ids=str)
def test_a_checkpoint_of_another_coding_is_refused(asked: dict[str, Any]) -> None:
    """Of one that was asked for, if by the default's name: else the checkpoint's settings are taken over, as torch does."""
    model, there = model_of(), {"compensation": "split8", "state_dtype": torch.bfloat16}
    saved, fresh = optimizer_of(model.parameters(), **there), optimizer_of(model.parameters(), **asked)
    train(model, saved, given(1))
    before = snapshot(model, fresh)
    name = "compensation" if "precision" in asked else next(iter(asked))
    with pytest.raises(
        InvalidArgumentError, match=rf"group 0 of state_dict has {name}=.*, the optimizer's has {name}=.*export"
    ):
        fresh.load_state_dict(saved.state_dict())
    assert unchanged(before, snapshot(model, fresh))
    for same in (optimizer_of(model.parameters(), **there), optimizer_of(model.parameters())):
        same.load_state_dict(saved.state_dict())
        assert [same.param_groups[0][key] for key in there] == list(there.values())
    with pytest.raises(InvalidArgumentError, match="of state_dict has"):
        copy.deepcopy(fresh).load_state_dict(saved.state_dict())


def test_codes_and_a_group_that_does_not_ask_for_them_do_not_go_together() -> None:
    """In a checkpoint, and where a group's setting changes after the first step."""
    model = model_of()
    optimizer = optimizer_of(model.parameters(), **COMPACT)
    train(model, optimizer, given(1))
    before, saved = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["state_dtype"] = None
    optimizer.param_groups[0]["state_dtype"] = torch.float32
    for call in (
        lambda: optimizer_of(model.parameters()).load_state_dict(saved),
        lambda: train(model, optimizer, given(1)),
    ):
        with pytest.raises(
            InvalidArgumentError, match=r"exp_avg of .*parameter .* is 8bit in its state, .* another state_dtype"
        ):
            call()
    assert unchanged(before, snapshot(model, optimizer))


def test_small_gradients_beside_large_ones_move_as_the_guide_says() -> None:
    """From .001 of the largest of a block on as far as with exact AdamW, within 30%; with 1e-6 hardly."""
    sizes = torch.tensor([1.0, 0.1, 0.01, 1e-3, 1e-6]).repeat(26)[:128]
    moved = []
    for state_dtype in (None, "8bit"):
        generator, parameter = torch.Generator().manual_seed(1), nn.Parameter(torch.zeros(64, 128))
        optimizer = AdamW([parameter], lr=1e-3, weight_decay=0.0, state_dtype=state_dtype)
        for _ in range(300):
            parameter.grad = (1.0 + torch.randn(64, 128, generator=generator)) * sizes
            optimizer.step()
        moved.append(torch.stack([parameter.detach()[:, sizes == size].mean() for size in sizes[:5]]))
    exact, coded = moved
    assert ((coded / exact - 1.0).abs()[:4] < 0.3).all()
    assert (coded / exact)[4] < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state_dtype": "4bit"}, r"state_dtype='4bit'.*'8bit'"),
        ({"state_dtype": "8bit", "dtype": torch.float64}, r"state_dtype='8bit' is not possible for a float64 parameter"),
        ({"compensation": "split8", "dtype": torch.float16}, r"compensation='split8' is not possible for a float16"),
    ],
)
def test_a_coding_without_use_is_refused(arguments: dict[str, Any], message: str) -> None:
    dtype = arguments.pop("dtype", torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer_of([nn.Parameter(start_of(64, 128, dtype=dtype))], **arguments)
