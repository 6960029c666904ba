r"""The optimizers: ordinary Optax transforms with Optax's argument names.

Each of them is one rule of the specification: arithmetic in float32 (float64 for float64 parameters), weight decay folded into
the step, debiased moments. Updates have the parameter's dtype. Nothing in a state aliases a
parameter. A transform here negates and scales by the learning rate itself; only `scale_by_stable_adam` leaves both to
`optax.scale_by_learning_rate`.
"""

from __future__ import annotations

import numbers
import warnings
from typing import Any

import optax

from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import HIGH_FULLY_DECOUPLED_DECAY, Scalar
from ..core.rules import ADAM, ADAMW, STABLE_ADAMW, Rule
from .arguments import Arguments, Mask, ScalarOrSchedule
from .rule_transform import transformation


def stable_adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-6,
    *,
    weight_decay: ScalarOrSchedule = 1e-2,
    mask: Mask = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    decouple_lr: bool = False,
    max_lr: Scalar | None = None,
    compensation: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    r"""Return StableAdamW: AdamW with Adafactor's update clipping, which makes gradient clipping unnecessary.

        m += c1*(g-m)    v += c2*(g*g-v)            c = (1-b)/(1-b^t)
        eta = learning_rate / max(1, sqrt(mean(g*g / max(v, eps^2))))
        p <- p - eta*(m/(sqrt(v)+eps) + weight_decay*p)

    The defaults are those of the PyTorch frontend: weight_decay is 1e-2, where `adamw` and optax.adamw have 1e-4. The mean is
    over one leaf of the tree. A leaf that stacks several layers is one tensor here; vmap init and update
    over the layer axis to clip each layer by itself.

    Args:
        learning_rate: step size, in [0, inf): a number, a 0-d array, or a schedule of the 0-based count of updates.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
        weight_decay: in [0, inf), a number or a schedule; multiplied by the learning rate, unless decouple_lr.
        mask: where weight decay applies: a tree of booleans like params or a prefix of it, or a function from params to
            one. None: to all parameters.
        mu_dtype: dtype of the first moment. None: the parameter's.
        nu_dtype: dtype of the second moment. None: the parameter's, but float32 for float16 parameters, and for
            bfloat16 parameters where 1-b2 < 2^-7 or b2 is not known yet.
        decouple_lr: fully decoupled decay: scaled by learning_rate/max_lr instead of learning_rate. Choose a
            correspondingly lower weight_decay.
        max_lr: highest learning rate of the schedule, in (0, inf). Default: learning_rate, where that is a number; a
            schedule needs it given.
        compensation: how low-precision parameters keep the bits that rounding loses: "auto" (split for bfloat16, kahan
            for float16), "kahan", "split" (bfloat16 only) or "none". Unless it is "none", the transform must be the last
            of a chain, and with low-precision parameters no wrapper around it may change its updates
            (`optax.lookahead`, `optax.contrib.schedule_free`); `compensated` says why.

    `optax.inject_hyperparams` turns the numbers into arrays of the parameters' dtype. Give it
    hyperparam_dtype=jnp.float32 where that is bfloat16 or float16: a b1, b2 or eps rounded to it is refused. b1 and b2 may then
    change from update to update, as in Optax's transforms; the state is an `AdamStateWithBetas`, which keeps them.

    Returns:
        A transform with an `AdamState`. Its update needs params, unless weight_decay is 0 and nothing is compensated.

    Raises:
        InvalidArgumentError: a value is out of its range; params are missing in an update that needs them, or a gradient has
            another shape than its parameter.
        UnsupportedTensorError: at init, a parameter is not a floating-point array; at an update, a gradient is not.

    Example:
        tx = stable_adamw(1e-3, weight_decay=1e-2)
        state = tx.init(params)
        update = make_update(tx)  # jitted, donates its arguments
        params, state = update(grads, state, params)

    References:
        Wortsman et al., Stable and low-precision training, 2023, https://arxiv.org/abs/2304.13013.
    """
    return _alias(
        STABLE_ADAMW,
        Arguments(
            learning_rate,
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            mu_dtype,
            nu_dtype,
            decouple_lr,
            max_lr,
            compensation,
        ),
    )


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Mask = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    decouple_lr: bool = False,
    max_lr: Scalar | None = None,
    compensation: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    r"""Return AdamW: Adam with decoupled weight decay.

        m += c1*(g-m)    v += c2*(g*g-v)            c = (1-b)/(1-b^t)
        p <- p - learning_rate*(m/(sqrt(v)+eps) + weight_decay*p)

    The defaults are those of optax.adamw; PyTorch's AdamW, and that of the PyTorch frontend, have weight_decay=1e-2. There is
    no eps_root and no nesterov; all arguments after eps are given by name.

    Args:
        learning_rate: step size, in [0, inf): a number, a 0-d array, or a schedule of the 0-based count of updates.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
        weight_decay: in [0, inf), a number or a schedule; multiplied by the learning rate, unless decouple_lr.
        mask: where weight decay applies: a tree of booleans like params or a prefix of it, or a function from params to
            one. None: to all parameters.
        mu_dtype: dtype of the first moment. None: the parameter's.
        nu_dtype: dtype of the second moment. None: the parameter's, but float32 for float16 parameters, and for
            bfloat16 parameters where 1-b2 < 2^-7 or b2 is not known yet.
        decouple_lr: fully decoupled decay: scaled by learning_rate/max_lr instead of learning_rate. Choose a
            correspondingly lower weight_decay.
        max_lr: highest learning rate of the schedule, in (0, inf). Default: learning_rate, where that is a number; a
            schedule needs it given.
        compensation: how low-precision parameters keep the bits that rounding loses: "auto" (split for bfloat16, kahan
            for float16), "kahan", "split" (bfloat16 only) or "none". Unless it is "none", the transform must be the last
            of a chain, and with low-precision parameters no wrapper around it may change its updates
            (`optax.lookahead`, `optax.contrib.schedule_free`); `compensated` says why.

    `optax.inject_hyperparams` turns the numbers into arrays of the parameters' dtype. Give it
    hyperparam_dtype=jnp.float32 where that is bfloat16 or float16: a b1, b2 or eps rounded to it is refused. b1 and b2 may then
    change from update to update, as in Optax's transforms; the state is an `AdamStateWithBetas`, which keeps them.

    Returns:
        A transform with an `AdamState`. Its update needs params, unless weight_decay is 0 and nothing is compensated.

    Raises:
        InvalidArgumentError: a value is out of its range; params are missing in an update that needs them, or a gradient has
            another shape than its parameter.
        UnsupportedTensorError: at init, a parameter is not a floating-point array; at an update, a gradient is not.

    Example:
        tx = adamw(1e-3, weight_decay=1e-4)
        state = tx.init(params)
        update = make_update(tx)  # jitted, donates its arguments
        params, state = update(grads, state, params)

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, https://arxiv.org/abs/1711.05101.
    """
    return _alias(
        ADAMW,
        Arguments(
            learning_rate,
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            mu_dtype,
            nu_dtype,
            decouple_lr,
            max_lr,
            compensation,
        ),
    )


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    decouple_lr: bool = False,
    max_lr: Scalar | None = None,
    compensation: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    r"""Return Adam, with weight decay as L2 regularisation.

        g += weight_decay*p    m += c1*(g-m)    v += c2*(g*g-v)            c = (1-b)/(1-b^t)
        p <- p - learning_rate * m/(sqrt(v)+eps)

    Args:
        learning_rate: step size, in [0, inf): a number, a 0-d array, or a schedule of the 0-based count of updates.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
        weight_decay: L2 regularisation, in [0, inf), a number or a schedule; added to the gradient, times p.
        mask: where weight decay applies: a tree of booleans like params or a prefix of it, or a function from params to
            one. None: to all parameters.
        mu_dtype: dtype of the first moment. None: the parameter's.
        nu_dtype: dtype of the second moment. None: the parameter's, but float32 for float16 parameters, and for
            bfloat16 parameters where 1-b2 < 2^-7 or b2 is not known yet.
        decouple_lr: refused if True: L2 is part of the gradient and is not scaled by a learning rate; use `adamw`.
        max_lr: highest learning rate of the schedule, in (0, inf). Only checked.
        compensation: how low-precision parameters keep the bits that rounding loses: "auto" (split for bfloat16, kahan
            for float16), "kahan", "split" (bfloat16 only) or "none". Unless it is "none", the transform must be the last
            of a chain, and with low-precision parameters no wrapper around it may change its updates
            (`optax.lookahead`, `optax.contrib.schedule_free`); `compensated` says why.

    `optax.inject_hyperparams` turns the numbers into arrays of the parameters' dtype. Give it
    hyperparam_dtype=jnp.float32 where that is bfloat16 or float16: a b1, b2 or eps rounded to it is refused. b1 and b2 may then
    change from update to update, as in Optax's transforms; the state is an `AdamStateWithBetas`, which keeps them.

    Returns:
        A transform with an `AdamState`. Its update needs params, unless weight_decay is 0 and nothing is compensated.

    Raises:
        InvalidArgumentError: a value is out of its range; params are missing in an update that needs them, or a gradient has
            another shape than its parameter.
        UnsupportedTensorError: at init, a parameter is not a floating-point array; at an update, a gradient is not.

    Example:
        tx = adam(1e-3, weight_decay=0.0)
        state = tx.init(params)
        update = make_update(tx)  # jitted, donates its arguments
        params, state = update(grads, state, params)

    References:
        Kingma and Ba, Adam, 2015, https://arxiv.org/abs/1412.6980.
    """
    if decouple_lr:
        raise InvalidArgumentError(
            "decouple_lr=True is not possible for adam, whose weight_decay is L2 regularisation inside the gradient; use adamw."
        )
    return _alias(
        ADAM,
        Arguments(
            learning_rate,
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            mu_dtype,
            nu_dtype,
            max_lr=max_lr,
            compensation=compensation,
        ),
    )


