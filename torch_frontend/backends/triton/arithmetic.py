"""The elementwise arithmetic of the kernels: `core.rules.adam_family` and `core.compensation`, operation by operation.

Every function here is inlined into the kernels of `kernels`. `COMPUTE` is the compute dtype of `core.dtypes.compute_dtype`.
The order of operations is that of core, and the kernels are compiled without contraction to fused multiply-add, so that a
number does not depend on the kernel that computes it. In float32 on a GPU the square root may be off by one unit in the last
place and the quotient by two, and the square root of a subnormal number (below 1.2e-38) is 0. In float64, and in the
interpreter, they are correctly rounded.
"""

import triton
import triton.language as tl

from .rounding import stochastically_rounded, without_low_bits


@triton.jit
def bias_correction(first, log, step, COMPUTE: tl.constexpr):
    """Return (1-beta)/(1-beta^t) for the update after `step` others: `core.debiasing.corrected_one_minus_beta`.

    `first` is 1-beta and `log` is log(beta), and with x = t*log(beta), in float64,

        1-beta^t = -expm1(x) = (1-e)*x/log(e)    e = exp(x)        if e is near 1 (Kahan's formula, without cancellation)
                             = 1-e                                  elsewhere
    """
    x = (step.to(tl.float64) + 1.0) * log
    e = tl.exp(x)
    near = tl.where(e == 1.0, -x, (1.0 - e) * x / tl.log(e))
    return (first / tl.where(x > -0.5, near, 1.0 - e)).to(COMPUTE)


@triton.jit
def clipped_learning_rate(learning_rate, mean_square):
    """Return lr / max(1, sqrt(mean_square)): `core.update.clipped_learning_rate`. NaN gives NaN."""
    root = tl.sqrt(mean_square)
    return tl.where(root <= 1.0, learning_rate, learning_rate / root)


@triton.jit
def prepared_gradient(g, parameter, decay, FIRST: tl.constexpr, L2: tl.constexpr, MAXIMIZE: tl.constexpr):
    """Return g, or -g with maximize, plus decay*p in the first micro-batch with L2: `core.update.prepared_gradient`."""
    if MAXIMIZE:
        g = -g
    if L2 and FIRST:
        g = g + tl.where(decay != 0.0, decay * parameter, 0.0)
    return g


@triton.jit
def bounded(g, GIVEN: tl.constexpr):
    """Return the g that enters the moments: at most L, and NaN for an infinity. `core.rules.adam_family.accumulate`.

    GIVEN: the dtype of the gradient; one in float16 stays as it is, as its finite elements are below L.
    """
    if GIVEN == tl.float16:
        return g
    else:
        largest = 2.0**498 if g.dtype == tl.float64 else 2.0**50
        return tl.where(tl.abs(g) < float("inf"), tl.minimum(tl.maximum(g, -largest), largest), float("nan"))


@triton.jit
def next_exp_avg(m, g, correction, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """Return m + c1*(g-m), or m + c1*g for a later micro-batch: `core.rules.adam_family.accumulate`.

    ZERO: beta1 is 0, and m is set to 0 first: `core.rules.rule.forgotten`.
    """
    if FIRST:
        if ZERO:
            m = tl.zeros_like(m)
        return m + correction * (g - m)
    else:
        return m + correction * g


@triton.jit
def next_exp_avg_sq(v, g, correction, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """Return v + c2*(g*g-v), or v + c2*g*g for a later micro-batch, as `next_exp_avg`."""
    if FIRST:
        if ZERO:
            v = tl.zeros_like(v)
        return v + correction * (g * g - v)
    else:
        return v + correction * (g * g)


@triton.jit
def squared_ratio(g, v, floor):
    """Return g*g / max(v, eps^2): `core.rules.adam_family.mean_square` before the mean. NaN gives NaN."""
    return g / tl.where(v < floor, floor, v) * g


@triton.jit
def stepped(parameter, m, v, eta, eps, decay, L2: tl.constexpr):
    """Return p - eta*(m/(sqrt(v)+eps) + decay*p), with `core.rules.adam_family.direction`."""
    step = m / (tl.sqrt(v) + eps)
    if not L2:
        step = step + tl.where(decay != 0.0, decay * parameter, 0.0)
    return parameter - eta * step


@triton.jit
def decoded_parameter(p, k, COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the number that p and its compensation k represent: `core.compensation.load`."""
    if COMPENSATION == "split" or COMPENSATION == "split8":
        high = p.to(tl.int16, bitcast=True)
        below = ((high & 0x7FFF) - 1).to(tl.uint16, bitcast=True)  # of zero 0xFFFF, of infinity 0x7F7F
        remainder = tl.where(below < 0x7F7F, k, tl.zeros_like(k))
        units = high.to(tl.int32) << 16
        if COMPENSATION == "split8":
            return (units + (remainder.to(tl.int32) << 8)).to(tl.float32, bitcast=True)
        else:
            return (units + remainder.to(tl.int32)).to(tl.float32, bitcast=True)
    elif COMPENSATION == "kahan":
        upcast, remainder = p.to(COMPUTE), k.to(COMPUTE)
        nearest = (upcast + remainder * (1.0 - 2.0**-12)).to(p.dtype).to(COMPUTE)
        return tl.where(nearest == upcast, upcast + remainder, upcast)
    else:
        return p.to(COMPUTE)


@triton.jit
def encoded_parameter(x, words, PARAMETER: tl.constexpr, COMPENSATION: tl.constexpr):
    """Return p and k that represent x: `core.compensation.store`. Without compensation k is p and must not be stored.

    words: random bits, or None if x is not rounded stochastically.
    """
    if COMPENSATION == "split" or COMPENSATION == "split8":
        if COMPENSATION == "split8":
            x = without_low_bits(x, words, 8)
        bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) & -0x10000
        p, remainder = (high >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bits - high
        if COMPENSATION == "split8":
            return p, (remainder >> 8).to(tl.int8)
        else:
            return p, remainder.to(tl.int16)
    elif COMPENSATION == "kahan":
        p = x.to(PARAMETER)
        rounded = p.to(x.dtype)
        finite = tl.abs(rounded) < float("inf")
        return p, (tl.where(finite, x, 0.0) - tl.where(finite, rounded, 0.0)).to(PARAMETER)
    else:
        if COMPENSATION == "stochastic":
            x = stochastically_rounded(x, words, PARAMETER)
        p = x.to(PARAMETER)
        return p, p
