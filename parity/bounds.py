r"""The bounds: how far a correct implementation may be from the float64 reference. All of them are derived here.

**What is bounded.** For x, a number that a backend holds (a parameter with its compensation, a moment), and r, the
reference's, with e = x - r:

    relative error      ||e|| / ||r||, 2-norms over all elements of a case
    element ratio       max_i |e_i| / bound_i, a bound for every element; also told in units in the last place

**First-order propagation.** A backend computes what the reference computes, and rounds. Every rounding is a perturbation
rho; along the reference's trajectory the perturbations of a rule's fields f and of the parameter obey, to first order,

    df_t = A df_{t-1} + A_g dg + rho_f          e_t = e_{t-1} - eta*(D df_t + D_g dg) - d_eta*(...) + rho_x

A, A_g, D and D_g are the derivatives of the rule's own `accumulate` and `direction`, element by element: the two run on arrays
that carry them (`parity.tracked`), so that no rule has a line here. Of Adam's m, A = 1-c1; where two fields enter one
(Adan's previous gradient and its mean difference) the standard deviations of their errors are added, as they may depend on
each other. What is not linear in a step (root, quotient) is not linearised, as dv/v can be large (bfloat16, underflow): the
worst value over v-|dv| ... v+|dv| is taken.

A **sign** that the errors of its argument leave undecided (Lion: |beta1*m + (1-beta1)*g| within its own bound) may be another
one, which moves the parameter by 2*lr: so much is added linearly for each such element and step, and every one is counted
(`Bound.undecided`, and `undecided` in the report). A selection by a scalar (RAdam's rho > 5) is treated alike.

**Ranger's** way from its slow weights, a part of which comes back off the parameter in every k-th step, is followed in the same
manner: `after_step` runs on arrays with errors, too. What its errors share with the parameter's is counted in both. **Muon's**
step is of a whole matrix; how far that may be off is derived in `parity.matrices`. **Codings**, which round by chance or to
codes, are compared one update at a time (`parity.codings`), so that their errors add up nowhere.

The factor 1 - eta*weight_decay of e_{t-1} is at most 1 and left out. An L2 term feeds e back through the gradient with the sign
that shrinks it (mean/rms increases with the mean; a momentum of it is overdamped where lr*weight_decay < (1-sqrt(momentum))^2),
and is left out, too. In the bounds of the fields themselves e does appear (`echo`). Spacings are taken where the perturbed
number may be, which can be the wider side of a power of two.

**Roundings of one step** (h: half a spacing of the rounded value in its dtype; u: unit roundoff of the compute dtype):

    fields  u of the result of each operation in `accumulate` (of m: g-m, its product with c1, the sum; of an L2 term two more),
            times its way into the field;  h of the state dtype, but no more than the field moves: it could have stayed
    eta     the sum of n squares, each one rounded (n + 4 roundings at most, whatever the order), halved by the root;
            lr/(1 + lr*decay), where decay is implicit: IMPLICIT = 3
    step    u of each operation in `direction`, a root being off by 2 u; decay product, sum, product with eta. At least
            ARITHMETIC = 8 of the step, as quotients and roots of some devices are off by more than a unit
    p       the sum with the increment (h of the compute dtype), and then
            none   h of p's dtype, but never more than the increment itself: p was representable, so it could stay
            split  nothing: the pair is the float32 number
            kahan  another of the compute dtype (reading p+k), and h of k, where |k| <= half a spacing of p. A kahan k in
                   bfloat16 has 8 bits, so that every step rounds p+k by up to 2^-17 of p's binade
    scalars lr, weight_decay in the compute dtype: u each, the same at every step, or DECAY_RATE = 3 u for weight_decay/max_lr
            on the device (two casts and the quotient). Those of `Rule.corrections` as a device computes them by itself:
            u of each operation, of an exponential 2 u (of c1: 1-beta, log(beta), its product with t, expm1, the quotient)
    betas   where they change, debiased fields times (1-b^t)/(1-b'^t), which multiplies their errors, too: 2*CORRECTION u of the
            ratio, one of the product; h of the state dtype, added linearly

**Underflow.** Below the smallest normal number N of a dtype its spacing is the smallest one, s: a number that is rounded there
is off by half of s, and by no fraction of itself. Sums are exact there. A product or quotient may be off by s/2 beyond its
rounding: for m the product with c1 and the L2 term's, for v g*g, the product with c2 and the L2 term's, for the step the
quotient, the decay product and the product with eta: PRODUCTS = 3 each, and as many times more as a rule has more than two
fields. Like any rounding of a moment they live on with the
factor 1-c, so that m of subnormal gradients is known to a few s. What is stored is off by half the spacing of its own dtype.

**Flushing to zero** is a case of its own (`flushes`): what a device flushes, as XLA does on a CPU, is lost where it is read or
written. So each operand and each result of m and v may be off by another N: g, m, g-m, its product, the sum, the cast to the
state dtype, and two more with an L2 term: FLUSHED = 8 (for v: g, g*g, g*g-v, the product, v, the sum, the cast, and the L2
term's; an error N of g is one of 2|g|N in g*g, which is below N or below a rounding), and more with more than two fields. Then
m/q by N/q, and a flushed v counts as an error N of v: q is off by sqrt(N) at most, for eps = 1e-8 less than a rounding.
A product c1*(g-m) may be
flushed for ever, so that m stays 0: of m and v below N nothing can be told on such a device. float16 moments keep their
subnormal numbers, whatever the device does in float32. Where nothing comes near N, these bounds serve every device.

**How roundings add up.** Worst case: sum of h (linear in the number of steps). But where the increments of a stored
number scatter over several spacings, their rounding errors are uniform in [-h, h] and independent (Widrow's quantisation
theorem: increments with standard deviation s leave a mean error of at most h*(2/pi)*exp(-2 (pi s/spacing)^2), if they are
normal). Such errors have variance h^2/3, a uniform variable is sub-Gaussian with just that variance, and they add up as
martingale differences, with the square root of the number of steps (Higham and Mary, 2019,
https://doi.org/10.1137/18M1226312). Each rounding of each element is judged for itself: it counts as independent where
the increment has lately changed by `INDEPENDENT_FROM` spacings a step in the mean (of a parameter, by INDEPENDENT_FROM/TYPICAL
in the geometric mean, too: one large change is not scatter of the small ones after it); otherwise it is added linearly, and so
are all roundings of a parameter whose steps are signs (Lion): few sizes of a step round alike again and again. So
float32 under noise is a random walk, while bfloat16 parameters, bfloat16 second moments (their increments are not normal,
and move them by one to three spacings) and everything under a constant gradient get the worst case. Errors of m and v act
on p for as long as they live: their standard deviations are added linearly over the steps (triangle inequality).

**Confidence.** Seeds are fixed; a bound is broken by chance with probability at most `RISK` a number:

    one element of n     lambda * sd,   lambda = sqrt(2 ln(2n/RISK))                    (sub-Gaussian tail, union bound)
    the 2-norm           sum sd^2 + 2 sqrt(L sum sd^4) + 2 L max sd^2,  L = ln(1/RISK)  (Hsu, Kakade and Zhang, 2012)

and never more than the worst case of the same roundings, which decides for few steps: after one step the bound is the
half spacing itself. The float64 reference rounds, too: for float64 cases every rounding counts twice, and the
reference's 1 - beta^t, which loses digits at small t, is added. It subtracts decay and step one after the other: two
sums, each judged by the scatter of its own increments (under a constant gradient the step is all but constant, and rounds
by the same amount again and again).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence

import numpy as np

RISK = 1e-9
INDEPENDENT_FROM = 4.0  # spacings
MEMORY = 0.9
TYPICAL = 64.0
ARITHMETIC = 8  # roundings in the increment of a parameter, at least
IMPLICIT = 3  # roundings in lr / (1 + lr*decay)
CORRECTION = 6  # roundings in a bias correction (1-beta)/(1-beta^t), at most
SIDES = {"float32": 1, "float64": 2}  # who rounds: in float64 the reference does, too
DECAY_RATE = 3  # roundings in weight_decay / max_lr, where it is computed on the device; one of weight_decay alone
PRODUCTS = 3  # products and quotients in a step that may be off by half the smallest spacing, for each of m, v and p
FLUSHED = 8  # numbers read or written in a step that may be flushed to zero, for each of m, v and p

PROMISES = (
    ("B/[!l]*/float32/*", 1.5e-6),
    ("decay/*adamw/bfloat16/split/*", 1e-3),
)
"""Relative errors of parameters that the project promises up to 2000 steps, by pattern of cases. Not derived: they hold,
too, where the derivation allows more. Not Lion's: steps of one size round alike."""

