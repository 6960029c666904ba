"""Faults in the rules that are not of Adam's family: SGD, Lion, RAdam, Adan, Ranger and Muon."""

from __future__ import annotations

from typing import Any

from penstock.core.rules import adan, muon, radam, ranger, sgd

from .event_faults import L2_LATER, at_later_micro_batches
from .injection import Fault, Wrong, before_step, change_kept, defaults, rule
from .update_faults import NO_DECAY, count_from

FLOAT32 = "B/{}/float32/none/state-default"
FLOAT64_MUON = "B/muon/float64/none/state-default"


def corrections(of: Any, change: Any) -> Wrong:
    """A rule whose scalars are others: `change` is given the right ones and the number of the update."""
    return rule(corrections=lambda current, step, xp: change(of(current, step, xp), step))


def _running_mean(current: Any, scalars: Any, fields: Any, gradient: Any, xp: Any, *, first: bool) -> Any:
    return tuple(scalars.kept * momentum + (1.0 - scalars.kept) * gradient for momentum in fields)


def _difference_reversed(current: Any, scalars: Any, fields: Any, gradient: Any, xp: Any, *, first: bool) -> Any:
    return adan.accumulate(current, scalars, (*fields[:3], 2.0 * gradient - fields[3]), gradient, xp, first=first)


def _previous_kept(current: Any, scalars: Any, fields: Any, gradient: Any, xp: Any, *, first: bool) -> Any:
    return (*adan.accumulate(current, scalars, fields, gradient, xp, first=first)[:3], fields[3])


def _without_difference(current: Any, scalars: Any, fields: Any, entered: Any, xp: Any) -> Any:
    return fields[0] / (xp.sqrt(fields[2]) + current.eps)


def _betas_exchanged(run: Any) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.99, 0.9)


def _plain(scalars: Any) -> Any:
    return scalars._replace(plain=1.0, rectified=0.0)


def _rectified(scalars: Any) -> Any:
    return scalars._replace(plain=0.0, rectified=1.0)


def _meeting(scalars: Any, meets: bool) -> Any:
    return scalars._replace(kept=0.0 if meets else 1.0, returned=0.5 if meets else 0.0)


def _of_its_norm(ops: Any, current: Any, direction: Any) -> Any:
    size = ops.xp.sqrt(ops.xp.sum(direction * direction))
    return muon.orthogonalised(ops, current, direction) * (0.95 + 0.05 * size)


def _in_float32(ops: Any, current: Any, direction: Any) -> Any:
    return ops.cast(muon.orthogonalised(ops, current, ops.cast(direction, "float32")), "float64")


