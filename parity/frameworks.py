"""The section "frameworks": compares PyTorch with JAX; arrays are passed through DLPack.

The same updates run on the backends "eager" and "jax". Arrays go to the other framework without a copy, where both
have them on one device; what arrives must have the sender's bits. Then the numbers are compared: by the triangle inequality
they may differ by as much as both bounds against float64 allow together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.compensation import resolve
from ..core.dtypes import PARAMETER_DTYPES
from .backends.calls import FAILURES
from .backends.jax_arguments import float64
from .backends.protocol import Backend, Held, converted
from .backends.torch_arguments import to_numpy
from .bounds import Bound
from .cases import Case, Problem, Storage
from .compare import Finding, Refusal, Row, differing, differing_elements, failed_from, identical, numbers, rows
from .progress import Progress
from .rules import FAMILY, rules_and_dtypes
from .settings import named
from .truth import Truth, truths

TORCH, JAX = "eager", "jax"
SETTING, QUICK_SETTING = named("shapes"), named("B")
"""Tensors of odd shapes, 0-d and zero-size among them; in a quick run the matrix whose programs are compiled already."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A case that both frameworks run: with the default compensation and state dtypes."""

    case: Case

    @property
    def name(self) -> str:
        """frameworks/rule/dtype."""
        return f"frameworks/{self.case.problem.rule.name}/{self.case.problem.dtype}"


class Frameworks:
    """The section "frameworks" of the suite."""

    name = "frameworks"
    title = "PyTorch and JAX against each other, arrays handed over through DLPack"

    def cases(self, *, quick: bool) -> Sequence[Pair]:
        setting = QUICK_SETTING if quick else SETTING
        return [
            Pair(Case(Problem(setting, rule, dtype), Storage(resolve("auto", dtype), None)))
            for rule, dtype in rules_and_dtypes(PARAMETER_DTYPES)
            if rule.name in FAMILY or not quick
        ]

    def run(
        self, backends: Sequence[Backend], cases: Sequence[Pair], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        chosen = {backend.name: backend for backend in backends}
        for pair in cases:
            progress(pair.name, "reference")
            missing = [name for name in (TORCH, JAX) if name not in chosen]
            if missing:
                progress(pair.name, JAX)
                for name in chosen.keys() & {TORCH, JAX}:
                    yield Refusal(pair.name, name, f"it is compared with {missing[0]}, which does not run")
                continue
            truth = truths(pair.case.problem, [pair.case.storage], steps)
            progress(pair.name, JAX)
            yield from run_pair(pair, chosen[TORCH], chosen[JAX], truth)


def run_pair(pair: Pair, torch_backend: Backend, jax_backend: Backend, truth: Mapping[int, Truth]) -> list[Finding]:
    """Run one case in both frameworks. An error becomes a broken row, and the suite continues."""
    found: list[Finding] = []
    step = 0
    try:
        reason = why_dlpack_fails()
        if reason is not None:
            found.append(Refusal(pair.name, JAX, f"arrays were compared through the host, as DLPack cannot cross: {reason}"))
        one, other = torch_backend.start(pair.case), jax_backend.start(pair.case)
        for step in range(1, max(truth) + 1):
            for running in (one, other):
                running.step(pair.case.problem.gradients(step))
            if step in truth:
                found += _rows(pair, step, one, other, truth[step], crosses=reason is None)
    except FAILURES as error:
        found += failed_from(pair.name, JAX, truth, found, error, at=f"step {step}")
    return found


def why_dlpack_fails() -> str | None:
    """Return why arrays cannot be passed between the frameworks without a copy, or None."""
    import jax
    import torch
    from torch.utils import dlpack

    try:
        dlpack.from_dlpack(jax.numpy.zeros(1))
        jax.dlpack.from_dlpack(torch.zeros(1))
    except (RuntimeError, BufferError) as error:  # they are on different devices
        return f"{type(error).__name__}: {error}"
    return None


def _rows(pair: Pair, step: int, torch_run: Any, jax_run: Any, truth: Truth, *, crosses: bool) -> Iterator[Row]:
    problem, storage = pair.case.problem, pair.case.storage
    held_by_torch, held_by_jax = torch_run.held(), jax_run.held()
    to_torch = held_by_jax
    if crosses:
        with float64():  # or JAX would narrow what comes
            to_torch, to_jax = _handed_to_torch(jax_run.arrays()), _handed_to_jax(torch_run.arrays())
        yield identical(pair.name, TORCH, step, "JAX's arrays in PyTorch", _bits(to_torch), _bits(held_by_jax))
        yield identical(pair.name, JAX, step, "PyTorch's tensors in JAX", _bits(to_jax), _bits(held_by_torch))
    twice = {quantity: Bound(2.0 * bound.norm, 2.0 * bound.elements) for quantity, bound in truth.bounds[storage].items()}
    of_jax = Truth(step, numbers(problem, to_torch), {storage: twice}, {storage: twice})
    yield from rows(pair.case, JAX, held_by_torch, of_jax, name=pair.name)
    stored = [(held_by_torch[name].parameter.reshape(-1), to_torch[name].parameter.reshape(-1)) for name in to_torch]
    count = sum(differing_elements(*both) for both in stored)
    yield differing(pair.name, JAX, TORCH, step, "parameter", count, problem.setting.element_count)


def _handed_to_torch(arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, Held]:
    from torch.utils import dlpack

    return {name: converted(fields, lambda array: to_numpy(dlpack.from_dlpack(array))) for name, fields in arrays.items()}


def _handed_to_jax(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Held]:
    from jax import dlpack

    return {name: converted(fields, lambda tensor: np.array(dlpack.from_dlpack(tensor))) for name, fields in tensors.items()}


def _bits(held: Mapping[str, Held]) -> np.ndarray:
    """Return the bytes of all arrays, one after the other."""
    arrays = [array for tensor in held.values() for array in tensor.arrays().values()]
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
