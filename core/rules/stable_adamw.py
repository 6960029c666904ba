"""StableAdamW (Wortsman et al., 2023, https://arxiv.org/abs/2304.13013): AdamW with Adafactor's update clipping.

    eta = lr / max(1, sqrt(mean_square))        mean_square = mean(g*g / max(v, eps^2))
    p <- p - eta * (m/(sqrt(v)+eps) + weight_decay*p)

A gradient far above what the second moment expects shortens the whole step of its tensor, so that no gradient clipping is
needed. The clip factor applies to the decay, too.
"""

from .rule import Rule

STABLE_ADAMW = Rule(name="stable_adamw", clips_update=True, l2=False, betas=(0.9, 0.99), eps=1e-6, weight_decay=1e-2)
