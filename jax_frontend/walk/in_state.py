"""In-state accumulation (AdamA, https://arxiv.org/abs/2305.19982): micro-batch gradients are added to the moments.

The first micro-batch decays the moments, later ones only add to them, and the last one also updates the parameters: the
functions of `core.update`, for the tensors of one layer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ...core import update as specification
from ...core.codings import Coded
from ...core.errors import RefusedError
from ...core.rules import Rule
from ..array_ops import jax_ops, upcast
from ..leaves import Leaf, leaves_of
from ..losses import with_aux
from ..one_by_one import Turn, by_rows, is_updated_by_rows
from ..rule_transform import RuleTransformation, mean_square_of, named, under_betas
from ..state import AnyRuleState, PyTree, RuleState, RuleStateWithBetas
from ..train_state import TrainState
from .passes import Arrays, backward, forward, head
from .stacked import at
from .step_settings import StepSettings, joined_state, split_state


def check_in_state(tx: optax.GradientTransformation) -> None:
    """Raise `RefusedError` unless tx is one of penstock's own transforms, which know how to accumulate."""
    if not isinstance(tx, RuleTransformation) or tx.arguments.scales_only:
        raise RefusedError(
            "accumulation='state' is only possible for penstock's own transforms, neither chained nor wrapped; "
            "leave accumulation out: microbatches alone work with every separable transform, and are exact."
        )
    tx.rule.check_accumulates("leave accumulation out: microbatches alone are exact")


def in_state_step(settings: StepSettings, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run one micro-batch after the other through the whole model; the last one updates the parameters.

    Args:
        settings, state: of the step.
        batch: with a leading axis of at least two micro-batches.
    """
    if state.loss_scale is not None:
        raise RefusedError(
            "accumulation='state' adds a micro-batch to the moments before an overflow of a later one is known; leave "
            "accumulation out, or use bfloat16, which needs no loss scale."
        )
    model, tx = settings.model, cast("RuleTransformation", settings.tx)  # `check_in_state` has passed
    outer, layers, states = split_state(model, state)

    def walk(chunk: PyTree, update: Any, written: PyTree, read: PyTree) -> tuple[tuple[jax.Array, PyTree], PyTree, PyTree]:
        """Return (the micro-batch's share of the mean loss, aux), the outer gradient, and what was written."""
        chunk = jax.tree.map(lambda leaf: leaf[None], chunk)
        passed = forward(model, state.params, chunk, settings.save_residuals, settings.fence)
        start = head(model, outer, passed, chunk, settings.microbatches, 1.0, settings.has_aux)
        if start.weight is not None:
            raise RefusedError(
                "accumulation='state' needs the weight of the whole batch before the first gradient, so the loss cannot "
                "be a WeightedMean; return the mean, or leave accumulation out."
            )

        def rounded_update(arrays: Arrays, g: PyTree) -> Arrays:
            return update(tx, arrays, settings.ready(g, arrays["params"]))

        g, written, _ = backward(model, outer, chunk, passed, start, written, read, update=rounded_update, fence=settings.fence)
        return (start.loss, start.aux), settings.ready(g, outer), written

    of_layer = functools.partial(under_betas, tx.arguments)
    outer_moments, outer_read = _split(of_layer(state.opt_state.outer), outer, stacked=False)
    moments, read = {}, {}
    for name in layers:
        moments[name], read[name] = _split(jax.vmap(of_layer)(states[name]), layers[name], stacked=True)

    def one_microbatch(sums: PyTree, of: PyTree, first: bool = False) -> tuple[PyTree, tuple[jax.Array, PyTree]]:
        of_outer, of_layers = sums
        chunk, number = of
        add = functools.partial(accumulate, first=first, microbatch=number)
        returned, g, of_layers = walk(chunk, add, of_layers, read)
        return (add(tx, of_outer | outer_read, g), of_layers), returned

    sums, returned = one_microbatch((outer_moments, moments), (at(batch, 0), 0), first=True)
    losses, auxes = [returned[0]], [returned[1]]
    last = settings.microbatches - 1
    if last > 1:
        between = jax.tree.map(lambda leaf: leaf[1:-1], batch), jnp.arange(1, last)
        sums, (of_each, aux) = lax.scan(one_microbatch, sums, between)
        losses.append(jnp.sum(of_each))
        auxes.append(jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), aux))
    outer_moments, moments = sums
    mean_squares = {name: {"mean_square": moments[name].pop("mean_square")} for name in layers}
    written = {name: moments[name] | read[name] for name in layers}
    step = functools.partial(update_last, microbatch=last)
    returned, g, new = walk(at(batch, -1), step, written, mean_squares)
    new_outer = step(tx, outer_moments | outer_read, g)
    new_state = joined_state(model, _pair(new_outer), {name: _pair(arrays) for name, arrays in new.items()}, None)
    loss = functools.reduce(operator.add, [*losses, returned[0]])
    aux = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *auxes, returned[1])
    return new_state, with_aux({"loss": loss, "skipped": jnp.asarray(False)}, settings.has_aux, aux)


