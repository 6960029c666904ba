"""Adam (Kingma and Ba, 2015)."""

from . import adam_family
from .rule import Rule

ADAM = Rule(
    name="adam",
    title="Adam with weight decay as L2 regularisation",
    mathematics="""
        g += weight_decay*p    m += c1*(g-m)    v += c2*(g*g-v)        c = (1-beta)/(1-beta^t)
        p <- p - lr*m/(sqrt(v)+eps)
    """,  # the decay is added once an update, to the first micro-batch's gradient, after unscaling and clipping
    source="Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980.",
    fields=adam_family.FIELDS,
    hyperparameters=adam_family.AdamHyperparameters,
    defaults={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    corrections=adam_family.bias_corrections,
    accumulate=adam_family.accumulate,
    direction=adam_family.direction,
    l2=True,
)
