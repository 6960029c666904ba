"""The training step for stacked layers: every layer is updated inside the backward pass, and its gradient is gone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ...core.errors import InvalidArgumentError, RefusedError
from ..array_ops import widened
from ..direct import apply_directly, as_transformation
from ..donation import DonatingFunction
from ..losses import check_microbatches, chunks
from ..norms import Squares, check_max_norm, clipped, no_squares, norm_dtype, squares
from ..separability import check_separable
from ..state import AdamState, PyTree
from ..train_state import LayeredState, TrainState, check_made_by, check_train_state
from . import in_state
from .fence import fenced, resolve_fence
from .in_state import Moments, Rest, taken_apart
from .layer_stack import LayerStack, check_parameters
from .passes import Visit, backward, forward, head
from .stacked import at

_ACCUMULATIONS = (None, "state")


def make_release_step(
    stack: LayerStack,
    tx: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    max_norm: float | None = None,
    accumulation: str | None = None,
    save_residuals: bool = False,
    fence: str = "auto",
) -> DonatingFunction:
    r"""A jitted training step (state, batch) -> (state, metrics) that releases gradients layer by layer, and donates its state.

        forward over the layers;  for i = last..first:  g_i = dL/d layer_i;  layer_i, its state <- tx(g_i);  g_i is freed

    The result is that of the plain gradient and one update of each layer by itself (tx vectorised over the layer axis). One
    layer's gradient is alive, and that of the outer parameters, which are updated at the end.

    Args:
        stack: the model.
        tx: an Optax transform that can be applied layer by layer; see `check_separable`. It sees the tree of one layer, or
            the outer parameters: masks and labels must be functions of such a tree.
        microbatches: into how many equal chunks the leading axis of every leaf of the batch is cut (a single typed PRNG key
            is split): n chunks of every n-th row, so that rows sharded over devices stay where they are. For each layer they
            run one after the other, and their gradients are averaged in float32 (float64 for float64 parameters) before the
            layer's update: exact.
        max_norm: largest global norm of the gradient, in (0, inf); None: no clipping. Exact: a first walk measures the norm,
            a second one updates. What is not finite propagates, as in `make_train_step`.
        accumulation: None: exact, as above. "state": the micro-batches run one after the other through the whole model, and
            their gradients go straight into the moments (AdamA): activations of one micro-batch only. With one micro-batch
            that is exact; with K it is an approximation: v is the mean of squares, and the mean square of StableAdamW can
            be up to K times below the batch gradient's. For penstock's own transforms, unchained.
        save_residuals: False: each layer's activations are computed again going backward, and only its inputs are saved.
            True: what its backward pass needs is saved.
        fence: what keeps reads of old slices apart from writes of new ones: "auto" (by jax.default_backend() when traced),
            "conditional" (CPU), "barrier" (GPU, TPU) or "none".

    Returns:
        A jitted function, with .lower and .trace. state comes from `init_train_state`. metrics are 0-d arrays: "loss", the mean
        before the update; "grad_norm", the global norm before clipping (not with accumulation="state", which never knows
        the whole gradient); "skipped", a boolean: True when nothing was changed, because the loss had a total weight that is
        not positive, or, with a loss scale in the state, the gradient's norm was not finite. With a loss scale, as with
        max_norm, a first walk finds that out.

    Raises:
        InvalidArgumentError: an argument out of range, or tx no transform; when traced, parameters without a common layer
            axis, a layer that changes its x, a loss that is not a scalar, a batch that cannot be cut evenly, a state without a
            layer axis or of another transform; at a step, an array that was deleted, or that is to be donated twice.
        UnsupportedTensorError: when traced, parameters that are not floating-point.
        RefusedError: accumulation="state" with max_norm, a loss scale, a (sum, weight) loss or another transform; when traced,
            a transform that is not separable, or changes the updates of a compensated one.

    References:
        Lv et al., Full parameter fine-tuning with limited resources, https://arxiv.org/abs/2306.09782 (release);
        Zhang et al., AdamA, https://arxiv.org/abs/2305.19982.
    """
    if not isinstance(stack, LayerStack):
        raise InvalidArgumentError(f"stack={stack!r} is not a LayerStack.")
    as_transformation(tx)  # raises
    check_microbatches(microbatches)
    check_max_norm(max_norm)
    if accumulation not in _ACCUMULATIONS:
        raise InvalidArgumentError(f"accumulation={accumulation!r} is not known; it must be None (exact) or 'state'.")
    resolve_fence(fence)
    if accumulation == "state":
        in_state.check_in_state(tx)
        if max_norm is not None:
            raise RefusedError(
                "accumulation='state' puts a micro-batch into the moments before the norm of the whole gradient is known; "
                "leave accumulation out (microbatches alone are exact), or use StableAdamW, which needs no clipping."
            )

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(stack, tx, state)
        release = _Release(stack, tx, microbatches, max_norm, save_residuals, resolve_fence(fence))
        if accumulation == "state" and microbatches > 1:
            return release.in_state(state, chunks(batch, microbatches))
        return release.exact(state, chunks(batch, microbatches))

    return DonatingFunction(step, "state")


def _check_state(stack: LayerStack, tx: optax.GradientTransformation, state: TrainState) -> None:
    check_train_state(state)
    check_parameters(stack, state.params)
    again = "make the state with init_train_state(tx, params, stack)."
    if not isinstance(state.opt_state, LayeredState):
        raise InvalidArgumentError(f"the optimizer state has no layer axis; {again}")
    layers, states = state.params["layers"], state.opt_state.layers
    named = stack.named(layers)
    if isinstance(stack.layer, Mapping) and not (isinstance(states, dict) and states.keys() == named.keys()):
        raise InvalidArgumentError(f"the optimizer state is not one of the stacks {sorted(named)}; {again}")
    for name, of_stack in stack.named(states).items():
        count = {leaf.shape[:1] for leaf in jax.tree.leaves(named[name])}
        if {leaf.shape[:1] for leaf in jax.tree.leaves(of_stack)} - count:
            raise InvalidArgumentError(f"the optimizer state has another layer axis than the parameters; {again}")
    kinds = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), named)
    outer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.params["outer"])
    pairs = [(outer, state.opt_state.outer), *((kinds[name], of_stack) for name, of_stack in stack.named(states).items())]
    for tree, opt_state in pairs:
        check_made_by(tx, tree, opt_state)
        check_separable(tx, tree)


class _Release:
    """One traced step."""

    def __init__(
        self,
        stack: LayerStack,
        tx: optax.GradientTransformation,
        microbatches: int,
        max_norm: float | None,
        save_residuals: bool,
        fence: str,
    ) -> None:
        self.stack, self.tx, self.fence = stack, tx, fence
        self.microbatches, self.max_norm, self.save_residuals = microbatches, max_norm, save_residuals

    def exact(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """All micro-batches of a layer, then its update."""
        outer, layers, states = self._parts(state)
        dtype, scale = norm_dtype(state.params), None if state.loss_scale is None else state.loss_scale.scale
        passed = forward(self.stack, state.params, batch, self.save_residuals)
        start = head(self.stack, outer, passed, batch, self.microbatches, 1.0 if scale is None else scale)
        proceed = None if start.weight is None else start.weight > 0  # false of NaN
        walk = functools.partial(backward, self.stack, outer, batch, passed, start, fence=self.fence)
        new_scale, g, norm = state.loss_scale, None, None

        def measure(sums: Squares, g: PyTree) -> Squares:
            return sums + squares(g, dtype)

        def norm_of(sums: Squares, g: PyTree) -> jax.Array:
            return measure(sums, g).norm / (1.0 if scale is None else scale)

        if self.max_norm is not None or scale is not None:
            only = Visit(lambda written, read: read, measure=measure)
            g, _, sums = walk(only, dict.fromkeys(layers), layers, no_squares(dtype))
            norm = norm_of(sums, g)
        if state.loss_scale is not None and norm is not None:
            finite = jnp.isfinite(norm)
            new_scale = state.loss_scale.after(finite, True if proceed is None else proceed)
            proceed = finite if proceed is None else proceed & finite

        def update(written: tuple[PyTree, PyTree], read: None, g: PyTree) -> tuple[PyTree, PyTree]:
            params, opt_state = written
            return apply_directly(self.tx, self._ready(g, params, scale, norm), opt_state, params)

        visit = Visit(_first, update, measure if norm is None else None)
        written = {name: (layers[name], states[name]) for name in layers}
        total, new, sums = walk(
            visit, written, dict.fromkeys(layers), no_squares(dtype), proceed=proceed, outer_gradient=norm is None
        )
        known = norm
        if known is None:
            g, known = total, norm_of(sums, total)
        new_outer = fenced(
            self.fence,
            lambda written, g: update(written, None, g),
            (outer, state.opt_state.outer),
            g,
            proceed=proceed,
        )
        metrics = {"loss": start.loss, "grad_norm": known, "skipped": jnp.asarray(False) if proceed is None else ~proceed}
        return self._state(new_outer, new, new_scale), metrics

    def in_state(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """All layers of a micro-batch, straight into the moments; the last micro-batch also updates the parameters."""
        if state.loss_scale is not None:
            raise RefusedError(
                "accumulation='state' puts a micro-batch into the moments before an overflow of a later one is known; leave "
                "accumulation out, or use bfloat16, which needs no loss scale."
            )
        tx: Any = self.tx
        outer, layers, states = self._parts(state)

        def walk(chunk: PyTree, visit: Visit, written: PyTree, read: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
            """The micro-batch's share of the mean loss, the outer gradient, what was written."""
            chunk = jax.tree.map(lambda leaf: leaf[None], chunk)
            passed = forward(self.stack, state.params, chunk, self.save_residuals)
            start = head(self.stack, outer, passed, chunk, self.microbatches, 1.0)
            if start.weight is not None:
                raise RefusedError(
                    "accumulation='state' needs the weight of the whole batch before the first gradient, so the loss cannot "
                    "be (sum, weight); return the mean, or leave accumulation out."
                )
            g, written, _ = backward(self.stack, outer, chunk, passed, start, visit, written, read, fence=self.fence)
            return start.loss, self._ready(g, outer), written

        def accumulate(held: PyTree, chunk: PyTree, first: bool = False) -> tuple[PyTree, jax.Array]:
            of_outer, of_layers = held

            def into(written: Moments, read: PyTree, g: PyTree) -> Moments:
                rest, params = read
                return in_state.accumulate(tx, written, rest, params, self._ready(g, params), first=first)

            read = {name: (rest[name], layers[name]) for name in layers}
            loss, g, of_layers = walk(chunk, Visit(lambda written, read: read[1], into), of_layers, read)
            return (into(of_outer, (outer_rest, outer), g), of_layers), loss

        def update(written: tuple[PyTree, AdamState], mean_square: PyTree, g: PyTree) -> tuple[PyTree, AdamState]:
            params, (count, mu, nu, compensation) = written
            moments, rest = Moments(mu, nu, mean_square), Rest(count, compensation)
            return in_state.update_last(tx, moments, rest, params, self._ready(g, params))

        outer_moments, outer_rest = taken_apart(state.opt_state.outer, outer, stacked=False)
        apart = {name: taken_apart(states[name], layers[name], stacked=True) for name in layers}
        moments, rest = {name: pair[0] for name, pair in apart.items()}, {name: pair[1] for name, pair in apart.items()}
        held, loss = accumulate((outer_moments, moments), at(batch, 0), first=True)
        if self.microbatches > 2:
            held, losses = lax.scan(accumulate, held, jax.tree.map(lambda leaf: leaf[1:-1], batch))
            loss += jnp.sum(losses)
        (mu, nu, mean_square), moments = held

        def joined(moments: Moments, rest: Rest) -> AdamState:
            return AdamState(rest.count, moments.mu, moments.nu, rest.compensation)

        last, g, new = walk(
            at(batch, -1),
            Visit(_first, update),
            {name: (layers[name], joined(moments[name], rest[name])) for name in layers},
            {name: moments[name].mean_square for name in layers},
        )
        new_outer = update((outer, joined(Moments(mu, nu, mean_square), outer_rest)), mean_square, g)
        return self._state(new_outer, new, None), {"loss": loss + last, "skipped": jnp.asarray(False)}

    def _ready(self, grads: PyTree, params: PyTree, scale: jax.Array | None = None, norm: jax.Array | None = None) -> PyTree:
        """Gradients as the transform gets them: unscaled, clipped, in the parameters' dtypes.

        Unscaled float16 gradients stay float32: they would be too small again.
        """
        if scale is not None:
            grads = jax.tree.map(lambda g: widened(g) / scale.astype(widened(g).dtype), grads)
        if norm is not None:
            grads = clipped(grads, norm, self.max_norm)

        def rounded(g: jax.Array, p: jax.Array) -> jax.Array:
            return g if scale is not None and p.dtype == jnp.float16 else g.astype(p.dtype)

        return jax.tree.map(rounded, grads, params)

    def _parts(self, state: TrainState) -> tuple[PyTree, dict[str, PyTree], dict[str, PyTree]]:
        """The outer parameters; by name of the stack the layers, and their optimizer states."""
        layers, states = (self.stack.named(tree) for tree in (state.params["layers"], state.opt_state.layers))
        return state.params["outer"], layers, states

    def _state(self, outer: tuple[PyTree, PyTree], layers: dict[str, tuple[PyTree, PyTree]], loss_scale: Any) -> TrainState:
        params, states = (self.stack.unnamed({name: pair[i] for name, pair in layers.items()}) for i in (0, 1))
        return TrainState({"outer": outer[0], "layers": params}, LayeredState(outer[1], states), loss_scale)


def _first(written: tuple[PyTree, PyTree], read: PyTree) -> PyTree:
    return written[0]
