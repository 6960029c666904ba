"""The table of combinations of options: exact, approximate, or refused with a remedy.

`release_gradients` of the PyTorch frontend consults `verdict`, the documentation's table is generated from `table`, and a test
visits every cell. `microbatch_blocks` is not an axis: it gives every parameter one gradient a backward, like any other model.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator

from .errors import RefusedError


class Kind(enum.Enum):
    """How a combination relates to the plain optimizer."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    REFUSED = "refused"


AXES: dict[str, tuple[str, ...]] = {
    "clipping": ("none", "global_norm", "per_tensor"),
    "loss_scaling": ("none", "dynamic"),
    "accumulation": ("none", "hold", "state"),
    "communication": ("local", "process_group", "ddp", "fsdp2"),
    "compensation": ("none", "kahan", "split", "split8", "stochastic"),
    "states": ("plain", "stochastic", "8bit"),  # how fields are stored: in a dtype, rounded stochastically or not, or coded
    "backend": ("eager", "compiled", "triton"),
    "rule": ("squares", "linear", "gradient"),  # `Rule.accumulation`
}


@dataclasses.dataclass(frozen=True)
class Combination:
    """One cell: a value of every axis of `AXES`."""

    clipping: str = "none"
    loss_scaling: str = "none"
    accumulation: str = "none"
    communication: str = "local"
    compensation: str = "none"
    states: str = "plain"
    backend: str = "eager"
    rule: str = "squares"

    def __post_init__(self) -> None:
        for axis, values in AXES.items():
            if getattr(self, axis) not in values:
                raise ValueError(f"{axis}={getattr(self, axis)!r} is not a value of this axis; it has {', '.join(values)}")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The kind of a combination, and the reason; for a refused one, `why` ends with the remedy."""

    kind: Kind
    why: str


@dataclasses.dataclass(frozen=True)
class Clause:
    """A verdict and the combinations to which it applies. The first clause that applies decides."""

    applies: Callable[[Combination], bool]
    verdict: Verdict


def _refused(why: str, applies: Callable[[Combination], bool]) -> Clause:
    return Clause(applies, Verdict(Kind.REFUSED, why))


CLAUSES: tuple[Clause, ...] = (
    _refused(
        "accumulation='state' puts micro-batches into the optimizer's state, and this rule's step needs the whole gradient "
        "besides its state, or it keeps none (SGD without momentum); use accumulation='hold' or microbatch_blocks, or SGD with "
        "momentum, or Muon, without nesterov.",
        lambda c: c.accumulation == "state" and c.rule == "gradient",
    ),
    _refused(
        "accumulation='state' puts a micro-batch into the moments before the norm of the whole gradient is known; use "
        "accumulation='hold' or microbatch_blocks with max_norm, or StableAdamW, which needs no clipping.",
        lambda c: c.accumulation == "state" and c.clipping == "global_norm",
    ),
    _refused(
        "accumulation='state' puts a micro-batch into the moments before an overflow of a later one is known; use "
        "accumulation='hold' with a scaler, or bfloat16, which needs no loss scaling.",
        lambda c: c.accumulation == "state" and c.loss_scaling == "dynamic",
    ),
    _refused(
        "a second backward through DistributedDataParallel is not averaged, so the two passes of guard() are not exact; use "
        "the plain module (release_gradients averages its gradients by itself), fully_shard, or accumulation='hold'.",
        lambda c: (
            c.communication == "ddp"
            and c.accumulation == "none"
            and (c.clipping == "global_norm" or c.loss_scaling == "dynamic")
        ),
    ),
    Clause(
        lambda c: c.accumulation == "state" and c.rule == "linear" and c.clipping == "none" and c.states == "8bit",
        Verdict(
            Kind.APPROXIMATE,
            "the momentum is linear in the gradient, but in 8 bits it is rounded once a micro-batch; exact with "
            "state_dtype=torch.float32.",
        ),
    ),
    Clause(
        lambda c: c.accumulation == "state" and c.rule == "linear" and c.clipping == "none",
        Verdict(
            Kind.EXACT,
            "the momentum is linear in the gradient: micro-batches go straight into it, and the step is that of their sum, in "
            "another order. A momentum of a low precision is rounded once a micro-batch; state_dtype=torch.float32 avoids it.",
        ),
    ),
    Clause(
        lambda c: c.accumulation == "state" and c.rule == "linear",
        Verdict(
            Kind.APPROXIMATE,
            "each micro-batch's gradient is clipped by its own norm before it goes into the momentum: exact with one of them.",
        ),
    ),
    Clause(
        lambda c: c.accumulation == "state",
        Verdict(
            Kind.APPROXIMATE,
            "micro-batch gradients are squared one by one (AdamA): exact with one micro-batch (moments of a low precision are "
            "rounded before the step unless sync= names it as the last), otherwise v gets the squares of K shares g/K: with "
            "AdamW a step is as long as with 'hold' where they are noise (2.3e-3 for 2.3e-3), and sqrt(K) times as long where "
            "they agree (2.0e-2 for 1.0e-2 with K = 4); StableAdamW's mean square is not the batch gradient's.",
        ),
    ),
    Clause(
        lambda c: c.loss_scaling == "dynamic" and c.accumulation == "none",
        Verdict(
            Kind.EXACT,
            "guard() runs the backward twice: the first pass looks for overflow and measures the norm, the second updates "
            "with the unscaled and clipped gradient; on an overflow there is no second, and nothing changes.",
        ),
    ),
    Clause(
        lambda c: c.loss_scaling == "dynamic",
        Verdict(
            Kind.EXACT,
            "the scaler unscales the held gradients and judges them, as without release; step() clips and uses them. Over a "
            "process group they are averaged before that: sync= says in which backward.",
        ),
    ),
    Clause(
        lambda c: c.clipping == "per_tensor",
        Verdict(
            Kind.EXACT,
            "each gradient is clipped by its own norm, as a loop over the parameters would do before step().",
        ),
    ),
    Clause(
        lambda c: c.clipping == "global_norm" and c.accumulation == "none",
        Verdict(
            Kind.EXACT,
            "guard() runs the backward twice: the first pass measures the norm, the second updates with the clipped gradient.",
        ),
    ),
    Clause(
        lambda c: c.clipping == "global_norm",
        Verdict(Kind.EXACT, "the held gradients are clipped by their global norm in step(), and released one after another."),
    ),
    Clause(
        lambda c: c.accumulation == "hold",
        Verdict(Kind.EXACT, "gradients add up as they do without release; the last micro-batch's backward releases them."),
    ),
    Clause(
        lambda c: c.communication == "process_group",
        Verdict(
            Kind.EXACT,
            "gradients are averaged one by one, in an order that all ranks keep, two of them under way: the numbers of "
            "DistributedDataParallel, with two ranks bit for bit (more are summed in another order).",
        ),
    ),
    Clause(
        lambda c: c.communication == "ddp",
        Verdict(
            Kind.EXACT,
            "the same numbers as DistributedDataParallel without release, bit for bit. It keeps its buckets, which are as "
            "large as all gradients together, and only `.grad` is freed; the plain module needs no buckets.",
        ),
    ),
    Clause(
        lambda c: c.communication == "fsdp2",
        Verdict(
            Kind.EXACT,
            "the same numbers as fully_shard without release, bit for bit: one parameter group's gradients are alive. "
            "StableAdamW's mean square is summed over shards, within 1e-6 of one process.",
        ),
    ),
    Clause(lambda c: True, Verdict(Kind.EXACT, "the same numbers as the optimizer without release, bit for bit.")),
)


def verdict(combination: Combination) -> Verdict:
    """Return the verdict of one combination."""
    return next(clause.verdict for clause in CLAUSES if clause.applies(combination))


def require(combination: Combination) -> Verdict:
    """Return the verdict of a combination that is exact or approximate.

    Raises:
        RefusedError: the combination is refused; the text says why and names the remedy.
    """
    found = verdict(combination)
    if found.kind is Kind.REFUSED:
        raise RefusedError(found.why)
    return found


def table() -> Iterator[tuple[Combination, Verdict]]:
    """Yield every cell with its verdict."""
    for values in itertools.product(*AXES.values()):
        combination = Combination(**dict(zip(AXES, values, strict=True)))
        yield combination, verdict(combination)
