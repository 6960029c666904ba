"""The truth of an event case: which gradients are used, and the result of the float64 reference.

What the reference has no word for is translated here, without a look at `core.release`: gradients that wait add up and are
used in one piece, those that must not be used are left out, a clipped gradient is multiplied by its factor in float64. What
remains are micro-batches of single tensors, which the reference runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ...core.array_ops import numpy_dtype
from ...core.dtypes import compute_dtype
from ...core.reference import Gradient, Reference
from ..bounds import SIDES, Bound, spacing, unit_roundoff
from ..propagation import Point
from ..rules import held_by, settings_of
from .bounds import TensorErrors
from .recorded import SHAPES, Backward, Discard, EventCase, LearningRate, Step


@dataclasses.dataclass(frozen=True)
class EventTruth:
    """The expected numbers after the last event.

    values, bounds: of "parameter" and the rule's fields; flat float64 arrays over all tensors.
    updates: how many each tensor has had.
    live_bytes: of gradient, after each event.
    """

    values: Mapping[str, np.ndarray]
    bounds: Mapping[str, Bound]
    updates: Mapping[str, int]
    live_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Used:
    """A gradient as the moments get it, and what a backend may be off by when it has it in its hands (float64 arrays)."""

    value: np.ndarray
    error: np.ndarray


Micro = dict[str, list[Used]]
"""Of every tensor what the moments get in one step, micro-batch by micro-batch."""


def truth(case: EventCase, norm_eps: float = 0.0) -> EventTruth:
    """Return the expected outcome of a case.

    Args:
        norm_eps: what clipping adds to the norm before it divides by it; 0 by the definition of clipping.
    """
    reference = Reference(settings_of(case.rule, case.hyperparameters(), "state"), case.initial_parameters())
    errors = {name: TensorErrors(case, name) for name in SHAPES}
    for rate, passes, stepped in case.sequence.groups():
        reference.settings.lr = rate
        for name, micro in used_in_step(case, passes, stepped, norm_eps).items():
            _update(case, reference, name, micro, errors[name], rate)
    held = {name: held_by(case.rule, case.hyperparameters(), tensor) for name, tensor in reference.tensors.items()}
    quantities, flatten = list(next(iter(held.values()))), case.problem().flatten
    return EventTruth(
        {quantity: flatten({name: values[quantity] for name, values in held.items()}) for quantity in quantities},
        {quantity: _joined([errors[name].errors[quantity].bound() for name in SHAPES]) for quantity in quantities},
        {name: tensor.t for name, tensor in reference.tensors.items()},
        tuple(live_bytes(case)),
    )


def used_in_step(case: EventCase, passes: list[tuple[int, Backward]], stepped: bool, norm_eps: float) -> Micro:
    """Return the gradients that enter each tensor's moments in one step."""
    sequence = case.sequence
    waiting: dict[str, list[np.ndarray]] = {}
    used: dict[str, list[list[np.ndarray]]] = {}  # every element: the gradients that were added up
    begun = False  # some tensor was updated, or has micro-batches in its moments

    def finite(name: str) -> bool:
        return bool(np.isfinite(sum(waiting[name])).all())

    for number, event in passes:
        for name, gradients in case.gradients(number, event).items():
            waiting.setdefault(name, []).extend(np.asarray(gradient, np.float64) for gradient in gradients)
            last = sequence.is_last(event)
            if event.paused or not (last or sequence.accumulation == "state"):
                continue
            usable = not sequence.skips or finite(name)
            begun = begun or last or usable
            if usable:
                used.setdefault(name, []).append(waiting[name])
            del waiting[name]
    if stepped:
        together = not begun
        usable_names = [name for name in waiting if not sequence.skips or finite(name)]
        if not (sequence.skips and together and len(usable_names) < len(waiting)):
            for name in usable_names:
                used.setdefault(name, []).append(waiting[name])
    whole = {name: [_summed(case, gradients) for gradients in each] for name, each in used.items()}
    if sequence.loss_scale is not None and not all(np.isfinite(g.value).all() for each in whole.values() for g in each):
        return {}
    if sequence.max_norm is None:
        return whole
    parts = [{name: [each]} for name, used in whole.items() for each in used] if sequence.clips_each else [whole]
    clipped = [_clipped(case, part, sequence.max_norm, norm_eps) for part in parts]
    return {name: [used for part in clipped for used in part.get(name, [])] for name in whole}


