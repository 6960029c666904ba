"""Faults in plain updates: formulas, states, compensation, hyperparameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.core.array_ops import numpy_dtype
from penstock.parity.backends.jax_arguments import FACTORS
from penstock.parity.backends.jax_transforms import JaxRun
from penstock.parity.backends.jax_walk import CALM, SPIKE_EVERY
from penstock.parity.backends.protocol import Held
from penstock.parity.rules import RULES
from penstock.parity.settings import Schedule

from .injection import (
    Fault,
    Wrong,
    after_step,
    another_case,
    before_step,
    change_kept,
    defaults,
    hyperparameters,
    kept,
    parameters,
    problem,
    put,
    rule,
    setting,
    tampered,
    values,
)

ADAMW, ADAM, STABLE = (f"B/{rule}/float32/none/state-default" for rule in ("adamw", "adam", "stable_adamw"))
DENORMAL = "denormal/adamw/float32/none/state-default"
DECAY = "decay/adamw/bfloat16/split/state-default"
SPLIT, KAHAN = "B/adamw/bfloat16/split/state-default", "B/adamw/float16/kahan/state-default"
GROUPS = "groups/adamw/float32/none/state-default"
SCHEDULE = "schedule/adamw/float32/none/state-default"
BETAS = "betas/adamw/float32/none/state-default"
SMALL = "shapes/{}/float32/none/state-default"
"""Of several tensors in one group, which a plain step() updates together."""


def count_from(number: int) -> Wrong:
    def wrong(run: Any) -> None:
        run.count = max(run.count, number)

    return before_step(wrong)


def _leaves_moments(run: Any) -> None:
    run._change_betas = lambda before, after: None


def _takes_moments_for_new(run: Any) -> None:
    (given,) = set(run.case.problem.hyperparameters_at(run.count + 1).values())
    run.optimizer.param_groups[0]["betas_of_moments"] = (given.beta1, given.beta2)


def always_count(number: int) -> Wrong:
    def wrong(run: Any) -> None:
        run.count = number

    return before_step(wrong)


def through(dtype: str, *fields: str) -> Wrong:
    """State rounded to another dtype after every step."""

    def wrong(run: Any, before: Any, gradients: Any) -> None:
        for field in fields:
            change_kept(run, field, lambda x: x.astype(numpy_dtype(dtype)) if isinstance(x, np.ndarray) else x.bfloat16())

    return after_step(wrong)


def compensation(change: Callable[[Any], Any]) -> Wrong:
    return after_step(lambda run, before, gradients: change_kept(run, "compensation", change))


def taken_back(field: str, *names: str) -> Wrong:
    """What a run keeps is after each step what it was before it."""

    def wrong(run: Any, correct: Callable[..., Any], gradients: Any) -> None:
        started = hasattr(run, "states") or run.optimizer.state
        before = {name: kept(run, name, field) for name in names or run.parameters} if started else {}
        correct(gradients)
        for name, value in before.items():
            change_kept(run, field, functools.partial(_like, value), name)

    return tampered(step=wrong)


def _like(value: np.ndarray, old: Any) -> Any:
    return value if isinstance(old, np.ndarray) else old.new_tensor(value)


def _eps_in_root(run: Any, before: Mapping[str, np.ndarray], gradients: Any) -> None:
    h = run.case.problem.hyperparameters
    for name, p in before.items():
        m, v = kept(run, name, "exp_avg"), kept(run, name, "exp_avg_sq")
        put(run, name, p - h.learning_rate * (m / np.sqrt(v + h.eps) + h.weight_decay * p))


def mean_square(run: Any, name: str, gradient: np.ndarray, exp_avg_sq: np.ndarray | None = None) -> float:
    v = kept(run, name, "exp_avg_sq") if exp_avg_sq is None else exp_avg_sq
    g = np.asarray(gradient, np.float64)
    return float(np.mean(g**2 / np.maximum(v, run.case.problem.rule.defaults["eps"] ** 2))) if g.size else 0.0


def clipped_by(wrong_square: Callable[[float, int, list[tuple[float, int]]], float]) -> Wrong:
    """StableAdamW's learning rate divided by the root of another mean square.

    The wrong one is made of the right one, the tensor's size, and those two of all tensors.
    """

    def wrong(run: Any, before: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]) -> None:
        squares = {name: (mean_square(run, name, gradient), gradient.size) for name, gradient in gradients.items()}
        after = parameters(run)
        for name, (square, size) in squares.items():
            other = wrong_square(square, size, list(squares.values()))
            factor = max(1.0, square**0.5) / max(1.0, other**0.5)
            put(run, name, before[name] + factor * (after[name] - before[name]))

    return after_step(wrong)


def _over_old_moment(run: Any, correct: Callable[..., Any], gradients: Any) -> None:
    before = parameters(run)
    old = {name: kept(run, name, "exp_avg_sq") for name in before}
    correct(gradients)
    for name, p in before.items():
        square, other = mean_square(run, name, gradients[name]), mean_square(run, name, gradients[name], old[name])
        put(run, name, p + (parameters(run)[name] - p) * max(1.0, square**0.5) / max(1.0, other**0.5))


def _decay_not_clipped(run: Any, before: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]) -> None:
    h = run.case.problem.hyperparameters
    for name, p in before.items():
        clipped = 1.0 - 1.0 / max(1.0, mean_square(run, name, gradients[name]) ** 0.5)
        put(run, name, parameters(run)[name] - h.learning_rate * clipped * h.weight_decay * p)


def _freeze_one_element(run: Any, before: Mapping[str, np.ndarray], gradients: Any) -> None:
    for name, p in before.items():
        new = parameters(run)[name]
        new.flat[:1] = p.flat[:1]
        put(run, name, new)


def of_group(**changes: Callable[[Any, Any], Any]) -> Wrong:
    """Settings of the last parameter group, from (its own, the first's), before every step."""

    def wrong(run: Any) -> None:
        first, last = run.optimizer.param_groups[0], run.optimizer.param_groups[-1]
        last |= {name: change(last[name], first[name]) for name, change in changes.items()}

    return before_step(wrong)


def _next(step: Any) -> Any:
    return step + 1


def _step_is(change: Callable[[Any], Any]) -> Wrong:
    return before_step(lambda run: change_kept(run, "step", change))


def _late(schedule: Schedule) -> Schedule:
    class Late(Schedule):
        def learning_rate(self, step: int) -> float:
            return super().learning_rate(max(step - 1, 1))

    return Late(**dataclasses.asdict(schedule))


def _forgets_compensation(run: Any) -> None:
    run.state = run.state._replace(compensation={name: 0 * k for name, k in run.state.compensation.items()})


def _neighbour_held(run: Any, correct: Callable[[], Any]) -> Any:
    """What belongs to the walk's middle layer is in the next."""
    import jax

    def moved(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.roll(np.array(leaf), 1, axis=0), tree)

    state = run.state
    params = {**state.params, "layers": moved(state.params["layers"])}
    run.state = state._replace(params=params, opt_state=state.opt_state._replace(layers=moved(state.opt_state.layers)))
    found, run.state = correct(), state
    return found


class StackAtOnce:
    """An update of stacked layers as one tensor."""

    def __init__(self, case: Any) -> None:

        self.factors, self.count = np.array(FACTORS, np.float32), 0

        class Stacked(type(case.problem)):  # type: ignore[misc]
            def initial_parameters(own) -> Any:
                return {name: np.stack([p] * len(FACTORS)) for name, p in super().initial_parameters().items()}

        given = case.problem
        self.run = JaxRun(dataclasses.replace(case, problem=Stacked(given.setting, given.rule, given.dtype)))

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.count += 1
        calm = 1.0 if self.count % SPIKE_EVERY == 0 else CALM
        factors = self.factors * [calm, 1.0, calm]
        self.run.step({name: np.multiply.outer(factors, g).astype(g.dtype) for name, g in gradients.items()})

    def held(self) -> Any:
        whole = self.run.held()
        return {name: Held(**{field: array[1] for field, array in tensor.arrays().items()}) for name, tensor in whole.items()}


def _swapped(given: Any, step: int) -> Any:
    weight, bias = given.group_hyperparameters(step)
    return {"weight": bias, "bias": weight}


def of_step(**changes: Callable[[Any, Any, int], Any]) -> Wrong:
    """AdamHyperparameters from (the problem, the right ones, the number of the step)."""
    return hyperparameters(
        lambda problem, step: {
            name: dataclasses.replace(given, **{field: change(problem, given, step) for field, change in changes.items()})
            for name, given in problem.hyperparameters_at(step).items()
        }
    )


def storage(**fields: Any) -> Wrong:
    return another_case(lambda case: dataclasses.replace(case, storage=dataclasses.replace(case.storage, **fields)))


NO_DECAY = setting(weight_decay=0.0)
NO_CLIPPING = problem(rule=lambda given: dataclasses.replace(RULES["adamw"], defaults=given.defaults))

FAULTS = [
    # debiasing and betas
    Fault("debiasing off by one", ADAMW, "numpy", count_from(1)),
    Fault("debiased one step late", "A/adamw/float32/none/state-default", "numpy", always_count(1), 100),
    Fault("no debiasing", ADAMW, "numpy", always_count(10**6)),
    Fault("bias corrections of the first update for ever", ADAMW, "eager", _step_is(lambda step: 0 * step)),
    Fault("beta1 too low", ADAMW, "numpy", defaults(beta1=0.89, beta2=0.999), 100),
    Fault("beta2 too low", ADAMW, "numpy", defaults(beta1=0.9, beta2=0.998), 100),
    Fault("betas of another rule", STABLE, "numpy", defaults(beta1=0.9, beta2=0.999), 100),
    Fault("beta2 in the place of beta1", ADAMW, "jax", defaults(beta1=0.999, beta2=0.999)),
    Fault("beta2 in the place of beta1, seen in subnormal numbers", DENORMAL, "numpy", defaults(beta1=0.999, beta2=0.999)),
    # moments
    Fault("exp_avg_sq not updated, seen in subnormal numbers", DENORMAL, "numpy", taken_back("exp_avg_sq")),
    Fault("a tensor's exp_avg not written", SMALL.format("adamw"), "eager", taken_back("exp_avg", "vector")),
    Fault("state through bfloat16", ADAMW, "numpy", through("bfloat16", "exp_avg", "exp_avg_sq")),
    Fault("state through float16", STABLE, "numpy", through("float16", "exp_avg", "exp_avg_sq")),
    Fault("exp_avg through float16", ADAMW, "numpy", through("float16", "exp_avg"), 100),
    Fault("exp_avg_sq through float16", ADAMW, "numpy", through("float16", "exp_avg_sq"), 100),
    Fault("exp_avg_sq through bfloat16", STABLE, "numpy", through("bfloat16", "exp_avg_sq"), 100),
    Fault("float64 through float32", "A/adamw/float64/none/state-default", "numpy", through("float32", "exp_avg"), 100),
    Fault("second moment in bfloat16 by default", SPLIT, "eager", through("bfloat16", "exp_avg_sq"), 100),
    # the step
    Fault("eps inside the root", ADAMW, "numpy", after_step(_eps_in_root)),
    Fault("eps of another rule", "A/adam/float32/none/state-default", "numpy", defaults(eps=1e-6), 100),
    Fault("learning rate a little off", ADAMW, "numpy", setting(lr=1.0001e-4), 1),
    Fault("one element not updated", ADAM, "numpy", after_step(_freeze_one_element), 100),
    Fault("step counted twice", SMALL.format("adamw"), "eager", after_step(lambda run, *_: change_kept(run, "step", _next))),
    # weight decay
    Fault("decay unfolded, and rounded away", DECAY, "numpy", NO_DECAY, 100),
    Fault("decay not clipped", STABLE, "numpy", after_step(_decay_not_clipped), 100),
    Fault("decay dropped", ADAMW, "numpy", NO_DECAY, 100),
    Fault("decay left out", SMALL.format("adamw"), "eager", of_group(weight_decay=lambda *_: 0.0), 100),
    Fault("L2 left out", ADAM, "numpy", NO_DECAY),
    Fault("L2 left out", SMALL.format("adam"), "eager", of_group(weight_decay=lambda *_: 0.0)),
    Fault("weight decay dropped", ADAM, "jax", NO_DECAY),
    Fault("decay decoupled from L2", ADAM, "numpy", rule(l2=False), 100),
    # update clipping
    Fault("update not clipped", STABLE, "numpy", NO_CLIPPING, 100),
    Fault("update not clipped", "frameworks/stable_adamw/float32", "jax", NO_CLIPPING),
    Fault("update clipping inverted", STABLE, "numpy", clipped_by(lambda square, *_: 1.0 / max(square, 1e-9)), 100),
    Fault(
        "mean square over the wrong count",
        SMALL.format("stable_adamw"),
        "numpy",
        clipped_by(lambda square, size, _: square * size / max(1, size - 1)),
    ),
    Fault("mean square over the old second moment", STABLE, "numpy", tampered(step=_over_old_moment)),
    Fault(
        "mean square over the elements of a piece",
        "large/stable_adamw/float32/none/state-default",
        "eager",
        clipped_by(lambda square, size, _: square * size / 2**18),
    ),
    Fault(
        "small tensors: mean square over the wrong count",
        SMALL.format("stable_adamw"),
        "eager",
        clipped_by(lambda square, size, all_: square * size / max(other for _, other in all_)),
    ),
    Fault(
        "small tensors: one mean square for all",
        SMALL.format("stable_adamw"),
        "eager",
        clipped_by(lambda square, size, all_: sum(each for each, _ in all_) / len(all_)),
    ),
    Fault("mean square over the whole stack", STABLE, "walk", lambda start, case: StackAtOnce(case)),
    # compensation
    Fault("sign of the kahan compensation", KAHAN, "numpy", compensation(lambda k: -k)),
    Fault("sign of the split compensation", SPLIT, "numpy", compensation(lambda k: -k)),
    Fault("split cuts off instead of rounding", SPLIT, "numpy", compensation(lambda k: np.maximum(k, 0))),
    Fault("compensation lost", SPLIT, "numpy", compensation(np.zeros_like), 100),
    Fault("float16 compensation lost", KAHAN, "numpy", compensation(np.zeros_like), 100),
    Fault("compensation optimised away", KAHAN, "jax", storage(compensation="none"), 20),
    Fault("compensation never read", SPLIT, "jax", before_step(_forgets_compensation), 20),
    # schedules and groups
    Fault("schedule off by one", SCHEDULE, "jax", problem(setting=lambda given: values(schedule=_late(given.schedule))(given))),
    Fault("schedule one step late", SCHEDULE, "numpy", hyperparameters(lambda p, step: p.hyperparameters_at(max(step - 1, 1)))),
    Fault("betas change and the moments stay", BETAS, "numpy", before_step(_leaves_moments)),
    Fault("moments taken to be under the new betas", BETAS, "eager", before_step(_takes_moments_for_new)),
    Fault("betas of the first step for ever", BETAS, "jax", setting(schedule=Schedule())),
    Fault("settings of the first step for ever", SCHEDULE, "eager", setting(schedule=None)),
    Fault(
        "schedule not followed",
        "schedule/stable_adamw/bfloat16/split/state-default",
        "numpy",
        hyperparameters(lambda p, step: dict.fromkeys(p.setting.shapes, p.hyperparameters)),
        100,
    ),
    Fault(
        "decay not scheduled",
        "schedules/adam/float32/none/state-default",
        "numpy",
        of_step(weight_decay=lambda p, given, step: given.weight_decay * 1.0 / p.setting.schedule.weight_decay(step)),
        100,
    ),
    Fault("hyperparameters of the other group", GROUPS, "numpy", hyperparameters(_swapped)),
    Fault("learning rate of another group", GROUPS, "eager", of_group(lr=lambda own, first: first)),
    Fault("betas of another group", GROUPS, "eager", of_group(betas=lambda own, first: first)),
    Fault(
        "max_lr follows the schedule",
        "decoupled/stable_adamw/float32/none/state-default",
        "numpy",
        of_step(max_lr=lambda p, given, step: given.learning_rate),
        100,
    ),
    # layers
    Fault(
        "the walk updates the wrong layer",
        ADAMW,
        "walk",
        tampered(held=_neighbour_held),
    ),
]
