"""What is coded in scratch on a CPU has the bits of the specification, also where a part is left to it."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from tests.support.torch_models import default_dtype_and_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core import codings, compensation, random_bits
from penstock.core.compensation import Stored
from penstock.core.rules import ADAMW
from penstock.torch_frontend.array_ops import dtype_name, torch_ops
from penstock.torch_frontend.backends import cpu_codings
from penstock.torch_frontend.backends.cpu_codings import CpuCodings, RandomPart
from penstock.torch_frontend.backends.random_words import Randomness

M, V = ADAMW.fields
FIRST = 2**16 - 100
TINY = 2.0**-149


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of many sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return x * (torch.rand(shape, generator=generator) > 0.01)


def random_part(like: Tensor) -> tuple[RandomPart, Tensor]:
    """Random bits, and the words that the specification is given."""
    place = random_bits.place(random_bits.tensor_key(0, "w"), random_bits.when(3))
    words = random_bits.bits_at(place, FIRST + torch.arange(like.numel())).view(like.shape)
    return RandomPart(Randomness(place, FIRST, like.numel(), like.device), FIRST), words


def same(found: Any, expected: Any) -> bool:
    """NaNs have many bit patterns; everything else is compared bit for bit."""
    if found.is_floating_point():
        return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    return torch.equal(found, expected)


SPECIAL: dict[str, Any] = {
    "ordinary": lambda x: x,
    "a block of zeros": lambda x: x.view(-1)[:300].zero_(),
    "all zeros": lambda x: x.zero_(),
    "infinity": lambda x: x.view(-1)[7].fill_(float("inf")),
    "NaN": lambda x: x.view(-1)[-1].fill_(float("nan")),
    "another NaN": lambda x: x.view(-1)[:9].view(torch.int32).fill_(-1),
    "next to infinity": lambda x: x.view(-1)[5:8].copy_(torch.tensor([3.395e38, -3.3955e38, 3.4e38])),
    "subnormal": lambda x: x.mul_(TINY / x[x != 0].abs().min()),
    "far below the largest": lambda x: x.view(-1)[::9].mul_(1e-12),
    "without zeros": lambda x: x.copy_(x + 1e-2),
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("field", [M, V], ids=["signed", "squares"])
@pytest.mark.parametrize("shape", [(40, 200), (32, 256), (8, 20, 5, 7)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_fields_are_coded_as_specified(
    monkeypatch: pytest.MonkeyPatch, special: str, field: Any, shape: Any, layout: str
) -> None:
    monkeypatch.setattr(cpu_codings, "PIECE", 3000)  # several parts
    here, x = CpuCodings(), numbers(*shape)
    SPECIAL[special](x)
    x = x.abs() if field is V else x
    stored = codings.zeros(torch_ops, field, x if layout == "rows" else x.transpose(0, 1).contiguous().transpose(0, 1), "8bit")
    random, words = random_part(x)
    expected = codings.store(torch_ops, x, stored, words if field is V else None)
    given = x.clone()
    here.encode(given, stored, random if field is V else None)
    assert same(given, x)
    assert same(stored.codes, expected.codes)
    assert same(stored.scale, expected.scale)
    assert same(here.decoded(stored, 1), codings.load(torch_ops, expected, "float32"))


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", ["split", "split8", "stochastic", "none", "kahan"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_parameters_are_stored_as_specified(special: str, name: str, layout: str) -> None:
    x = numbers(40, 200)
    SPECIAL[special](x)
    x = x if layout == "rows" else x.t()
    random, words = random_part(x)
    bits = words if name in compensation.WITH_RANDOM_BITS else None
    expected = compensation.store(torch_ops, name, x, "bfloat16", bits)
    stored = Stored(*(None if kept is None else torch.zeros_like(kept) for kept in expected))
    here = CpuCodings()
    here.store(name, x.clone(), stored, random if bits is not None else None)
    for found, wanted in zip(stored, expected, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or same(found, wanted)
    assert same(here.load(name, stored), compensation.load(torch_ops, name, expected))
    for value in (float("inf"), 0.0):  # a user writes some, whose remainders are then ignored
        stored.parameter[:5].fill_(value)
        assert same(here.load(name, stored), compensation.load(torch_ops, name, stored))
        assert dtype_name(here.load(name, stored).dtype) == "float32"


class Divisors(TorchDispatchMode):
    """Collects what tensors are divided by where that is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.divisions, self.on_host = 0, set[float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.divisions += 1
            if not isinstance(args[1], Tensor) or args[1].dim() == 0:
                self.on_host.add(float(args[1]))
        return func(*args, **(kwargs or {}))


def test_nothing_coded_is_divided_by_a_number_of_the_host() -> None:
    """On CUDA torch multiplies by its reciprocal, which has other bits but for a power of two."""
    x, words = numbers(40, 200), random_part(numbers(40, 200))[1]
    with Divisors() as found:
        for field, given in ((M, x), (V, x.abs())):
            stored = codings.store(torch_ops, given, codings.zeros(torch_ops, field, x, "8bit"), words)
            codings.load(torch_ops, stored, "float32")
        for name, dtype in (("split8", "bfloat16"), ("kahan", "float16"), ("stochastic", "float16")):
            compensation.load(torch_ops, name, compensation.store(torch_ops, name, x, dtype, words))
    assert found.divisions >= 2
    assert all(math.frexp(divisor)[0] == 0.5 for divisor in found.on_host), found.on_host


def test_words_under_a_mode_are_not_those_of_later_steps() -> None:
    """A plan's tensors have no memory."""
    with FakeTensorMode():
        pretended = RandomPart(Randomness(7, 0, 100, torch.device("cpu")), 0).words(torch.empty(100))
    found = RandomPart(Randomness(7, 0, 100, torch.device("cpu")), 0).words(torch.empty(100))
    assert type(pretended) is FakeTensor
    assert type(found) is Tensor
    with FakeTensorMode():
        assert type(RandomPart(Randomness(7, 0, 9, torch.device("cpu")), 0).words(torch.empty(9))) is FakeTensor


def test_the_default_dtype_and_device_at_the_import_change_no_code() -> None:
    spec = importlib.util.find_spec(cpu_codings.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    with default_dtype_and_device(torch.bfloat16, "meta"):
        spec.loader.exec_module(fresh)
    x = numbers(16, 256)
    stored = []
    for module in (cpu_codings, fresh):
        for field, value, random in ((M, x, None), (V, x.square(), random_part(x)[0])):
            kept = codings.zeros(torch_ops, field, x, "8bit")
            module.CpuCodings().encode(value, kept, random)
            stored.append(kept)
    assert all(same(*pair) for number in (0, 1) for pair in zip(stored[number], stored[number + 2], strict=True))
