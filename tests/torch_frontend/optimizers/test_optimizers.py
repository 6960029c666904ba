"""The optimizers without release: the specification, in place, on every kind of parameter torch has."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
from tests.support.rows import rows
from tests.support.torch_models import ADAM_FAMILY, OPTIMIZERS, batches, bits, layers, rule_of, snapshot, train, unchanged
from torch import nn

from penstock.core import compensation as compensations
from penstock.core import random_bits
from penstock.core.codings import state_dtypes
from penstock.core.dtypes import PARAMETER_DTYPES
from penstock.core.errors import InvalidArgumentError, NonFiniteGradientError, RefusedError, UnsupportedTensorError
from penstock.core.rules import LION
from penstock.core.update import init_state, update
from penstock.torch_frontend import SGD, Adam, AdamW, Lion, RAdam, StableAdamW
from penstock.torch_frontend.array_ops import dtype_name, torch_ops
from penstock.torch_frontend.backends.backend import state_keys
from penstock.torch_frontend.groups import hyperparameters

DTYPES = [(getattr(torch, dtype), compensation) for dtype in PARAMETER_DTYPES for compensation in compensations.possible(dtype)]
DTYPES += [(torch.bfloat16, "stochastic"), (torch.float16, "stochastic")]
SHAPES = [(), (0,), (1,), (3,), (17,), (5, 0), (4, 5), (3, 1, 7), (140001,)]


def gradients(shape: tuple[int, ...], dtype: torch.dtype, count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) * (30 if i % 5 == 4 else 1) for i in range(count)]


def random_bits_of(parameter: torch.Tensor, step: int) -> torch.Tensor:
    """Of the only parameter of an optimizer."""
    place = random_bits.place(random_bits.tensor_key(0, "0"), random_bits.when(step))
    return random_bits.bits_at(place, torch.arange(parameter.numel()).view(parameter.shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "compensation"), DTYPES)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_eager_is_the_specification_bit_for_bit(optimizer_class, dtype, compensation, shape) -> None:
    """In place and piece by piece, it does exactly what the pure functions do on torch tensors."""
    p = torch.ones(shape, dtype=dtype, requires_grad=True)
    optimizer = optimizer_class([p], lr=1e-2, weight_decay=0.1, compensation=compensation, backend="eager")
    current = hyperparameters(optimizer.param_groups[0])
    expected = p.detach().clone()
    rule = rule_of(optimizer)
    dtypes = state_dtypes(rule.fields, dtype_name(dtype), rule.decays(current))
    state = init_state(torch_ops, rule, expected, dtypes, compensation)
    for step, gradient in enumerate(gradients(shape, dtype, 6), 1):
        p.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(bits(p.grad), bits(gradient)), "the caller's gradient was changed"
        corrections = rule.corrections(current, step, torch)
        given = (current, corrections, compensation, expected, gradient, state)
        expected, state = update(torch_ops, rule, *given, bits={0: random_bits_of(p, step)}.get)
        if p.numel() <= 2**17:  # one piece: the mean square is summed in the same order
            assert torch.equal(bits(p), bits(expected))
            for key, field in zip(state_keys(rule), state.fields, strict=True):
                assert torch.equal(bits(optimizer.state[p][key]), bits(field))
        else:
            torch.testing.assert_close(p.detach(), expected, rtol=1e-6 if dtype is torch.float32 else 2e-2, atol=0)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (AdamW, torch.optim.AdamW, {}),
        (Adam, torch.optim.Adam, {}),
        (SGD, torch.optim.SGD, {}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (RAdam, torch.optim.RAdam, {"decoupled_weight_decay": False}),
        (RAdam, torch.optim.RAdam, {"decoupled_weight_decay": True}),
    ],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_float64_equals_torch(ours, theirs, settings, maximize: bool) -> None:
    models = [layers(dtype=torch.float64), layers(dtype=torch.float64)]
    for model, kind in zip(models, (ours, theirs), strict=True):
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, maximize=maximize, **settings)
        train(model, optimizer, batches(40, dtype=torch.float64))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    defaults, of_torch = (kind([nn.Parameter(torch.ones(1))]).defaults for kind in (ours, theirs))
    assert {"lr", "weight_decay"} <= (shared := defaults.keys() & of_torch.keys() - {"foreach", "fused", "differentiable"})
    assert all(defaults[name] == of_torch[name] for name in shared)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_does_not_change_the_numbers(optimizer_class, dtype: torch.dtype) -> None:
    """Transposed, channels-last and strided parameters, with gradients laid out otherwise, get the same numbers."""
    values = torch.randn(6, 4, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.zeros(6, 4, 3, 4, dtype=dtype)
    strided = wide[..., ::2]
    variants = [values.clone(), values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0), strided.copy_(values)]
    variants.append(values.clone().to(memory_format=torch.channels_last))
    results = []
    for variant in variants:
        p = variant.detach().requires_grad_()
        optimizer = optimizer_class([p], lr=1e-2)
        for gradient in gradients(values.shape, dtype, 4):
            p.grad = gradient.transpose(0, 1).contiguous().transpose(0, 1) if p.is_contiguous() else gradient
            optimizer.step()
        results.append(p.detach().contiguous())
    for other in results[1:]:
        # The mean square is summed in the order of memory: one unit in the last place of the learning rate, four times.
        torch.testing.assert_close(other, results[0], rtol=8 * torch.finfo(dtype).eps, atol=0)
    assert torch.all(wide[..., 1::2] == 0), "memory between the elements was written"


def test_learning_rate_zero_freezes() -> None:
    for optimizer_class in OPTIMIZERS:
        model = layers()
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer_class(model.parameters(), lr=0.0), batches(3))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_tensor_learning_rates_named_parameters_groups_closures_and_step_hooks() -> None:
    models = [layers(), layers()]
    lr = torch.tensor(1e-2)
    plain = AdamW(models[0].parameters(), lr=1e-2, weight_decay=0.1)
    named = list(models[1].named_parameters())
    fancy = AdamW([{"params": named[:3]}, {"params": named[3:], "weight_decay": 0.1}], lr=lr, weight_decay=0.1)
    assert fancy.param_groups[0]["param_names"] == [name for name, _ in named[:3]]
    counted = []
    fancy.register_step_post_hook(lambda *_: counted.append(1))
    for batch in batches(5):
        plain.zero_grad()
        models[0](batch).pow(2).mean().backward()
        plain.step()

        def closure(batch=batch):
            fancy.zero_grad()
            loss = models[1](batch).pow(2).mean()
            loss.backward()
            return loss

        assert fancy.step(closure).requires_grad
    assert len(counted) == 5
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    lr.zero_()  # a tensor is read at each step
    before = snapshot(models[1], fancy)[:8]
    fancy.step(closure)
    assert unchanged(before, snapshot(models[1], fancy)[:8])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lr": -1.0}, r"lr=-1.0.*\[0, inf\)"),
        ({"lr": torch.tensor([1.0, 2.0])}, r"lr is a tensor of shape \(2,\)"),
        ({"lr": torch.tensor(-1.0)}, r"lr=-1.0.*\[0, inf\)"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0.*\[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\]=-0.1.*\[0, 1\)"),
        ({"betas": 0.9}, r"betas=0.9 must be a pair"),
        ({"eps": 0.0}, r"eps=0.0.*\(0, inf\)"),
        ({"weight_decay": -1e-3}, r"weight_decay=-0.001.*\[0, inf\)"),
        ({"decouple_lr": True, "lr": 0.0, "weight_decay": 1e-5}, r"max_lr.*=0.0.*\(0, inf\)"),
        ({"decouple_lr": True, "max_lr": -1.0, "weight_decay": 1e-5}, r"max_lr=-1.0.*\(0, inf\)"),
        ({"compensation": "half"}, r"compensation='half'.*auto, auto8, none, kahan, split"),
        ({"state_dtype": torch.float16}, r"state_dtype=float16.*float32"),
        ({"state_dtype": torch.int8}, r"state_dtype=int8.*float32"),
        ({"state_dtype": "bfloat16"}, r"state_dtype='bfloat16'.*torch\.float32"),
        ({"weight_decay": torch.tensor(-1.0)}, r"weight_decay=-1\.0.*\[0, inf\)"),
        ({"betas": (torch.tensor(1.5), 0.9)}, r"betas\[0\]=1\.5.*\[0, 1\)"),
        ({"lr": np.array(-1.0)}, r"lr=-1\.0.*\[0, inf\)"),
        ({"maximize": "no"}, r"maximize='no'.*True or False"),
        ({"decouple_lr": 1}, r"decouple_lr=1.*True or False"),
        ({"backend": "cuda"}, r"backend='cuda'.*auto, triton, compiled, eager"),
        ({"on_nonfinite": "ignore"}, r"on_nonfinite='ignore'.*propagate, skip, raise"),
    ],
)
def test_a_bad_argument_names_itself(arguments: dict, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        StableAdamW([nn.Parameter(torch.ones(2))], **arguments)


def test_an_argument_that_the_rule_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^Lion\(\) got an unexpected keyword argument 'eps'"):
        Lion([nn.Parameter(torch.ones(2))], eps=1e-8)
    with pytest.raises(TypeError, match=r"^AdamW\(\) got an unexpected keyword argument 'fused'; leave it out: backend= "):
        AdamW([nn.Parameter(torch.ones(2))], 1e-3, fused=True)


def test_a_subclass_has_the_signature_of_its_own_constructor() -> None:
    class Mine(AdamW):
        def __init__(self, params, scale: float) -> None:
            super().__init__(params, lr=scale)

    assert list(inspect.signature(Mine).parameters) == ["params", "scale"]
    assert list(inspect.signature(AdamW).parameters)[:3] == ["params", "lr", "betas"]


@pytest.mark.parametrize("name", ["mine", "adamw"])
def test_a_rule_that_is_not_registered_is_refused(name: str) -> None:
    class Mine(AdamW):
        rule = dataclasses.replace(LION, name=name)

    with pytest.raises(InvalidArgumentError, match=f"the rule '{name}' of Mine is not in .*RULES"):
        Mine([nn.Parameter(torch.ones(2))])


def test_parameters_that_cannot_be_optimized_are_refused() -> None:
    for bad in (torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse()):
        with pytest.raises(UnsupportedTensorError, match=r"complex64|sparse"):
            AdamW([bad.requires_grad_()])
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    with pytest.raises(InvalidArgumentError, match=r"compensation='split'.*kahan"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.float16))], compensation="split")
    with pytest.raises(InvalidArgumentError, match=r"decouple_lr=True.*AdamW"):
        Adam([nn.Parameter(torch.ones(2))], decouple_lr=True)
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(InvalidArgumentError, match="eps=0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "eps": 0})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(RefusedError, match="gradient_release=True"):
        optimizer.optimizer_accumulation = True
    lenient = AdamW([nn.Parameter(torch.ones(2))], gradient_release=True)
    lenient.optimizer_accumulation = True
    with pytest.raises(RefusedError, match="prepare_for_gradient_release"):
        lenient.step()


def test_a_refused_gradient_or_setting_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4, sparse=True))
    optimizer = StableAdamW(model.parameters())
    model[0](torch.ones(4)).sum().backward()
    model[1](torch.tensor([1])).sum().backward()
    before = snapshot(model, optimizer)
    with pytest.raises(UnsupportedTensorError, match=r"sparse.*sparse=False"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))
    model[1].weight.grad = None
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(InvalidArgumentError, match=r"lr=-1\.0"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_gradients(bad: float) -> None:
    for how in ("propagate", "skip", "raise"):
        model = layers(2)
        optimizer = StableAdamW(model.parameters(), on_nonfinite=how)
        train(model, optimizer, batches(1))
        before = snapshot(model, optimizer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        p.grad[-1] = bad  # the last parameter: the others must not be updated, either
        if how == "raise":
            with pytest.raises(NonFiniteGradientError):
                optimizer.step()
        else:
            optimizer.step()
        assert unchanged(before, snapshot(model, optimizer)) == (how != "propagate")
        assert optimizer.skipped == (how == "skip")


def test_high_fully_decoupled_decay_warns_exactly_once() -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    with pytest.warns(UserWarning, match=r"weight_decay=0.01.*decouple_lr=True") as caught:
        AdamW([{"params": [p], "weight_decay": 0.01}, {"params": [q], "weight_decay": 0.02}], decouple_lr=True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW([{"params": [p], "weight_decay": 9e-4}], decouple_lr=True)
        AdamW([{"params": [p], "weight_decay": 0.5}])


def test_max_lr_is_per_group() -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdamW([{"params": [p], "lr": 0.1}, {"params": [q]}], lr=0.2, decouple_lr=True, weight_decay=1e-5)
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_capturable_keeps_the_count_with_the_parameter_and_agrees() -> None:
    results = []
    for capturable in (False, True):
        model = layers(dtype=torch.float64)
        optimizer = StableAdamW(model.parameters(), lr=1e-2, capturable=capturable)
        train(model, optimizer, batches(10, dtype=torch.float64))
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)  # expm1 on a tensor instead of Python's


def test_copies_and_pickles_go_on_alike() -> None:
    model = layers(dtype=torch.bfloat16)
    optimizer = StableAdamW(model.parameters(), lr=1e-2, on_nonfinite="skip")
    given = batches(6, dtype=torch.bfloat16)
    train(model, optimizer, given[:3])
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, given[3:])
    for other_model, other in copies:
        assert (other.on_nonfinite, other.backend) == ("skip", optimizer.backend)
        train(other_model, other, given[3:])
        assert unchanged(snapshot(model, optimizer), snapshot(other_model, other))


@pytest.mark.parametrize(
    ("backend", "kind"),
    rows(
        itertools.product(["eager", "compiled"], [*ADAM_FAMILY, Lion]),
        lambda row: row[0] == "eager" or row[1] is StableAdamW,
    ),
)
def test_betas_of_zero_keep_nothing_of_gradients_before(kind, backend: str) -> None:
    """A spike, then gradients 10^8 times smaller: the step is the sign, whatever the rounding of a large moment would leave."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = kind([parameter], lr=1e-2, betas=(0.0, 0.0), weight_decay=0.0, backend=backend)
    for size in (1e4, 1e-4):
        parameter.grad = torch.full((4,), size)
        before = parameter.detach().clone()
        optimizer.step()
    step = 1e-2 / (1 + kind.rule.defaults.get("eps", 0.0) / 1e-4)
    torch.testing.assert_close(parameter.detach(), before - step, rtol=1e-5, atol=0)
    expected = {"exp_avg": parameter.grad, "exp_avg_sq": parameter.grad.square()}
    for field, key in zip(kind.rule.fields, state_keys(kind.rule), strict=True):
        assert torch.equal(optimizer.state[parameter][key], expected[field.name])


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_parameters_that_share_memory_are_updated_one_after_the_other(optimizer_class) -> None:
    """Tied through `.data`, or views that overlap: every update arrives, as with torch's optimizers."""

    def overlapping() -> tuple[torch.Tensor, list[nn.Parameter]]:
        memory = torch.linspace(-1, 1, 12)
        return memory, [nn.Parameter(part) for part in (memory[2:], memory[:4], memory[:4], memory.view(3, 4)[:, 1])]

    together, parameters = overlapping()
    optimizer = optimizer_class([*parameters, torch.ones(3, requires_grad=True)], lr=0.1)
    apart, alone = overlapping()
    optimizers = [optimizer_class([parameter], lr=0.1) for parameter in alone]
    for _ in range(3):
        for parameter, other, single in zip(parameters, alone, optimizers, strict=True):
            parameter.grad, other.grad = torch.ones(parameter.shape), torch.ones(parameter.shape)
            single.step()
        optimizer.param_groups[0]["params"][-1].grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(together, apart)


def test_settings_that_choose_another_rule_are_refused_after_the_optimizer_was_made() -> None:
    """A momentum that nobody keeps, or a decay that stays where it was, would be a silent fault."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = SGD([{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}], lr=1e-2)
    assert [group["rule"] for group in optimizer.param_groups] == ["sgd_momentum", "sgd"]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    for number, (name, value) in enumerate([("nesterov", True), ("momentum", 0.5)]):
        group, before = optimizer.param_groups[number], snapshot(nn.ParameterList(parameters), optimizer)
        kept, group[name] = group[name], value
        with pytest.raises(InvalidArgumentError, match=rf"{name}={value}.* choose the rule .*construct an optimizer"):
            optimizer.step()
        assert unchanged(before, snapshot(nn.ParameterList(parameters), optimizer))
        group[name] = kept
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match=r"nesterov=True is not possible with momentum=0.0"):
        SGD(parameters, nesterov=True)
    with pytest.raises(InvalidArgumentError, match=r"nesterov=1 must be True or False"):
        SGD(parameters, momentum=0.9, nesterov=1)
    with pytest.raises(InvalidArgumentError, match=r"momentum=1.0 is out of range"):
        SGD(parameters, momentum=1.0)