_TINY = 1e-300  # keeps the logarithm of 0 away

# digits of the significand, exponent of the smallest spacing
_FORMATS = {"float64": (53, -1074), "float32": (24, -149), "bfloat16": (8, -133), "float16": (11, -24)}


def promised(case_name: str) -> float:
    """The promised relative error of a case's parameters, or infinity."""
    return min((figure for pattern, figure in PROMISES if fnmatch.fnmatchcase(case_name, pattern)), default=math.inf)


def unit_roundoff(dtype: str) -> float:
    """Half the spacing of 1.0."""
    return 2.0 ** -_FORMATS[dtype][0]


def spacing(dtype: str, x: np.ndarray) -> np.ndarray:
    """The distance between neighbouring numbers of `dtype` around each element of x, as float64."""
    digits, lowest = _FORMATS[dtype]
    _, exponent = np.frexp(np.abs(x))
    return np.ldexp(1.0, np.maximum(exponent - digits, lowest))


def smallest_normal(dtype: str) -> float:
    """What is smaller than this may be flushed to zero."""
    digits, lowest = _FORMATS[dtype]
    return 2.0 ** (lowest + digits - 1)


def underflow(dtype: str, *, flushes: bool) -> float:
    """What the operations of one step, in the compute dtype, may be off by near zero beyond their roundings."""
    return FLUSHED * smallest_normal(dtype) if flushes else PRODUCTS * 2.0 ** _FORMATS[dtype][1] / 2.0


