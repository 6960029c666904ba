"""The model in PyTorch, trained by an optimizer of the torch frontend."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import torch_frontend
from ...demonstration.torch_model import Transformer
from ...torch_frontend.clipping import NORM_EPS
from ..backends.protocol import Held
from ..backends.torch_arguments import held_of, optimizer_of
from ..cases import Storage
from .cases import SHAPE, Trajectory, start


class TorchTrajectory:
    """The model in PyTorch, under one of the torch frontend's backends.

    Args:
        case: of this run.
        backend: of the torch frontend.
        device: where the model is.
    """

    norm_eps = NORM_EPS

    def __init__(self, case: Trajectory, backend: str, device: str) -> None:
        self.case, self.device = case, device
        self.model = Transformer(start(case.dtype), SHAPE).to(device)
        storage = Storage("none", None)
        self.optimizer = optimizer_of(case.rule, self.model.parameters(), case.hyperparameters, storage, backend=backend)
        self.is_last = True
        self.release = None if case.mode == "step" else self._release()

    def _release(self) -> Any:
        mode = self.case.mode
        if mode in ("hold", "state"):
            return torch_frontend.release_gradients(self.model, self.optimizer, accumulation=mode, sync=lambda: self.is_last)
        return torch_frontend.release_gradients(self.model, self.optimizer, max_norm=self.case.max_norm)

    def step(self, batch: np.ndarray) -> None:
        parts = self.case.parts(batch)
        for number, part in enumerate(parts, 1):
            self.is_last = number == len(parts)
            loss: Tensor = self.model.loss(torch.from_numpy(part).to(self.device, torch.int64)) / len(parts)
            if self.release is not None:
                loss = self.release.guard(loss)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> dict[str, Held]:
        return held_of(self.optimizer, self.model.named_parameters())
