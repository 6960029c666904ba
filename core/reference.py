r"""The reference: recorded events in float64, implemented a second time and independently.

It shares no formula with the rest of core, so that a wrong formula there cannot prove itself. It keeps the raw moments
of the papers and debiases them where they are used:

    m = beta1*m + (1-beta1)*g          v = beta2*v + (1-beta2)*g^2
    m_hat = m/(1-beta1^t)              v_hat = v/(1-beta2^t)

Adam: Kingma and Ba, 2015. AdamW: Loshchilov and Hutter, 2019. StableAdamW: Wortsman et al., 2023, algorithm 2. Lion: Chen et
al., 2023, algorithm 2. SGD: torch.optim.SGD's documentation. RAdam: Liu et al., 2020, with eps where torch.optim.RAdam has it.
Adan: Xie et al., 2022, algorithm 1, debiased as optimi does. Muon: torch.optim.Muon's documentation, by singular values.
Ranger: Zhang et al., 2019, algorithm 1, around RAdam with eps where optimi has it.
In-state accumulation: Zhang et al., 2023 (AdamA): of K micro-batches only the first decays the moments.
"""

from __future__ import annotations

import copy
import dataclasses
import decimal
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass
class Settings:
    """The hyperparameters of a reference run; `lr` and the others may be changed by a `Change` event."""

    rule: str
    lr: float
    betas: tuple[float, ...]
    eps: float
    weight_decay: float
    decouple_lr: bool = False
    max_lr: float | None = None
    maximize: bool = False
    accumulation: str | None = None  # None (release), "hold" or "state"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    decoupled_weight_decay: bool = False
    ns_coefficients: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ns_steps: int = 0
    adjust_lr_fn: str | None = None
    output_axis: int = 0
    k: int = 0
    alpha: float = 0.0

    @property
    def l2(self) -> bool:
        """Whether the decay is part of the gradient."""
        return self.rule == "adam" or (self.rule.startswith(("sgd", "radam", "ranger")) and not self.decoupled_weight_decay)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of one tensor. last: it is the tensor's last micro-batch, and the update follows at once."""

    tensor: str
    value: Any
    last: bool = True


@dataclasses.dataclass(frozen=True)
class EndOfStep:
    """step(): pending gradients are applied."""


@dataclasses.dataclass(frozen=True)
class Change:
    """New values of some settings, as from a scheduler."""

    values: Mapping[str, Any]


Recorded = Gradient | EndOfStep | Change

RAW = {
    "exp_avg": "m",
    "momentum_buffer": "m",
    "exp_avg_sq": "v",
    "exp_avg_diff": "d",
    "prev_grad": "previous",
    "lookahead": "way",
}
"""The attribute of `ReferenceTensor` that holds a rule's field, not debiased, by the field's name."""


@dataclasses.dataclass
class ReferenceTensor:
    """One parameter with its raw moments, all float64 arrays of its shape."""

    parameter: np.ndarray
    m: np.ndarray
    v: np.ndarray
    t: int = 0
    held: np.ndarray | None = None
    micro_batches: int = 0
    d: Any = 0.0  # Adan's mean difference
    previous: Any = None  # Adan's gradient of the last update
    slow: Any = None  # Ranger's slow weights
    step: np.ndarray | None = None  # of a rule that needs the gradient for it
    ratio: float = 0.0  # sum over the micro-batches of mean(g^2 / max(v_hat, eps^2))

    @property
    def way(self) -> Any:
        """From Ranger's slow weights to the parameter."""
        return None if self.slow is None else self.parameter - self.slow

    def snapshot(self) -> ReferenceTensor:
        """Return a copy that later events do not change."""
        return copy.deepcopy(self)