FAULTS = [
    # SGD
    Fault("Nesterov without the gradient", FLOAT32.format("sgd_nesterov"), "numpy", rule(direction=sgd.heavy_ball)),
    Fault(
        "Nesterov where none is asked",
        FLOAT32.format("sgd_momentum"),
        "numpy",
        rule(direction=sgd.nesterov, needs_gradient=True),
    ),
    Fault("dampening where none is asked", FLOAT32.format("sgd_momentum"), "numpy", defaults(dampening=0.1)),
    Fault("momentum as a running mean", FLOAT32.format("sgdw_momentum"), "numpy", rule(accumulate=_running_mean)),
    Fault("momentum of another value", FLOAT32.format("sgdw_nesterov"), "jax", defaults(momentum=0.91)),
    Fault("decay coupled instead of decoupled", FLOAT32.format("sgdw_momentum"), "numpy", rule(l2=True)),
    Fault("decay decoupled instead of coupled", FLOAT32.format("sgd_momentum"), "numpy", rule(l2=False), 20),
    Fault("L2 left out", FLOAT32.format("sgd"), "jax", NO_DECAY),
    Fault("L2 added by every micro-batch", "events/state/sgd_momentum/float32", "numpy", L2_LATER),
    Fault(
        "momentum decayed by every micro-batch",
        "events/state/sgd_momentum/float32",
        "eager",
        at_later_micro_batches(lambda run: change_kept(run, "momentum_buffer", lambda m: 0.9 * m)),
    ),
    # Lion
    Fault("betas exchanged", FLOAT32.format("lion"), "numpy", defaults(beta1=0.99, beta2=0.9), 20),
    Fault("betas exchanged", FLOAT32.format("lion"), "eager", before_step(_betas_exchanged), 20),
    Fault("betas exchanged", FLOAT32.format("lion"), "jax", defaults(beta1=0.99, beta2=0.9), 20),
    Fault(
        "sign of the momentum that is kept",
        FLOAT32.format("lion"),
        "numpy",
        rule(direction=lambda current, scalars, fields, entered, xp: xp.sign(fields[0])),
        20,
    ),
    Fault(
        "sign of the gradient",
        "B/lion/bfloat16/split/state-default",
        "numpy",
        rule(direction=lambda current, scalars, fields, entered, xp: xp.sign(entered.gradient)),
        20,
    ),
    # RAdam
    Fault(
        "rectified one update early",
        FLOAT32.format("radam"),
        "numpy",
        corrections(radam.corrections, lambda right, step: _rectified(right) if step == 5 else right),
        10,
    ),
    Fault(
        "rectified one update late",
        FLOAT32.format("radamw"),
        "numpy",
        corrections(radam.corrections, lambda right, step: _plain(right) if step == 6 else right),
        10,
    ),
    Fault(
        "not rectified",
        FLOAT32.format("radamw"),
        "numpy",
        corrections(radam.corrections, lambda right, step: right if right.plain else _rectified(right)),
        10,
    ),
    Fault("rectified from the first update on", FLOAT32.format("radam"), "numpy", count_from(5)),
    Fault("decay coupled instead of decoupled", FLOAT32.format("radamw"), "numpy", rule(l2=True), 10),
    Fault("decay decoupled instead of coupled", FLOAT32.format("radam"), "numpy", rule(l2=False), 10),
    # Adan
    Fault("difference of gradients reversed", FLOAT32.format("adan"), "numpy", rule(accumulate=_difference_reversed)),
    Fault("difference left out of the step", FLOAT32.format("adan"), "numpy", rule(direction=_without_difference)),
    Fault("previous gradient not written", FLOAT32.format("adan"), "numpy", rule(accumulate=_previous_kept)),
    Fault("explicit decay", "B/adan/float64/none/state-default", "numpy", rule(implicit_decay=False)),
    Fault(
        "difference in the first update",
        FLOAT32.format("adan"),
        "numpy",
        corrections(adan.corrections, lambda right, step: right._replace(seen=1.0)),
    ),
    Fault("decay left out", FLOAT32.format("adan"), "jax", NO_DECAY),
    # Ranger
    Fault(
        "slow weights never met",
        FLOAT32.format("ranger"),
        "numpy",
        corrections(ranger.corrections, lambda right, step: right._replace(kept=1.0, returned=0.0)),
        10,
    ),
    Fault(
        "slow weights met one update early",
        FLOAT32.format("ranger_l2"),
        "numpy",
        rule(corrections=lambda current, step, xp: _meeting(ranger.corrections(current, step, xp), step % 6 == 5)),
        10,
    ),
    Fault(
        "the way from the slow weights kept after a meeting",
        FLOAT32.format("ranger"),
        "numpy",
        corrections(ranger.corrections, lambda right, step: right._replace(kept=1.0)),
        10,
    ),
    Fault("another share of the way", FLOAT32.format("ranger"), "jax", defaults(alpha=0.51), 10),
    Fault("another number of updates", FLOAT32.format("ranger_l2"), "eager", defaults(k=5), 10),
    # Muon
    Fault("Nesterov without the gradient", FLOAT32.format("muon"), "numpy", rule(direction=muon.heavy_ball)),
    Fault("an iteration less", FLOAT32.format("muon"), "eager", defaults(ns_steps=4)),
    Fault("another coefficient", FLOAT64_MUON, "jax", defaults(ns_coefficients=(3.4445, -4.7750, 2.0316))),
    Fault("scaled by the other axis", FLOAT32.format("muon_momentum"), "jax", defaults(output_axis=1)),
    Fault("a step that depends on the norm", FLOAT64_MUON, "numpy", rule(of_matrix=_of_its_norm)),
    Fault(
        "iterations in float32",
        FLOAT64_MUON,
        "numpy",
        rule(of_matrix=_in_float32),
    ),
]