def reference_debiasing(beta: float | np.ndarray, step: int) -> float | np.ndarray:
    """The relative error of the reference's 1 - beta^t in float64, where the power may be off by a unit."""
    return 2.0 * unit_roundoff("float64") * beta**step / -np.expm1(step * np.log(beta))


def stored_spacing(dtype: str, compensation: str, x: np.ndarray) -> np.ndarray:
    """The distance between neighbouring numbers that a pair (p, k) can stand for, at least where k is largest."""
    if compensation == "split":
        return spacing("float32", x)
    if compensation == "kahan":
        return spacing(dtype, 0.499 * spacing(dtype, x))
    return spacing(dtype, x)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The largest permitted error of a quantity.

    norm: in the 2-norm over all elements. elements: for each element. undecided: how many signs and selections of a rule the
    errors so far leave open; `elements` has all of what each may change.
    """

    norm: float
    elements: np.ndarray
    undecided: int = 0


class Scatter:
    """How much the increment of a number changes from step to step, a mean over about 1/(1-MEMORY) steps.

    Args:
        typical: one large change among small ones is not scatter: the mean is never above TYPICAL times the geometric mean.
    """

    def __init__(self, *, typical: bool = False) -> None:
        self._typical = typical
        self._steps, self._weight = 0, 0.0
        self._last: np.ndarray | float = 0.0
        self._mean: np.ndarray | float = 0.0
        self._mean_log: np.ndarray | float = 0.0

    def after(self, increment: np.ndarray) -> np.ndarray:
        """The mean after one more step.

        0 at the first two steps: the first increment is the whole way from zero, which is not scatter.
        """
        self._steps += 1
        if self._steps > 2:
            self._weight = MEMORY * self._weight + 1.0 - MEMORY
            change = np.abs(increment - self._last)
            self._mean = MEMORY * self._mean + (1.0 - MEMORY) * change
            if self._typical:
                self._mean_log = MEMORY * self._mean_log + (1.0 - MEMORY) * np.log2(np.maximum(change, _TINY))
        self._last = increment
        weight = max(self._weight, 1.0 - MEMORY)
        mean = np.zeros_like(increment) + self._mean / weight
        return np.minimum(mean, TYPICAL * np.exp2(self._mean_log / weight)) if self._typical else mean


class RoundingErrors:
    """Sums of rounding errors of n elements, by the model of the module's docstring."""

    def __init__(self, n: int, *, typical: bool = False) -> None:
        self.variance = np.zeros(n)  # independent ones
        self.persistent = np.zeros(n)  # a standard deviation: random, but alive for many steps
        self.shared = np.zeros(n)  # a standard deviation: random, but the same for all elements of a tensor
        self.worst = np.zeros(n)  # the worst case of all the random ones
        self.linear = np.zeros(n)  # not random
        self.echo = np.zeros(n)  # of a moment: the parameter's own error, back through an L2 gradient
        self.passing: np.ndarray | float = 0.0  # of the last step only
        self._scatter = Scatter(typical=typical)

    @classmethod
    def joined(cls, parts: Sequence[RoundingErrors], order: np.ndarray) -> RoundingErrors:
        """Those of several groups of elements, put one after another and then in this order."""
        if len(parts) == 1:
            return parts[0]
        made = cls(order.size)
        for kind in ("variance", "persistent", "shared", "worst", "linear", "echo", "passing"):
            values = [np.broadcast_to(getattr(part, kind), part.linear.shape) for part in parts]
            setattr(made, kind, np.concatenate(values)[order])
        return made

    def forget(self, lost: np.ndarray) -> None:
        """Drop the errors of elements whose true number is not finite, and has no bound."""
        for errors in (self.variance, self.persistent, self.shared, self.worst, self.linear, self.echo):
            errors[lost] = 0.0

    def decay(self, factor: float | np.ndarray) -> None:
        """Multiply all errors so far by a factor, a number or one for each element."""
        self.variance *= factor**2
        self.worst *= factor
        self.linear *= factor
        self.echo *= factor

    def add(self, half: np.ndarray, independent: np.ndarray, count: int = 1) -> None:
        """Add `count` roundings of at most `half` each."""
        self.add_sums(count * half, count * half**2, independent)

    def add_sums(self, halves: np.ndarray, squares: np.ndarray, independent: np.ndarray) -> None:
        """More roundings: the sum of the most that each can be, and the sum of its squares."""
        random = np.where(independent, halves, 0.0)
        self.worst += random
        self.linear += halves
        self.linear -= random
        self.variance += np.where(independent, squares, 0.0) / 3.0

    def spread(self, increment: np.ndarray) -> np.ndarray:
        """Record how much the increments of the stored number scatter; called once a step."""
        return self._scatter.after(increment)

    def bound(self) -> Bound:
        """Return the bound on the sum."""
        variance, fixed = self.variance + self.persistent**2, self.linear + self.echo + self.passing
        risk = math.log(1.0 / RISK)
        shared = math.sqrt(2.0 * math.log(2.0 / RISK)) * self.shared
        element = math.sqrt(2.0 * math.log(2.0 * variance.size / RISK))
        elements = np.minimum(element * np.sqrt(variance) + shared, self.worst) + fixed
        squared = variance.sum() + 2.0 * math.sqrt(risk * np.sum(variance**2)) + 2.0 * risk * variance.max()
        norm = min(math.sqrt(squared) + np.linalg.norm(shared), np.linalg.norm(self.worst))
        return Bound(float(norm + np.linalg.norm(fixed)), elements)
