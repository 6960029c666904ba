"""Adam with L2 regularisation (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980).

    g += weight_decay*p        p <- p - lr * m/(sqrt(v)+eps)

The decay is added once per update, to the first micro-batch's gradient, after unscaling and clipping.
"""

from .rule import Rule

ADAM = Rule(name="adam", clips_update=False, l2=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
