"""Event sequences on the torch backends: `release_gradients` on a model whose gradients are those of the case."""

from __future__ import annotations

import contextlib
import io
import weakref
from typing import TYPE_CHECKING, Any

from ...core.errors import RefusedError
from ..backends.protocol import Held
from ..backends.torch_arguments import kept_by, optimizer_of, to_numpy, to_torch
from .recorded import TIED, Backward, Event, EventCase, LearningRate, Step

if TYPE_CHECKING:
    from torch import Tensor


class TorchEvents:
    """The loss is sum(p*g), so that the gradient of p is g, to the bit.

    Args:
        case: the case.
        backend: of the optimizer.
        device: where the parameters are.
        released: False: a plain optimizer, whose step() uses gradients that add up in `.grad`. Only for sequences
            that need no more than that.
    """

    def __init__(self, case: EventCase, backend: str, device: str = "cpu", *, released: bool = True) -> None:
        import torch

        from ... import torch_frontend
        from ...planner.live_gradients import LiveGradientMeter

        self.case, self.device, sequence = case, device, case.sequence
        start = case.initial_parameters()
        self.parameters = {name: torch.nn.Parameter(to_torch(value).to(device)) for name, value in start.items()}
        self.model = torch.nn.Module()
        for name, parameter in self.parameters.items():
            self.model.register_parameter(name, parameter)
        if sequence.tied:
            self.model.register_parameter(f"{TIED}_again", self.parameters[TIED])
        self.optimizer = optimizer_of(
            case.rule,
            self.model.parameters(),
            case.hyperparameters(),
            case.storage,
            backend=backend,
            on_nonfinite="skip" if sequence.skips else "propagate",
        )
        self.meter = LiveGradientMeter(self.parameters.items())
        self.meter.__enter__()
        weakref.finalize(self, self.meter.__exit__, None, None, None)
        self.scaler: Any = None
        if sequence.loss_scale is not None:
            self.scaler = torch.amp.GradScaler(device, init_scale=sequence.loss_scale)
        self.last, self.passes = True, 0
        self.release: Any = None
        if released:
            last = weakref.WeakMethod(self._is_last)
            self.release = torch_frontend.release_gradients(
                self.model,
                self.optimizer,
                max_norm=sequence.max_norm,
                clipping="per_tensor" if sequence.clips_each else "exact",
                accumulation=sequence.accumulation,
                sync=(lambda: last()()) if sequence.last_known else None,  # type: ignore[misc]
                scaler=self.scaler,
            )

    def run(self, event: Event) -> None:
        if isinstance(event, Backward):
            self._backward(event)
        elif isinstance(event, LearningRate):
            for group in self.optimizer.param_groups:
                group["lr"] = event.value
        elif isinstance(event, Step):
            self.step()
            self.optimizer.zero_grad()
        else:
            with contextlib.suppress(RefusedError):  # raised where a backward has updated parameters; the step is closed
                self.optimizer.zero_grad()

    def step(self) -> None:
        """Call step() as a training loop does, with or without a scaler."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def held(self) -> dict[str, Held]:
        import torch

        found = {}
        for name, parameter in self.parameters.items():
            kept = {field: to_numpy(tensor) for field, tensor in kept_by(self.optimizer, parameter).items()}
            nothing = {field.name: to_numpy(torch.zeros_like(parameter)) for field in self.case.rule.fields}
            found[name] = Held(to_numpy(parameter), **(nothing | kept))
        return found

    def updates(self) -> dict[str, int]:
        return {name: int(self.optimizer.state[parameter].get("step", 0)) for name, parameter in self.parameters.items()}

    def live_bytes(self) -> tuple[int, ...]:
        """Measured by storage, and the release's ledger."""
        measured = self.meter.live()
        return (measured,) if self.release is None else (measured, self.release.ledger.live)

    def save(self) -> bytes:
        """Save the state dicts with torch.save."""
        import torch

        file = io.BytesIO()
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "passes": self.passes}
        if self.scaler is not None:
            states["scaler"] = self.scaler.state_dict()
        torch.save(states, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        import torch

        states = torch.load(io.BytesIO(saved), map_location=self.device, weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(states["scaler"])
        self.passes = states["passes"]

    def _is_last(self) -> bool:
        return self.last

    def _backward(self, event: Backward) -> None:
        gradients = self.case.gradients(self.passes, event)
        self.passes += 1
        self.last = event.last
        loss: Tensor | None = None
        for name, uses in gradients.items():
            for number, gradient in enumerate(uses):
                parameter = getattr(self.model, name if number == 0 else f"{name}_again")
                term = (parameter * to_torch(gradient).to(self.device)).sum()
                loss = term if loss is None else loss + term
        assert loss is not None
        paused = self.release.paused() if event.paused else contextlib.nullcontext()
        with paused:
            guarded = loss if self.release is None else self.release.guard(loss)
            (guarded if self.scaler is None else self.scaler.scale(guarded)).backward()