def scale_by_stable_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-6,
    *,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Return the direction of StableAdamW, to be chained with `optax.scale_by_learning_rate`.

        (m/(sqrt(v)+eps) + weight_decay*p) / max(1, sqrt(mean(g*g / max(v, eps^2))))

    The clip factor applies to the decay, too, which is therefore an argument here instead of an
    `optax.add_decayed_weights` in the chain. The direction is not negated, has the parameter's dtype, and cannot be
    compensated, since it is not what is added to the parameter; wrap the whole chain in `compensated` for that.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
        mu_dtype: dtype of the first moment. None: the parameter's.
        nu_dtype: dtype of the second moment. None: the parameter's, but float32 for float16 parameters, and for
            bfloat16 parameters where 1-b2 < 2^-7 or b2 is not known yet.
        weight_decay: in [0, inf), a number or a schedule.
        mask: where weight decay applies: a tree of booleans like params or a prefix of it, or a function from params to
            one. None: to all parameters.

    Returns:
        A transform with an `AdamState`. Its update needs params, unless weight_decay is 0.

    Raises:
        InvalidArgumentError: a value out of its range; an update without the params it needs.
        UnsupportedTensorError: at init, a parameter is not a floating-point array.
    """
    return transformation(
        STABLE_ADAMW,
        Arguments(1.0, b1, b2, eps, weight_decay, mask, mu_dtype, nu_dtype, compensation="none", scales_only=True),
    )


def _alias(rule: Rule, arguments: Arguments) -> optax.GradientTransformationExtraArgs:
    decay = arguments.weight_decay
    if arguments.decouple_lr and isinstance(decay, numbers.Real) and float(decay) >= HIGH_FULLY_DECOUPLED_DECAY:
        warnings.warn(
            f"weight_decay={decay!r} is high for decouple_lr=True, where it is not multiplied by the learning rate; "
            f"values below {HIGH_FULLY_DECOUPLED_DECAY:g} are usual.",
            UserWarning,
            stacklevel=3,
        )
    return transformation(rule, arguments)