def accumulate(tx: Any, arrays: Arrays, grads: PyTree, *, first: bool, microbatch: Any = 0) -> Arrays:
    """Add one micro-batch to the moments of one layer, and return them.

    Args:
        tx: one of penstock's transforms.
        arrays: "params", "count", "compensation", "random_keys", and what changes: "fields" and "mean_square", the sum over the
            micro-batches so far.
        grads: of the layer.
        first: this is the first micro-batch, which decays the moments.
        microbatch: its number, an int or a 0-d array.
    """
    count, treedef, leaves = _leaves(tx, arrays, grads, microbatch)
    turn = Turn(count > 0)

    def of(leaf: Leaf) -> specification.TensorState:
        return specification.accumulate(jax_ops, tx.rule, *leaf.arguments, first=first, bits=leaf.bits)

    def new(leaf: Leaf) -> tuple[Any, ...]:
        if not is_updated_by_rows(leaf.parameter, leaf.state.fields):
            state = of(leaf)
            return *state.fields, state.mean_square

        def of_rows(row: Any, g: Any, kept: Any, p: Any, *fields: Coded) -> tuple[Coded, ...]:
            return of(leaf.part(row, g, kept, p, fields)).fields

        squares = _squares_by_rows(tx.rule, leaf, first)
        read = leaf.gradient, leaf.state.compensation, leaf.parameter
        return *by_rows(of_rows, read, leaf.state.fields, turn), squares

    *fields, mean_square = _columns(treedef, leaves, new, len(tx.rule.fields) + 1)
    return {"fields": named(tx.rule, fields), "mean_square": mean_square}


def update_last(tx: Any, arrays: Arrays, grads: PyTree, *, microbatch: int) -> Arrays:
    """Add the last micro-batch to the moments of one layer, update it, and return all its arrays but the mean square."""
    count, treedef, leaves = _leaves(tx, arrays, grads, microbatch)
    turn = Turn(count > 0)

    def of(leaf: Leaf, mean_square: Any = None) -> tuple[Any, ...]:
        parameter, state = specification.update(
            jax_ops, tx.rule, *leaf.arguments, first=False, mean_square=mean_square, bits=leaf.bits
        )
        return state.compensation, parameter, *state.fields

    def new(leaf: Leaf) -> tuple[Any, ...]:
        if tx.rule.of_matrix is None and is_updated_by_rows(leaf.parameter, leaf.state.fields):
            squares = _squares_by_rows(tx.rule, leaf, first=False)

            def of_rows(row: Any, g: Any, kept: Any, p: Any, *fields: Coded) -> tuple[Any, ...]:
                return of(leaf.part(row, g, kept, p, fields), squares)

            old = leaf.state.compensation, leaf.parameter, *leaf.state.fields
            kept, *changed = by_rows(of_rows, [leaf.gradient], old, turn)
        else:
            kept, *changed = of(leaf)
        return *changed, leaf.kept(kept)

    params, *fields, compensation = _columns(treedef, leaves, new, len(tx.rule.fields) + 2)
    changed = {"params": params, "fields": named(tx.rule, fields), "compensation": compensation, "count": count}
    # The betas stay after the first micro-batch, and keys always.
    return changed | {name: arrays[name] for name in ("betas", "random_keys") if name in arrays}


def _squares_by_rows(rule: Rule, leaf: Leaf, first: bool) -> Any:
    """Return the sum of the mean squares of the micro-batches so far, with this one; as it was where the rule has none."""
    if not rule.clips_update:
        return leaf.state.mean_square
    square = mean_square_of(rule, leaf, axis=0, first=first)
    return square if first else leaf.state.mean_square + square


def _columns(treedef: Any, leaves: Sequence[Leaf | None], new: Callable[[Leaf], tuple[Any, ...]], count: int) -> list[PyTree]:
    """Return `count` trees of what `new` returns for each leaf; of None where there is no gradient."""
    rows = [(None,) * count if leaf is None else new(leaf) for leaf in leaves]
    return [treedef.unflatten([row[i] for row in rows]) for i in range(count)]


def _leaves(tx: RuleTransformation, arrays: Arrays, grads: PyTree, microbatch: Any) -> tuple[jax.Array, Any, list[Leaf | None]]:
    _, state = _pair(arrays)
    count, treedef, leaves = leaves_of(tx.arguments, grads, state, arrays["params"], microbatch)
    sums = treedef.flatten_up_to(arrays["mean_square"])

    def with_sum(leaf: Leaf | None, mean_square: Any) -> Leaf | None:
        return leaf and leaf._replace(state=leaf.state._replace(mean_square=mean_square))

    return count, treedef, list(map(with_sum, leaves, sums))


def _split(state: AnyRuleState, params: PyTree, stacked: bool) -> tuple[Arrays, Arrays]:
    """Return (the arrays that micro-batches change, those that they only read), before the first micro-batch.

    Args:
        state, params: with a leading layer axis where stacked.
    """

    def zero(leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape[:1] if stacked else (), jax.eval_shape(upcast, leaf).dtype)

    changing = {"fields": state.fields, "mean_square": jax.tree.map(zero, params)}
    return changing, {"params": params, **{name: x for name, x in state._asdict().items() if name not in changing}}


def _pair(arrays: Arrays) -> tuple[PyTree, AnyRuleState]:
    kind = RuleStateWithBetas if "betas" in arrays else RuleState
    return arrays["params"], kind(**{name: arrays[name] for name in kind._fields})
