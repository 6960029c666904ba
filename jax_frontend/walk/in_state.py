"""In-state accumulation (AdamA, https://arxiv.org/abs/2305.19982): micro-batch gradients are added to the moments.

The first micro-batch decays the moments, later ones only add to them, and the last one also updates the parameters: the
functions of `core.update`, for the tensors of one layer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from .members import Members, rule_states, with_rule_states
from .passes import Arrays, backward, forward, head
from .stacked import at
from .step_settings import StepSettings, joined_state, split_state


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
    model = settings.model
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
            return update(arrays, settings.ready(g, arrays["params"]))

        g, written, _ = backward(model, outer, chunk, passed, start, written, read, update=rounded_update, fence=settings.fence)
        return (start.loss, start.aux), settings.ready(g, outer), written

    outer_moments, outer_read = _split(settings.tx, state.opt_state.outer, outer, stacked=False)
    moments, read = {}, {}
    for name in layers:
        moments[name], read[name] = _split(settings.tx, states[name], layers[name], stacked=True)

    def one_microbatch(sums: PyTree, of: PyTree, first: bool = False) -> tuple[PyTree, tuple[jax.Array, PyTree]]:
        of_outer, of_layers = sums
        chunk, number = of
        add = functools.partial(accumulate, first=first, microbatch=number)
        returned, g, of_layers = walk(chunk, add, of_layers, read)
        return (add(of_outer | outer_read, g), of_layers), returned

    sums, returned = one_microbatch((outer_moments, moments), (at(batch, 0), 0), first=True)
    losses, auxes = [returned[0]], [returned[1]]
    last = settings.microbatches - 1
    if last > 1:
        between = jax.tree.map(lambda leaf: leaf[1:-1], batch), jnp.arange(1, last)
        sums, (of_each, aux) = lax.scan(one_microbatch, sums, between)
        losses.append(jnp.sum(of_each))
        auxes.append(jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), aux))
    outer_moments, moments = sums
    stays = {name: {"mean_squares": moments[name].pop("mean_squares"), "members": read[name].pop("members")} for name in layers}
    written = {name: moments[name] | read[name] for name in layers}
    step = functools.partial(update_last, microbatch=last)
    returned, g, new = walk(at(batch, -1), step, written, stays)
    new_outer = step(outer_moments | outer_read, g)

    def joined(arrays: Arrays, before: PyTree) -> tuple[PyTree, PyTree]:
        """Return the parameters and the optimizer state, which is like the one before."""
        members = zip(arrays["fields"], arrays["rest"], strict=True)
        return arrays["params"], with_rule_states(before, [_rule_state(fields, rest) for fields, rest in members])

    pairs = {name: joined(arrays, states[name]) for name, arrays in new.items()}
    new_state = joined_state(model, joined(new_outer, state.opt_state.outer), pairs, None)
    loss = functools.reduce(operator.add, [*losses, returned[0]])
    aux = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *auxes, returned[1])
    return new_state, with_aux({"loss": loss, "skipped": jnp.asarray(False)}, settings.has_aux, aux)


def accumulate(arrays: Arrays, grads: PyTree, *, first: bool, microbatch: Any = 0) -> Arrays:
    """Add one micro-batch to the moments of one layer, and return them.

    Args:
        arrays: "members", "params", and for each member "rest" and what changes: "fields" and "mean_squares", the sum over the
            micro-batches so far.
        grads: of the layer.
        first: this is the first micro-batch, which decays the moments.
        microbatch: its number, an int or a 0-d array.
    """
    found = [
        (own["fields"], own["mean_square"]) if tx is None else _accumulated(tx, own, g, first=first, microbatch=microbatch)
        for tx, own, g in _by_member(arrays, grads)
    ]
    fields, mean_squares = zip(*found, strict=True)
    return {"fields": fields, "mean_squares": mean_squares}


def update_last(arrays: Arrays, grads: PyTree, *, microbatch: int) -> Arrays:
    """Add the last micro-batch to the moments of one layer, update it, and return all its arrays but the mean squares."""
    parts, fields, rest = [], [], []
    for tx, own, g in _by_member(arrays, grads):
        if tx is None:  # as its transform would
            new = own | {"count": optax.safe_increment(own["count"])}
        else:
            new = _updated_last(tx, own, g, microbatch=microbatch)
        parts.append(new["params"])
        fields.append(new["fields"])
        rest.append({name: new[name] for name in own if name not in ("params", "fields", "mean_square")})
    params = arrays["members"].joined(tuple(parts), arrays["params"])
    return {"params": params, "fields": tuple(fields), "rest": tuple(rest)}


def _by_member(arrays: Arrays, grads: PyTree) -> Iterator[tuple[RuleTransformation | None, Arrays, PyTree]]:
    """Yield each member's transform, its arrays and its gradients."""
    columns = arrays["members"].each, arrays["fields"], arrays["mean_squares"], arrays["rest"]
    for member, fields, mean_square, rest in zip(*columns, strict=True):
        own = {"params": member.part(arrays["params"]), "fields": fields, "mean_square": mean_square, **rest}
        yield member.tx, own, member.part(grads)


def _accumulated(
    tx: RuleTransformation, arrays: Arrays, grads: PyTree, *, first: bool, microbatch: Any
) -> tuple[PyTree, PyTree]:
    """Return the fields of one member with a micro-batch, and the sums of its mean squares."""
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
    return named(tx.rule, fields), mean_square


def _updated_last(tx: RuleTransformation, arrays: Arrays, grads: PyTree, *, microbatch: int) -> Arrays:
    """Return the arrays of one member, updated with the last micro-batch, but the sums of its mean squares."""
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
    state = _rule_state(arrays["fields"], arrays)
    count, treedef, leaves = leaves_of(tx.arguments, grads, state, arrays["params"], microbatch)
    sums = treedef.flatten_up_to(arrays["mean_square"])

    def with_sum(leaf: Leaf | None, mean_square: Any) -> Leaf | None:
        return leaf and leaf._replace(state=leaf.state._replace(mean_square=mean_square))

    return count, treedef, list(map(with_sum, leaves, sums))


def _split(tx: optax.GradientTransformation, state: PyTree, params: PyTree, stacked: bool) -> tuple[Arrays, Arrays]:
    """Return (the arrays that micro-batches change, those that they only read), before the first micro-batch.

    Args:
        tx: the transform.
        state, params: with a leading layer axis where stacked.
    """
    kinds = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:] if stacked else leaf.shape, leaf.dtype), params)
    members = Members.of(tx, kinds, state)

    def zero(leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape[:1] if stacked else (), jax.eval_shape(upcast, leaf).dtype)

    fields, rest = [], []
    for member, own in zip(members.each, rule_states(state), strict=True):
        if member.tx is not None:
            of_layer = functools.partial(under_betas, member.tx.arguments)
            own = jax.vmap(of_layer)(own) if stacked else of_layer(own)
        arrays = own._asdict()
        fields.append(arrays.pop("fields"))
        rest.append(arrays)
    zeros = jax.tree.map(zero, params)
    changing = {"fields": tuple(fields), "mean_squares": tuple(member.part(zeros) for member in members.each)}
    return changing, {"params": params, "rest": tuple(rest), "members": members}


def _rule_state(fields: PyTree, rest: Arrays) -> AnyRuleState:
    kind = RuleStateWithBetas if "betas" in rest else RuleState
    return kind(**{name: fields if name == "fields" else rest[name] for name in kind._fields})
