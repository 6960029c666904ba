"""Parameters that the user writes between steps (pruning, clamping, projection) train on from what was written."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.rows import rows
from torch import nn

from penstock.torch_frontend import AdamW

CODINGS = [(torch.bfloat16, "split"), (torch.bfloat16, "kahan"), (torch.float16, "kahan")]


@pytest.mark.parametrize(
    ("backend", "dtype", "compensation"),
    rows(
        [(backend, *coding) for backend in ("eager", "compiled") for coding in CODINGS],
        lambda row: row[0] == "eager" or row[2] == "split",
    ),
)
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_pruned_weight_trains_on_as_if_nothing_had_been_lost(
    dtype: torch.dtype, compensation: str, backend: str, value: float
) -> None:
    """Where a weight is set to zero, its old remainder is ignored: the next step is that of a remainder of zero."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(130, 130, generator=generator).to(dtype))  # large enough for a compiled graph
    optimizer = AdamW([weight], lr=1e-3, compensation=compensation, backend=backend)
    gradients = torch.randn(4, 130, 130, generator=generator).to(dtype)
    for gradient in gradients[:2]:
        weight.grad = gradient.clone()
        optimizer.step()
    pruned = torch.rand(130, 130, generator=generator) < 0.5
    with torch.no_grad():
        weight[pruned] = value
    twin = nn.Parameter(weight.detach().clone())
    cleared = AdamW([twin], lr=1e-3, compensation=compensation, backend=backend)
    cleared.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    remainder = cleared.state[twin]["compensation"]
    assert remainder[pruned].any()
    remainder[pruned] = 0
    for gradient in gradients[2:]:
        weight.grad, twin.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        cleared.step()
    assert weight.isfinite().all()
    assert torch.equal(weight, twin)