class Reference:
    """Runs events one by one; `tensors` holds the values after the last of them."""

    def __init__(self, settings: Settings, parameters: Mapping[str, Any]) -> None:
        self.settings = dataclasses.replace(settings)
        self.tensors = {}
        for name, value in parameters.items():
            start = np.array(value, dtype=np.float64)
            self.tensors[name] = ReferenceTensor(start, np.zeros_like(start), np.zeros_like(start))

    def run(self, event: Recorded) -> None:
        """Process one event."""
        if isinstance(event, Change):
            self.settings = dataclasses.replace(self.settings, **event.values)
        elif isinstance(event, EndOfStep):
            for tensor in self.tensors.values():
                self._flush(tensor)
        else:
            self._gradient(self.tensors[event.tensor], np.asarray(event.value, dtype=np.float64), event.last)

    def _gradient(self, tensor: ReferenceTensor, g: np.ndarray, last: bool) -> None:
        if self.settings.accumulation == "hold":
            tensor.held = g if tensor.held is None else tensor.held + g
            if last:
                self._flush(tensor)
            return
        self._micro_batch(tensor, g)
        if last or self.settings.accumulation is None:
            self._descend(tensor)

    def _flush(self, tensor: ReferenceTensor) -> None:
        if tensor.held is not None:
            self._micro_batch(tensor, tensor.held)
            tensor.held = None
        if tensor.micro_batches:
            self._descend(tensor)

    def _micro_batch(self, tensor: ReferenceTensor, g: np.ndarray) -> None:
        s = self.settings
        if s.maximize:
            g = -g
        first = tensor.micro_batches == 0
        if s.l2 and first:
            g = g + s.weight_decay * tensor.parameter
        tensor.micro_batches += 1
        self._enter(tensor, g, first)

    def _enter(self, tensor: ReferenceTensor, g: np.ndarray, first: bool) -> None:
        s = self.settings
        if s.rule.startswith("sgd"):
            tensor.step = g
            if s.momentum:
                entering = g if tensor.t == 0 else (1 - s.dampening) * g
                tensor.m = (s.momentum * tensor.m if first else tensor.m) + entering
                tensor.step = g + s.momentum * tensor.m if s.nesterov else tensor.m
            return
        if s.rule.startswith("muon"):
            tensor.m = (s.momentum * tensor.m if first else tensor.m) + (1 - s.momentum) * g
            tensor.step = self._orthogonalised((1 - s.momentum) * g + s.momentum * tensor.m if s.nesterov else tensor.m)
            return
        beta1, beta2 = s.betas[:2]
        if s.rule == "lion":
            tensor.step = np.sign(beta1 * tensor.m + (1 - beta1) * g)
            tensor.m = beta2 * tensor.m + (1 - beta2) * g
            return
        if s.rule == "adan":
            self._enter_adan(tensor, g, first)
            return
        tensor.m = (beta1 * tensor.m if first else tensor.m) + (1 - beta1) * g
        tensor.v = (beta2 * tensor.v if first else tensor.v) + (1 - beta2) * g**2
        if s.rule == "stable_adamw" and g.size:
            v_hat = tensor.v / (1 - beta2 ** (tensor.t + 1))
            tensor.ratio += float(np.mean(g**2 / np.maximum(v_hat, s.eps**2)))

    def _enter_adan(self, tensor: ReferenceTensor, g: np.ndarray, first: bool) -> None:
        """Adan's algorithm 1; of several micro-batches the first has the difference to the last update's gradient."""
        beta1, beta2, beta3 = self.settings.betas
        g_before = np.zeros_like(g) if tensor.previous is None or not first else tensor.previous
        change = np.zeros_like(g) if tensor.t == 0 else g - g_before
        tensor.m = (beta1 * tensor.m if first else tensor.m) + (1 - beta1) * g
        tensor.d = (beta2 * tensor.d if first else tensor.d) + (1 - beta2) * change
        tensor.v = (beta3 * tensor.v if first else tensor.v) + (1 - beta3) * (g + beta2 * change) ** 2
        tensor.previous = g if first else tensor.previous + g

    def _orthogonalised(self, u: np.ndarray) -> np.ndarray:
        """Muon's step: the iteration takes each singular value x to a*x + b*x^3 + c*x^5, and leaves the singular vectors."""
        s = self.settings
        if not u.size:
            return u
        left, values, right = np.linalg.svd(u, full_matrices=False)
        values = values / max(float(np.linalg.norm(u)), s.eps)
        for _ in range(s.ns_steps):
            a, b, c = s.ns_coefficients
            values = a * values + b * values**3 + c * values**5
        outputs, inputs = u.shape[s.output_axis], u.shape[1 - s.output_axis]
        least = {"match_rms_adamw": None, "spectral_unclamped": 0.0}.get(s.adjust_lr_fn or "", 1.0)
        scale = 0.2 * max(u.shape) ** 0.5 if least is None else max(least, outputs / inputs) ** 0.5
        return scale * (left * values) @ right

    def _step(self, tensor: ReferenceTensor) -> np.ndarray:
        s = self.settings
        m_hat, v_hat = tensor.m / (1 - s.betas[0] ** tensor.t), tensor.v / (1 - s.betas[-1] ** tensor.t)
        if s.rule.startswith(("radam", "ranger")):
            return self._rectified(tensor, m_hat)
        if s.rule == "adan":
            m_hat = m_hat + s.betas[1] * tensor.d / (1 - s.betas[1] ** tensor.t)
        return m_hat / (np.sqrt(v_hat) + s.eps)

    def _rectified(self, tensor: ReferenceTensor, m_hat: np.ndarray) -> np.ndarray:
        """RAdam's step, algorithm 2."""
        t, beta2, exact = tensor.t, self.settings.betas[1], decimal.Decimal(self.settings.betas[1])
        rho_inf = 2 / (1 - exact) - 1
        rho = rho_inf - 2 * t * exact**t / (1 - exact**t)  # of two numbers of 2/(1-beta2): float64 would lose six digits
        if rho <= 5:
            return m_hat
        r = float(((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)).sqrt())
        if self.settings.rule.startswith("ranger"):
            return r * m_hat / (np.sqrt(tensor.v / (1 - beta2**t)) + self.settings.eps)
        return r * m_hat * np.sqrt(1 - beta2**t) / (np.sqrt(tensor.v) + self.settings.eps)

    def _descend(self, tensor: ReferenceTensor) -> None:
        s = self.settings
        tensor.t += 1
        lr = s.lr
        tensor.slow = tensor.parameter if tensor.slow is None else tensor.slow
        step = self._step(tensor) if tensor.step is None else tensor.step
        if s.rule == "stable_adamw":
            lr = lr / float(np.maximum(1.0, np.sqrt(tensor.ratio)))  # a NaN stays one
        decay = 0.0
        if not s.l2:
            decay = s.weight_decay * (lr / s.max_lr if s.decouple_lr and s.max_lr else lr)
        if s.rule == "adan":
            tensor.parameter = (tensor.parameter - lr * step) / (1 + decay)
        else:
            tensor.parameter = tensor.parameter - decay * tensor.parameter - lr * step
        if s.rule.startswith("ranger") and tensor.t % s.k == 0:
            tensor.slow = tensor.slow + s.alpha * (tensor.parameter - tensor.slow)
            tensor.parameter = tensor.slow
        tensor.micro_batches = 0
        tensor.ratio = 0.0