def live_bytes(case: EventCase) -> list[int]:
    """Bytes of gradient alive after each event: of tensors whose gradient waits for another one, or for step()."""
    itemsize = numpy_dtype(case.dtype).itemsize
    waiting: set[str] = set()
    found = []
    for event in case.sequence.events:
        if isinstance(event, Step | Discard):
            waiting.clear()
        elif isinstance(event, Backward) and (
            event.paused or (case.sequence.accumulation == "hold" and not case.sequence.is_last(event))
        ):
            waiting |= set(event.tensors)
        elif isinstance(event, Backward):
            waiting -= set(event.tensors)
        else:
            assert isinstance(event, LearningRate)
        found.append(sum(int(np.prod(SHAPES[name], dtype=int)) * itemsize for name in waiting))
    return found


def _summed(case: EventCase, gradients: list[np.ndarray]) -> Used:
    """Gradients added up. A backend adds in their dtype, or in a higher one and rounds the sum: a rounding each, at most."""
    total, reach = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for gradient in gradients:
        total = total + gradient
        reach = np.maximum(reach, np.abs(total))
    if len(gradients) == 1:
        return Used(total, np.zeros_like(total))
    roundings = len(gradients) * SIDES[compute_dtype(case.dtype)]
    with np.errstate(invalid="ignore"):
        return Used(total, roundings * spacing(case.dtype, 2.0 * reach) / 2.0)


def _clipped(case: EventCase, whole: Micro, max_norm: float, norm_eps: float) -> Micro:
    r"""Times min(1, max_norm / (norm + norm_eps)).

    Roundings: of the factor those of n squares and their sum, halved by the root, a root and three more operations, all in
    the compute dtype; of its product with the gradient one in the gradient's dtype.
    """
    gradients = [gradient for each in whole.values() for gradient in each]
    count = sum(gradient.value.size for gradient in gradients)
    norm = float(np.sqrt(sum(np.sum(gradient.value**2) for gradient in gradients)))
    factor = min(1.0, max_norm / (norm + norm_eps)) if norm > 0.0 else 1.0
    compute = compute_dtype(case.dtype)
    of_factor = SIDES[compute] * unit_roundoff(compute) * ((count + 4) / 2.0 + 4.0)
    of_norm = float(np.sqrt(sum(np.sum(gradient.error**2) for gradient in gradients))) / norm if norm > 0.0 else 0.0

    def clipped(gradient: Used) -> Used:
        value = factor * gradient.value
        error = factor * gradient.error + (of_factor + of_norm) * np.abs(value)
        return Used(value, error + SIDES[compute] * spacing(case.dtype, np.abs(value) + error) / 2.0)

    return {name: [clipped(gradient) for gradient in each] for name, each in whole.items()}


def _update(case: EventCase, reference: Reference, name: str, used: list[Used], errors: TensorErrors, rate: float) -> None:
    """One update of one tensor: its micro-batches in the reference, and the roundings of each."""
    tensor, given = reference.tensors[name], case.hyperparameters(rate)
    step, points = tensor.t + 1, []

    def held(count: int) -> dict[str, np.ndarray]:
        return {name: value.reshape(-1) for name, value in held_by(case.rule, given, tensor, count).items()}

    after = held(tensor.t)
    for number, gradient in enumerate(used):
        before = after
        reference.run(Gradient(name, gradient.value, last=number == len(used) - 1))
        after = held(step)
        value, error = gradient.value.reshape(-1), gradient.error.reshape(-1)
        points.append(Point(step, given, value, before, after, error, first=number == 0))
    errors.advance(points)


def _joined(bounds: list[Bound]) -> Bound:
    """Join the arrays of several tensors."""
    return Bound(float(np.linalg.norm([each.norm for each in bounds])), np.concatenate([each.elements for each in bounds]))
