"""The description of a rule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rule:
    """One optimizer of the Adam family: its differences from the others, and its defaults.

    Args:
        name: its name in both frontends ("stable_adamw").
        clips_update: divide the step by max(1, sqrt(mean_square)): Adafactor's update clipping.
        l2: weight decay enters the gradient (L2 regularisation) instead of the step (decoupled decay).
        betas, eps, weight_decay: its defaults.
    """

    name: str
    clips_update: bool
    l2: bool
    betas: tuple[float, float]
    eps: float
    weight_decay: float
