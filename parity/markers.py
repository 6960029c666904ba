"""The section "marker": the norms that markers report, and the uses that they refuse.

In PyTorch a released gradient leaves a marker in `.grad` until step(). For a step whose gradients are given:

    norms told            the 2-norm of each gradient, and of all of them as `clip_grad_norm_` reports it, unclipped
    norms told, after it  the same when everything of `USES` was tried; of a scaled loss unscaled by then
    uses refused          which of `USES` raise `RefusedError`
    markers left          after step()
    bits after it         parameters and state, against a run in which nobody looked at a gradient

Under JAX no gradient can be looked at between its computation and its use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..core.dtypes import compute_dtype
from ..core.errors import RefusedError
from ..core.rules import Rule
from .backends.calls import FAILURES, reason
from .backends.protocol import Backend
from .bounds import SIDES, Bound, spacing, unit_roundoff
from .compare import Finding, Refusal, against, failed, identical
from .events import Backward, Discard, EventCase, EventSequence
from .events.recorded import SHAPES
from .events.section import DTYPES
from .events.sequences import LOSS_SCALE
from .events.torch_release import TorchEvents
from .progress import Progress, each
from .rules import FAMILY

STEPS = 2
MAX_NORM = 1.0  # of gradients with a norm of about 2
PASS = Backward(last=True)

_BOTH = (PASS, Discard()) * STEPS
WAYS = {
    "release": EventSequence("release", _BOTH),
    "hold": EventSequence("hold", _BOTH, accumulation="hold", last_known=True),
    "clip": EventSequence("clip", _BOTH, max_norm=MAX_NORM),
    "clip-each": EventSequence("clip-each", _BOTH, max_norm=MAX_NORM, clips_each=True),
    "scale": EventSequence("scale", _BOTH, loss_scale=LOSS_SCALE),
}
"""Of releasing a gradient, by the name that the cases have."""


@dataclasses.dataclass(frozen=True)
class MarkerCase:
    """One way of release for one rule and dtype."""

    way: str
    rule: Rule
    dtype: str

    @property
    def name(self) -> str:
        """marker/way/rule/dtype."""
        return f"marker/{self.way}/{self.rule.name}/{self.dtype}"

    @property
    def events(self) -> EventCase:
        """The parameters and gradients of `STEPS` steps."""
        return EventCase(WAYS[self.way], self.rule, self.dtype)


@runtime_checkable
class LeavesMarkers(Protocol):
    """A backend whose markers can be checked."""

    def refuses_markers(self, case: MarkerCase) -> str | None:
        """Return why it does not run this case, or None if it does."""
        ...

    def start_markers(self, case: MarkerCase) -> TorchMarkers:
        """A new run."""
        ...


class TorchMarkers(TorchEvents):
    """Event sequences on a torch backend that look at `.grad` before step()."""

    def gradients(self) -> list[Any]:
        """Return the `.grad` of every parameter."""
        return [parameter.grad for parameter in self.parameters.values()]

    def norms(self) -> np.ndarray:
        """The norm of each gradient, and of all together."""
        from torch.nn.utils import clip_grad_norm_

        told = [gradient.norm() for gradient in self.gradients()]
        return np.array([*map(float, told), float(clip_grad_norm_(self.parameters.values(), np.inf))])

    def refuses(self, use: Callable[[TorchMarkers], Any]) -> bool:
        """Whether a use raises `RefusedError`."""
        try:
            use(self)
        except RefusedError:
            return True
        return False

    def left(self) -> int:
        """Return the number of parameters whose `.grad` is not None."""
        return sum(gradient is not None for gradient in self.gradients())


def _clip(norm: float) -> Callable[[TorchMarkers], Any]:
    def use(run: TorchMarkers) -> Any:
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(run.parameters.values(), norm)

    return use


def _backward_again(run: TorchMarkers) -> None:
    try:
        run.run(PASS)
    finally:
        run.passes -= 1


def _step_of_another(run: TorchMarkers) -> None:
    import torch

    torch.optim.SGD(run.parameters.values(), lr=1.0).step()


USES: Mapping[str, tuple[Callable[[TorchMarkers], Any], Callable[[str], bool]]] = {
    "times one": (lambda run: [gradient.mul_(1.0) for gradient in run.gradients()], lambda way: False),
    "clipped above its norm": (_clip(1e6), lambda way: False),
    "clipped as declared": (_clip(MAX_NORM), lambda way: way != "clip"),
    "unscaled": (lambda run: run.scaler.unscale_(run.optimizer) if run.scaler else None, lambda way: False),
    "clipped otherwise": (_clip(MAX_NORM / 4), lambda way: True),
    "times a half": (lambda run: run.gradients()[0].mul_(0.5), lambda way: True),
    "added to": (lambda run: run.gradients()[0].add_(1.0), lambda way: True),
    "a tensor added": (lambda run: run.gradients()[0].add_(next(iter(run.parameters.values())).detach()), lambda way: True),
    "copied": (lambda run: run.gradients()[0].clone(), lambda way: True),
    "its largest element": (lambda run: run.gradients()[0].norm(np.inf), lambda way: True),
    "another optimizer": (_step_of_another, lambda way: True),
    "a second backward": (_backward_again, lambda way: True),
}
"""What is done with gradients after backward(), by name: how, and whether it is refused under a way of release."""


class Markers:
    """The section "marker" of the suite."""

    name = "marker"
    title = "What a released gradient tells of its norm, and which uses of it are refused"

    def cases(self, *, quick: bool) -> list[MarkerCase]:
        """Every way for Adam and its relatives, in every dtype; in a quick run for one pair each, that take turns.

        A marker does not depend on the rule.
        """
        pairs = [(rule, dtype) for dtype in DTYPES for rule in FAMILY.values()]
        if quick:
            return [MarkerCase(way, *pairs[2 * number]) for number, way in enumerate(WAYS)]
        return [MarkerCase(way, *pair) for way in WAYS for pair in pairs]

    def run(
        self, backends: Sequence[Backend], cases: Sequence[MarkerCase], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        yield from each(cases, backends, progress, run_case)


def run_case(backend: Backend, case: MarkerCase) -> list[Finding]:
    """Run one case on one backend. An error becomes a broken row."""
    if not isinstance(backend, LeavesMarkers):
        return [Refusal(case.name, backend.name, "its released gradients cannot be seen (`parity.markers.LeavesMarkers`)")]
    why = reason(backend, "refuses_markers", case)
    if why is not None:
        return [Refusal(case.name, backend.name, why)]
    found: list[Finding] = []
    at = "start_markers()"
    try:
        looked, other = backend.start_markers(case), backend.start_markers(case)
        for step in range(1, STEPS + 1):
            at = f"step {step}"
            found += _step(backend.name, case, step, looked)
            other.run(PASS)
            other.step()
            for run in (looked, other):
                run.run(Discard())
            found.append(identical(case.name, backend.name, step, "bits after it", _bits(looked), _bits(other)))
    except FAILURES as error:
        found.append(failed(case.name, backend.name, STEPS, error, "norms told", at=at))
    return found


def _step(backend: str, case: MarkerCase, step: int, run: TorchMarkers) -> Iterator[Finding]:
    run.run(PASS)
    scale = case.events.sequence.loss_scale or 1.0
    yield _norms(backend, case, step, "norms told", run.norms(), scale)
    refused = [run.refuses(use) for use, _ in USES.values()]
    expected = [refuses(case.way) for _, refuses in USES.values()]
    row = identical(case.name, backend, step, "uses refused", *(np.asarray(each, np.int8) for each in (refused, expected)))
    wrong = [name for name, one, other in zip(USES, refused, expected, strict=True) if one is not other]
    yield dataclasses.replace(row, data={"wrong": wrong})
    yield _norms(backend, case, step, "norms told, after it", run.norms(), 1.0)
    run.step()
    yield identical(case.name, backend, step, "markers left", np.array([run.left()]), np.array([0]))


def _norms(backend: str, case: MarkerCase, step: int, quantity: str, told: np.ndarray, scale: float) -> Finding:
    """Norms against those in float64.

    Roundings: those of n squares and their sum, halved by the root; the root, one of the result, and for all together four
    more of a sum and its root.
    """
    gradients = [np.asarray(uses[0], np.float64) for uses in case.events.gradients(step - 1, PASS).values()]
    squares = [float(np.sum(gradient**2)) for gradient in gradients]
    true = scale * np.sqrt([*squares, sum(squares)])
    compute = compute_dtype(case.dtype)
    count = max(gradient.size for gradient in gradients) + len(SHAPES)
    allowed = SIDES[compute] * unit_roundoff(compute) * (count / 2.0 + 8.0) * true
    bound = Bound(float(np.linalg.norm(allowed)), allowed)
    return against(case.name, backend, step, quantity, told, true, bound, lambda value: spacing(compute, value))


def _bits(run: TorchMarkers) -> np.ndarray:
    held = [array for tensor in run.held().values() for array in tensor.arrays().values()]
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in held])
