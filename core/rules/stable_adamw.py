"""StableAdamW (Wortsman et al., 2023): AdamW with Adafactor's update clipping.

A gradient far above what the second moment expects shortens the whole step of its tensor, so that no gradient clipping is
needed. The clip factor applies to the decay, too.
"""

import dataclasses

from . import adam_family
from .adamw import ADAMW

STABLE_ADAMW = dataclasses.replace(
    ADAMW,
    name="stable_adamw",
    title="AdamW with Adafactor's update clipping, which makes gradient clipping unnecessary",
    mathematics="""
        m += c1*(g-m)    v += c2*(g*g-v)        c = (1-beta)/(1-beta^t)
        eta = lr / max(1, sqrt(mean(g*g / max(v, eps^2))))
        p <- p - eta*(m/(sqrt(v)+eps) + weight_decay*p)
    """,
    source="Wortsman et al., 2023, https://arxiv.org/abs/2304.13013, algorithm 2.",
    defaults={"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 1e-2},
    mean_square=adam_family.mean_square,
)
