"""Training in PyTorch: parameters in the row's dtype, all else in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from penstock import torch_frontend
from penstock.demonstration.torch_model import Transformer
from penstock.torch_frontend import param_groups_for_muon

from .rows import ROWS, Row, Settings


def train(name: str, settings: Settings, seed: int) -> list[float]:
    """Return the loss of every step."""
    row = ROWS[name]
    model = Transformer(settings.initial(seed), settings.shape).to(getattr(torch, row.dtype))
    optimizer = optimizer_of(row, settings, model)
    losses = []
    for step, batch in enumerate(settings.batches(seed)):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(row, step)
        tokens = torch.from_numpy(batch).long()
        upcast = {name: parameter.float() for name, parameter in model.named_parameters()}
        logits = functional_call(model, upcast, tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(row: Row, settings: Settings, model: Transformer) -> Any:
    """Return the optimizer of a row."""
    asked = dict(row.asked)
    if asked.get("state_dtype") not in (None, "8bit"):
        asked["state_dtype"] = getattr(torch, asked["state_dtype"])
    parameters: Any = model.parameters()
    if row.optimizer == "Muon":
        parameters = param_groups_for_muon(model)
        asked |= {"adjust_lr_fn": "match_rms_adamw", "output_axis": 1}
    make = getattr(torch_frontend, row.optimizer)
    return make(parameters, weight_decay=settings.weight_decay, **asked)
