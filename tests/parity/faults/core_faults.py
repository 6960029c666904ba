"""Faults in core: the specification, which "numpy" runs as it is written and "jax" traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from penstock.core import compensation, moments, update
from penstock.core.compensation import Stored
from penstock.core.moments import Moments
from penstock.jax_frontend import rule_transform
from penstock.parity.backends import specification

from .planting import Fault, instead, value

B_ADAMW, B_ADAM = "B/adamw/float32/none/state-default", "B/adam/float32/none/state-default"
B_STABLE = "B/stable_adamw/float32/none/state-default"
DENORMAL = "denormal/adamw/float32/none/state-default"
DECAY = "decay/adamw/bfloat16/split/state-default"


def _eps_in_root(correct: Any, m: Moments, parameter: Any, eps: Any, decay: Any, xp: Any) -> Any:
    step = m.exp_avg / xp.sqrt(m.exp_avg_sq + eps)
    return step + decay * parameter


def _decay_unfolded(correct: Any, ops: Any, rule: Any, given: Any, parameter: Any, m: Moments, mean_square: Any) -> Any:
    """p*(1 - lr*weight_decay), with a factor that the parameter's dtype rounds to 1."""
    step = correct(ops, rule, dataclasses.replace(given, weight_decay=0.0), parameter, m, mean_square)
    kept = ops.round_to(np.float32(1.0 - given.learning_rate * given.decay_rate), "bfloat16")
    return parameter * kept - parameter + step


def _decay_not_clipped(correct: Any, ops: Any, rule: Any, given: Any, parameter: Any, m: Moments, mean_square: Any) -> Any:
    step = correct(ops, rule, dataclasses.replace(given, weight_decay=0.0), parameter, m, mean_square)
    return step - given.learning_rate * given.decay_rate * parameter


def _through(dtype: str) -> Any:
    def rounded(correct: Any, ops: Any, m: Moments, state: Any) -> Any:
        return correct(ops, Moments(*(ops.round_to(each, dtype) for each in m)), state)

    return rounded


def _kept_with_other_sign(correct: Any, ops: Any, how: str, stored: Stored) -> Any:
    kept = stored.compensation
    return correct(ops, how, Stored(stored.parameter, None if kept is None else -kept))


def _never_first(correct: Any, *args: Any, first: bool) -> Any:
    return correct(*args, first=True)


FAULTS = [
    Fault(
        "debiasing off by one",
        instead(moments, "corrected_one_minus_beta", lambda correct, beta, step, xp: correct(beta, step + 1, xp)),
        B_ADAMW,
        "numpy",
    ),
    Fault(
        "no debiasing",
        instead(moments, "corrected_one_minus_beta", lambda correct, beta, step, xp: 1.0 - beta),
        B_ADAMW,
        "numpy",
    ),
    Fault(
        "beta2 in the place of beta1",
        instead(
            rule_transform,
            "bias_corrections",
            lambda correct, given, number, xp: correct(dataclasses.replace(given, beta1=given.beta2), number, xp),
        ),
        B_ADAMW,
        "jax",
    ),
    Fault(
        "beta2 in the place of beta1, seen in subnormal numbers",
        instead(
            specification,
            "bias_corrections",
            lambda correct, given, number, xp: correct(dataclasses.replace(given, beta1=given.beta2), number, xp),
        ),
        DENORMAL,
        "numpy",
    ),
    Fault(
        "exp_avg_sq not updated, seen in subnormal numbers",
        instead(
            update,
            "first_moments",
            lambda correct, m, gradient, c: correct(m, gradient, c)._replace(exp_avg_sq=m.exp_avg_sq),
        ),
        DENORMAL,
        "numpy",
    ),
    Fault("eps inside the root", instead(update, "direction", _eps_in_root), B_ADAMW, "numpy"),
    Fault("decay unfolded", instead(update, "_stepped", _decay_unfolded), DECAY, "numpy", 100),
    Fault("decay not clipped", instead(update, "_stepped", _decay_not_clipped), B_STABLE, "numpy", 100),
    Fault(
        "mean square over the wrong count",
        instead(update, "mean_square", lambda correct, g, v, eps, xp: correct(g, v, eps, xp) * g.size / max(1, g.size - 1)),
        "shapes/stable_adamw/float32/none/state-default",
        "numpy",
    ),
    Fault(
        "mean square over the old second moment",
        instead(
            update,
            "_accumulated",
            lambda correct, ops, rule, given, c, p, g, state, first: (
                correct(ops, rule, given, c, p, g, state, first)[0],
                moments.mean_square(ops.cast(g, "float32"), ops.cast(state.exp_avg_sq, "float32"), given.eps, ops.xp),
            ),
        ),
        B_STABLE,
        "numpy",
    ),
    Fault(
        "update clipping inverted",
        instead(update, "clipped_learning_rate", lambda correct, lr, square, xp: lr * lr / correct(lr, square, xp)),
        B_STABLE,
        "numpy",
        100,
    ),
    Fault(
        "update not clipped",
        instead(update, "clipped_learning_rate", lambda correct, lr, square, xp: lr),
        "frameworks/stable_adamw/float32",
        "jax",
    ),
    Fault("state through bfloat16", instead(update, "_rounded", _through("bfloat16")), B_ADAMW, "numpy"),
    Fault("state through float16", instead(update, "_rounded", _through("float16")), B_STABLE, "numpy"),
    Fault(
        "sign of the kahan compensation",
        instead(compensation, "load", _kept_with_other_sign),
        "B/adamw/float16/kahan/state-default",
        "numpy",
    ),
    Fault(
        "sign of the split compensation",
        instead(compensation, "load", _kept_with_other_sign),
        "B/adamw/bfloat16/split/state-default",
        "numpy",
    ),
    Fault(
        "split cuts off instead of rounding",
        value(compensation, "_HALF", 0),
        "B/adamw/bfloat16/split/state-default",
        "numpy",
    ),
    Fault(
        "moments decayed by every micro-batch",
        value(update, "later_moments", moments.first_moments),
        "events/state/adamw/float32",
        "numpy",
    ),
    Fault(
        "L2 added by every micro-batch",
        instead(update, "prepared_gradient", _never_first),
        "events/state/adam/float32",
        "numpy",
    ),
    Fault(
        "L2 left out",
        instead(update, "prepared_gradient", lambda correct, *args, first: correct(*args, first=False)),
        B_ADAM,
        "numpy",
    ),
    Fault(
        "mean square of the last micro-batch only",
        instead(
            update,
            "_accumulated",
            lambda correct, ops, rule, given, c, p, g, state, first: correct(
                ops, rule, given, c, p, g, state._replace(mean_square=0.0), first
            ),
        ),
        "events/state/stable_adamw/float32",
        "numpy",
    ),
]
