"""AdamW (Loshchilov and Hutter, 2019)."""

import dataclasses

from .adam import ADAM

ADAMW = dataclasses.replace(
    ADAM,
    name="adamw",
    title="Adam with decoupled weight decay",
    mathematics="""
        m += c1*(g-m)    v += c2*(g*g-v)        c = (1-beta)/(1-beta^t)
        p <- p - lr*(m/(sqrt(v)+eps) + weight_decay*p)
    """,
    source="Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101.",
    defaults={**ADAM.defaults, "weight_decay": 1e-2},
    l2=False,
)
