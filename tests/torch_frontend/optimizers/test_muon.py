"""Muon in PyTorch: its groups, its layouts, and what it does not take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.torch_models import batches, layers, loss_of, same_parameters, slot_of, train
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.torch_frontend import AdamW, Muon, StableAdamW, param_groups_for_muon, release_gradients


class Conv1D(nn.Module):
    """As in Transformers: y = x W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.zeros(12))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.pos_embed = nn.Embedding(20, 8), nn.Parameter(torch.randn(4, 8))
        self.block = nn.ModuleDict({"up": nn.Linear(8, 12), "down": Conv1D(), "norm": nn.LayerNorm(8)})
        self.patch, self.frozen = nn.Conv2d(3, 8, 2), nn.Linear(2, 2).requires_grad_(False)
        self.head, self.unembed = nn.Linear(8, 5), nn.Linear(8, 20, bias=False)
        self.answer = nn.Linear(8, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.answer


def names(groups: list[dict[str, Any]]) -> list[set[str]]:
    return [{name for name, _ in group["params"]} for group in groups]


def test_groups_are_hidden_matrices_and_all_else() -> None:
    """Embeddings and heads are told by their class, their name, an embedding's shape, and by the model."""
    model = Model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = param_groups_for_muon(model)
    assert names(groups)[:2] == [{"block.up.weight"}, {"block.down.weight"}]
    assert names(groups)[2] == trained - {"block.up.weight", "block.down.weight"}
    for kind in (Muon, AdamW):  # whatever the optimizer's own rule
        found = kind(param_groups_for_muon(model, adamw={"lr": 3e-4}), lr=1e-2).param_groups
        assert [group["rule"] for group in found] == ["muon", "muon", "adamw"]
        assert [group["lr"] for group in found] == [1e-2, 1e-2, 3e-4]
        assert [group.get("output_axis") for group in found] == [0, 1, None]
    found = Muon(param_groups_for_muon(model), nesterov=False).param_groups
    assert [group["rule"] for group in found] == ["muon_momentum", "muon_momentum", "adamw"]
    assert names(param_groups_for_muon(model, others=["up"]))[0] == {"block.down.weight"}
    assert len(param_groups_for_muon(nn.LayerNorm(3))) == 1
    with pytest.raises(InvalidArgumentError, match=r"others='gate' has 'gate', which is in no name"):
        param_groups_for_muon(model, others="gate")
    with pytest.raises(InvalidArgumentError, match=r"adamw= has learning_rate, which is not a setting of AdamW"):
        param_groups_for_muon(model, adamw={"learning_rate": 3e-4})
    with pytest.raises(InvalidArgumentError, match=r"model is a generator; give the torch\.nn\.Module"):
        param_groups_for_muon(model.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_muon_refuses_parameters_that_are_not_matrices(shape: tuple[int, ...]) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(UnsupportedTensorError, match=r'takes matrices only.* "rule": "adamw".*param_groups_for_muon'):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(shape))]})
    assert len(optimizer.param_groups) == 1


def test_muon_refuses_a_lazy_parameter_that_becomes_a_tensor_of_three_dimensions() -> None:
    lazy = nn.LazyConv1d(3, 2)
    optimizer = Muon([lazy.weight])
    lazy(torch.randn(1, 4, 5)).sum().backward()
    with pytest.raises(UnsupportedTensorError, match=r"has shape \(3, 4, 2\), and muon takes matrices only"):
        optimizer.step()
    assert not optimizer.state


def laid_out(x: torch.Tensor, by_columns: bool) -> torch.Tensor:
    return x.t().contiguous().t() if by_columns else x


@pytest.mark.parametrize("compensation", ["none", "stochastic"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_layout_of_a_matrix_does_not_matter(nesterov: bool, compensation: str) -> None:
    """A transposed parameter, and a transposed gradient, as a Linear's after a transposed product: bit for bit."""
    dtype, start = torch.bfloat16, torch.randn(70, 50)
    found = []
    for parameter_is, gradient_is in ((False, False), (True, False), (False, True)):
        parameter = nn.Parameter(laid_out(start.to(dtype), parameter_is))
        optimizer = Muon([parameter], lr=1e-2, nesterov=nesterov, compensation=compensation)
        for step in range(3):
            gradient = torch.randn(70, 50, generator=torch.Generator().manual_seed(step)).to(dtype)
            parameter.grad = laid_out(gradient, gradient_is)
            optimizer.step()
        assert parameter.stride() == laid_out(start, parameter_is).stride()
        found.append(parameter.detach().clone(memory_format=torch.contiguous_format))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_dtype_and_a_list_are_taken_as_their_names_and_tuples() -> None:
    """A list that is changed in place is seen, too."""
    optimizer = Muon([nn.Parameter(torch.ones(2, 3))], ns_dtype=torch.float32, ns_coefficients=[2.0, -1.5, 0.5])  # type: ignore[call-arg]
    (parameter,) = optimizer.param_groups[0]["params"]
    current = slot_of(optimizer, parameter).hyperparameters
    assert (current.ns_dtype, current.ns_coefficients) == ("float32", (2.0, -1.5, 0.5))
    optimizer.param_groups[0]["ns_coefficients"][0] = 3.0
    assert slot_of(optimizer, parameter).hyperparameters.ns_coefficients == (3.0, -1.5, 0.5)
    with pytest.raises(InvalidArgumentError, match="ns_dtype='float16' must be 'bfloat16' or 'float32'"):
        Muon([parameter], ns_dtype=torch.float16)  # type: ignore[call-arg]


def test_micro_batches_go_into_the_momentum_exactly_without_nesterov() -> None:
    """Released, with one gradient alive; with Nesterov it is refused."""
    found = []
    for released in (False, True):
        model = layers(dtype=torch.float64)
        for layer in model:
            layer[0].bias.requires_grad_(False)
        optimizer = Muon([layer[0].weight for layer in model], lr=1e-2, nesterov=False, ns_dtype="float32")
        if released:
            release_gradients(model, optimizer, accumulation="state")
        for step in range(3):
            for batch in batches(3, dtype=torch.float64, seed=step):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    for one, other in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with pytest.raises(RefusedError, match="SGD with momentum, or Muon, without nesterov"):
        release_gradients(model := layers(), Muon([model[0][0].weight]), accumulation="state")


def test_a_state_of_another_rule_is_refused_and_its_own_goes_on() -> None:
    """SGD's momentum is a sum of gradients, Muon's their mean."""
    model, other = layers(), layers(seed=3)
    optimizer, fresh = (Muon(param_groups_for_muon(each), lr=1e-2) for each in (model, other))
    train(model, optimizer, batches(2))
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(InvalidArgumentError, match="is of the rule 'muon', the optimizer's is of 'stable_adamw'"):
        StableAdamW([{"params": group["params"]} for group in fresh.param_groups]).load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(saved)
    for each, own in ((model, optimizer), (other, fresh)):
        train(each, own, batches(2, seed=5))
    assert same_parameters(model, other)
