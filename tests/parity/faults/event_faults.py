"""Faults in gradient release: the policies, clipping and scaling, the ledger, markers, resumed runs, and trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.parity.events import Backward, Discard, LearningRate, Step
from penstock.parity.events.recorded import WEIGHT_DECAY
from penstock.parity.events.sequences import LOSS_SCALE, MICRO_BATCHES
from penstock.parity.markers import USES

from .injection import (
    Fault,
    Gradients,
    Wrong,
    another_case,
    before_step,
    change_kept,
    multiplied,
    parameters,
    put,
    scaled,
    sequence,
    tampered,
    with_gradients,
)


def instead_of(kind: type, *other: Any) -> Wrong:
    """Events of a kind replaced by others."""

    def wrong(run: Any, correct: Callable[[Any], None], event: Any) -> None:
        for each in other if isinstance(event, kind) else (event,):
            correct(each)

    return tampered(run=wrong)


def at_later_micro_batches(do: Callable[[Any], None]) -> Wrong:
    """Something is done before every micro-batch of a step but its first."""

    def wrong(run: Any, correct: Callable[[Any], None], event: Any) -> None:
        if isinstance(event, Backward) and getattr(run, "begun", False):
            do(run)
        correct(event)
        run.begun = isinstance(event, Backward)

    return tampered(run=wrong)


def after_event(kind: type, do: Callable[[Any, Any], None]) -> Wrong:
    """Something is done after events of a kind; it gets the parameters before them, too."""

    def wrong(run: Any, correct: Callable[[Any], None], event: Any) -> None:
        before = parameters(run)
        correct(event)
        if isinstance(event, kind):
            do(run, before)

    return tampered(run=wrong)


def l2_in_gradient(*, all_passes: bool, scale: float = 1.0) -> Wrong:
    """weight_decay*p added to gradients: of all passes, and then nowhere else, or of later micro-batches once more."""

    def wrong(run: Any, correct: Callable[[Any], None], event: Any) -> None:
        right, decay = run.case, parameters(run)
        if isinstance(event, Backward) and (all_passes or getattr(run, "begun", False)):

            def added(event: Any, given: Gradients) -> Gradients:
                return {n: [np.asarray(use + WEIGHT_DECAY / scale * decay[n], use.dtype) for use in given[n]] for n in given}

            run.case = with_gradients(right, added)
        if all_passes:
            run.optimizer.param_groups[0]["weight_decay"] = 0.0
        correct(event)
        run.case, run.begun = right, isinstance(event, Backward)

    return tampered(run=wrong)


def _decay_moments(run: Any) -> None:
    change_kept(run, "exp_avg", lambda m: m * 0.9)
    change_kept(run, "exp_avg_sq", lambda v: v * 0.999)


def _count(run: Any, *_: Any) -> None:
    if hasattr(run, "counts"):
        run.counts = {name: count + 1 for name, count in run.counts.items()}
    else:
        change_kept(run, "step", lambda step: step + 1)


def _count_skipped(run: Any, before: Any) -> None:
    after = parameters(run)
    if all(np.array_equal(after[name], before[name]) for name in before):
        _count(run)


def _smaller_step(run: Any, before: Any) -> None:
    after = parameters(run)
    for name in before:
        put(run, name, before[name] + 0.95 * (after[name] - before[name]))


def _zeros_for_nonfinite(event: Any, given: Gradients) -> Gradients:
    return multiplied(
        {n: [np.nan_to_num(use, posinf=0.0) for use in given[n]] for n in given}, lambda n: n not in event.nonfinite
    )


def norm(given: Gradients, *left_out: str) -> float:
    uses = [np.asarray(use, np.float64) for name in given if name not in left_out for use in given[name]]
    return float(np.sqrt(sum(np.sum(use**2) for use in uses)))


def _each_by_its_own_norm(case: Any) -> Any:
    case = dataclasses.replace(case, sequence=dataclasses.replace(case.sequence, max_norm=None))
    return with_gradients(case, lambda event, given: multiplied(given, lambda n: min(1.0, 1.0 / norm({n: given[n]}))))


def _used_twice(run: Any, correct: Callable[[Any], None], event: Any) -> None:
    if isinstance(event, Backward):
        correct(dataclasses.replace(event, tensors=("matrix",)))
        correct(Step())
        run.passes -= 1
    correct(event)


def _each_micro_batch_a_step(run: Any, correct: Callable[[Any], None], event: Any) -> None:
    waiting = run.waiting if isinstance(event, Step) else []
    for each in waiting:
        run.waiting = [each]
        correct(event)
    if not waiting:
        correct(event)


def _gradients_kept(start: Callable[[Any], Any], case: Any) -> Any:
    run, kept = start(case), []  # type: ignore[var-annotated]
    for parameter in run.parameters.values():
        parameter.register_hook(kept.append)
    return run


def _measured_with_gradients_kept(start: Callable[[Any], Any], case: Any) -> Any:
    kept: list[Any] = []
    handle = register_module_parameter_registration_hook(lambda module, name, p: p.register_hook(kept.append) and None)
    try:
        return start(case)
    finally:
        handle.remove()


def in_ledger(nbytes: int) -> Wrong:
    return tampered(live_bytes=lambda run, correct: (correct()[0], correct()[1] + nbytes))


def not_refused(name: str) -> Wrong:
    return tampered(refuses=lambda run, correct, use: correct(use) and use is not USES[name][0])


def after_load(do: Callable[[Any, Any], None], before: Callable[[Any], Any] = lambda run: None) -> Wrong:
    """Something is done after a run was loaded, with something that was kept from before."""

    def wrong(run: Any, correct: Callable[[bytes], None], saved: bytes) -> None:
        old = before(run)
        correct(saved)
        do(run, old)

    return tampered(load=wrong)


def _groups(run: Any) -> Any:
    return [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]


def _put_groups(run: Any, old: Any) -> None:
    for group, settings in zip(run.optimizer.param_groups, old, strict=True):
        group |= settings


def _moments(run: Any) -> Any:
    return {name: run.optimizer.state[p]["debiased_exp_avg"].clone() for name, p in run.parameters.items()}


def _put_moments(run: Any, old: Any) -> None:
    for name, value in old.items():
        change_kept(run, "exp_avg", lambda _, value=value: value, name)  # type: ignore[misc]


def _forget_the_count(run: Any, old: Any) -> None:
    run.counts = dict.fromkeys(run.counts, 0)


def _forget_skipped(run: Any, before: Any) -> None:
    after = parameters(run)
    if all(np.array_equal(after[name], before[name]) for name in before):
        change_kept(run, "exp_avg", lambda m: 0 * m)


class Noisy:
    """Another start for every run."""

    runs = 0

    def __call__(self, start: Callable[[Any], Any], case: Any) -> Any:
        run = start(case)
        self.runs += 1
        run.parameters["matrix"][0, 0] += self.runs
        return run


def _beta2(run: Any) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.9985)


def _moved_while_differentiated(run: Any, correct: Callable[[Any], None], batch: Any) -> None:
    """The gradient is taken where an update has moved the layers already, by about a step."""

    def moved(params: Any, by: Any) -> Any:
        return {**params, "layers": jax.tree.map(jnp.add, params["layers"], by)}

    by = jax.tree.map(lambda leaf: 1e-3 * jnp.sign(leaf), run.state.params["layers"])
    run.state = run.state._replace(params=moved(run.state.params, by))
    correct(batch)
    run.state = run.state._replace(params=moved(run.state.params, jax.tree.map(jnp.negative, by)))


RELEASE, HOLD, STATE = (f"events/{name}/adamw/float32" for name in ("release", "hold", "state"))
CLIP, CLIP_JAX = "events/clip/stable_adamw/float32", "events/clip/stable_adamw/bfloat16"
NOT_CLIPPED, HARDLY_CLIPPED = sequence(max_norm=None), sequence(max_norm=1e6)
L2_LATER = l2_in_gradient(all_passes=False)
MOMENTS_DECAYED, COUNTED = at_later_micro_batches(_decay_moments), at_later_micro_batches(_count)

FAULTS = [
    # micro-batches
    Fault("moments decayed by every micro-batch", STATE, "numpy", MOMENTS_DECAYED),
    Fault("moments decayed by every micro-batch, in short steps", "events/short-state/adamw/float32", "numpy", MOMENTS_DECAYED),
    Fault("moments decayed by every micro-batch", "events/state-last-known/adamw/float32", "eager", MOMENTS_DECAYED),
    Fault(
        "moments decayed by every micro-batch",
        "events/state/stable_adamw/float32",
        "walk",
        tampered(run=_each_micro_batch_a_step),
    ),
    Fault("L2 added by every micro-batch", "events/state/adam/float32", "numpy", L2_LATER),
    Fault("L2 added by every micro-batch", "events/state/adam/float32", "eager", L2_LATER),
    Fault(
        "mean square of the last micro-batch only",
        "events/state/stable_adamw/float32",
        "numpy",
        at_later_micro_batches(lambda run: change_kept(run, "mean_square", lambda square: 0 * square)),
    ),
    Fault("step counted for every micro-batch", STATE, "numpy", COUNTED),
    Fault("step counted for every micro-batch", STATE, "eager", COUNTED),
    Fault("micro-batches summed instead of averaged", HOLD, "jax", scaled(lambda given: MICRO_BATCHES)),
    Fault("held gradient averaged instead of summed", "events/hold/adam/float32", "eager", scaled(lambda given: 0.25)),
    Fault("held gradient discarded at step()", HOLD, "eager", instead_of(Step, Discard())),
    Fault("held gradient discarded at step()", HOLD, "numpy", instead_of(Step, Discard())),
    Fault("held gradient of a short step discarded", "events/short-hold/adamw/float32", "numpy", instead_of(Step, Discard())),
    Fault("no step at the end of micro-batches in the moments", STATE, "eager", instead_of(Step)),
    # one update for each gradient
    Fault("step counted twice", RELEASE, "eager", after_event(Step, _count)),
    Fault(
        "step of StableAdamW clipped too much",
        "events/release/stable_adamw/float32",
        "eager",
        after_event(Backward, _smaller_step),
    ),
    Fault("tied weights updated twice", "events/tied/adamw/float32", "eager", tampered(run=_used_twice)),
    Fault("tied weights updated twice", "events/tied/adamw/float32", "numpy", tampered(run=_used_twice)),
    Fault("settings of another update", "events/schedule-unused/adamw/float32", "eager", instead_of(LearningRate)),
    Fault("the first learning rate for ever", "events/schedule/stable_adamw/float32", "numpy", instead_of(LearningRate)),
    # clipping and loss scaling
    Fault("L2 added before clipping", "events/clip/adam/float32", "eager", l2_in_gradient(all_passes=True)),
    Fault(
        "L2 added before unscaling", "events/overflow/adam/float32", "eager", l2_in_gradient(all_passes=True, scale=LOSS_SCALE)
    ),
    Fault(
        "max_norm applied to every micro-batch",
        "events/clip-hold/adamw/float32",
        "eager",
        scaled(lambda given: min(1.0, 1.0 / norm(given))),
    ),
    Fault(
        "small gradients scaled up to max_norm",
        "events/clip/adamw/float32",
        "eager",
        scaled(lambda given: max(1.0, 1.0 / norm(given))),
    ),
    *(Fault("gradient not clipped", CLIP, backend, NOT_CLIPPED) for backend in ("eager", "numpy")),
    Fault("gradient not clipped", CLIP_JAX, "jax", NOT_CLIPPED),
    Fault("held gradient not clipped", "events/clip-hold/stable_adamw/float32", "numpy", NOT_CLIPPED),
    Fault("gradient not clipped by its own norm", "events/clip-each/stable_adamw/float32", "eager", HARDLY_CLIPPED),
    Fault("held gradient not clipped by its own norm", "events/clip-each-hold/stable_adamw/float32", "eager", HARDLY_CLIPPED),
    Fault("every gradient clipped by its own norm", CLIP_JAX, "jax", another_case(_each_by_its_own_norm)),
    Fault(
        "the walk clips by the norm of its layers only",
        CLIP_JAX,
        "walk",
        scaled(lambda given: min(1.0, 1.0 / norm(given, "scalar")), max_norm=None),
    ),
    Fault("gradient not unscaled", "events/overflow/adamw/float32", "eager", scaled(lambda given: LOSS_SCALE)),
    Fault("gradient not unscaled", "events/overflow/stable_adamw/bfloat16", "walk", scaled(lambda given: LOSS_SCALE)),
    # gradients that are not finite
    *(
        Fault(
            f"moments decayed by a gradient that is skipped, {name}",
            f"events/{name}/adamw/float32",
            "eager",
            another_case(lambda case: with_gradients(case, _zeros_for_nonfinite)),
        )
        for name in ("nonfinite", "nonfinite-hold")
    ),
    Fault("gradients that are not finite used", "events/nonfinite/adamw/float32", "eager", sequence(skips=False)),
    Fault("step counted where it is skipped", "identity/skip/adamw/float32", "eager", after_event(Step, _count_skipped)),
    Fault(
        "moments forgotten where a step is skipped",
        "identity/skip/stable_adamw/float32",
        "numpy",
        after_event(Step, _forget_skipped),
    ),
    # memory and the ledger
    Fault("gradient not freed", "memory/release", "eager", _measured_with_gradients_kept),
    Fault("gradient of a micro-batch not freed", STATE, "eager", _gradients_kept),
    Fault("gradient freed twice", RELEASE, "eager", in_ledger(-60)),
    Fault("gradient not removed from the ledger", RELEASE, "eager", in_ledger(60)),
    Fault("gradient freed late", "events/state/stable_adamw/float32", "numpy", in_ledger(60)),
    # the marker
    Fault(
        "marker tells the norm of another parameter",
        "marker/release/adamw/float32",
        "eager",
        tampered(norms=lambda run, correct: correct()[[1, 0, 2, 3]]),
    ),
    Fault(
        "marker tells the norm of the clipped gradient",
        "marker/clip-each/adamw/float32",
        "eager",
        tampered(norms=lambda run, correct: np.minimum(correct(), 1.0)),
    ),
    Fault("marker passes any factor", "marker/release/adamw/float32", "eager", not_refused("times a half")),
    Fault("marker lets another gradient in", "marker/release/adamw/float32", "eager", not_refused("a tensor added")),
    Fault(
        "marker left by step()",
        "marker/release/adamw/float32",
        "eager",
        tampered(left=lambda run, correct: len(run.parameters)),
    ),
    # bits
    Fault("another start for every run", "identity/repeat/stable_adamw/float32", "numpy", Noisy(), method="start"),
    Fault("another gradient under release", "identity/release-is-step/adamw/float32", "eager", scaled(lambda given: 1.01)),
    Fault("stale groups after load_state_dict", "identity/frozen/adamw/float32", "eager", after_load(_put_groups, _groups)),
    Fault("moves under a learning rate of zero", "identity/frozen/stable_adamw/float32", "numpy", instead_of(LearningRate)),
    Fault("stale state after load_state_dict", "identity/resume/adamw/float32", "eager", after_load(_put_moments, _moments)),
    Fault("count forgotten by a resume", "identity/resume/stable_adamw/float32", "numpy", after_load(_forget_the_count)),
    Fault(
        "resume drops the compensation",
        "identity/resume/adamw/bfloat16",
        "eager",
        after_load(lambda run, old: change_kept(run, "compensation", lambda k: 0 * k)),
    ),
    # trajectories
    Fault("wrong beta2", "trajectories/clip/adam/float32", "eager", before_step(_beta2)),
    Fault(
        "the walk differentiates updated layers",
        "trajectories/state/stable_adamw/float32",
        "walk",
        tampered(step=_moved_while_differentiated),
    ),
]
