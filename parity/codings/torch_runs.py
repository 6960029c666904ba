"""The cases on the torch backends: under gradient release, micro-batches in the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..backends.torch_arguments import optimizer_of, to_numpy, to_torch
from .cases import CodingCase
from .definitions import key_of
from .protocol import HeldField, HeldTensor


class TorchCodings:
    """The loss is sum(p*g), so that the gradient of p is g, to the bit. Several micro-batches are applied by step()."""

    def __init__(self, case: CodingCase, backend: str, device: str) -> None:
        import torch

        from ... import torch_frontend

        self.case, self.device = case, device
        start = case.initial_parameters()
        self.parameters = {name: torch.nn.Parameter(to_torch(value).to(device)) for name, value in start.items()}
        model = torch.nn.Module()
        for name, parameter in self.parameters.items():
            model.register_parameter(name, parameter)
        named = model.named_parameters()
        self.optimizer = optimizer_of(case.rule, named, case.hyperparameters, case.storage, backend=backend)
        self.model, accumulation = model, "state" if case.micro_batches > 1 else None
        self.release = torch_frontend.release_gradients(model, self.optimizer, accumulation=accumulation)

    def update(self, gradients: Sequence[Mapping[str, np.ndarray]]) -> None:
        for given in gradients:
            terms = [(self.parameters[name] * to_torch(gradient).to(self.device)).sum() for name, gradient in given.items()]
            sum(terms[1:], terms[0]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> dict[str, HeldTensor]:
        import torch

        from ...torch_frontend.backends.backend import scale_key, state_keys

        keys = {field.name: key for field, key in zip(self.case.rule.fields, state_keys(self.case.rule), strict=True)}
        found = {}
        for name, parameter in self.parameters.items():
            arrays = {key: to_numpy(x) for key, x in self.optimizer.state[parameter].items() if isinstance(x, torch.Tensor)}
            fields = {field: HeldField(arrays[key], arrays.get(scale_key(key))) for field, key in keys.items()}
            found[name] = HeldTensor(to_numpy(parameter), arrays.get("compensation"), fields)
        return found

    def keys(self) -> dict[str, int]:
        return {name: key_of(name) for name in self.parameters}

    def steps_from_stored(self) -> bool:
        return self.case.micro_batches > 1
