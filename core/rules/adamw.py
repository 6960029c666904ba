"""AdamW (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101).

p <- p - lr * (m/(sqrt(v)+eps) + weight_decay*p)
"""

from .rule import Rule

ADAMW = Rule(name="adamw", clips_update=False, l2=False, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
