"""The training step for stacked layers: every layer is updated inside the backward pass, and its gradient is freed."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import optax

from ...core.errors import InvalidArgumentError, RefusedError
from ..direct import apply_directly, as_transformation
from ..donation import DonatingFunction
from ..loss_scaling import after_step
from ..losses import with_aux
from ..microbatches import check_microbatches, chunks
from ..norms import Squares, check_max_norm, no_squares, norm_dtype, squares
from ..separability import check_separable
from ..sharding import sharded_like
from ..state import PyTree
from ..train_state import LayeredState, TrainState, check_made_by, check_train_state
from .fence import fenced, resolve_fence
from .in_state import in_state_step
from .layer_stack import LayerStack, by_name, check_parameters, number_of_layers
from .members import check_in_state
from .passes import Arrays, backward, forward, head
from .stacked import at
from .step_settings import StepSettings, joined_state, split_state

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
    has_aux: bool = False,
    whole: Collection[str] = (),
) -> DonatingFunction:
    r"""Return a jitted training step (state, batch) -> (state, metrics) that releases gradients layer by layer.

        forward over the layers;  for i = last..first:  g_i = dL/d layer_i;  layer_i, its state <- tx(g_i);  g_i is freed

    The state is donated. The result is that of the plain gradient and one update of each layer by itself (tx vectorised over
    the layer axis). One layer's gradient is alive, and that of the outer parameters, which are updated at the end. A stack of
    one layer, or of so few that the gradients of all take no more memory than the optimizer state of one (two with Adam), is
    updated at once, after its gradients: there a walk, which copies the state of one layer, would take more.

    Args:
        stack: the model.
        tx: an Optax transform that can be applied layer by layer (`check_separable`). It gets the tree of one layer, or
            the outer parameters: masks and labels must be functions of such a tree.
        microbatches: number of equal chunks into which the leading axis of every leaf of the batch is split (a single typed
            PRNG key, too): n chunks of every n-th row, so that rows sharded over devices stay there. For each layer they run
            one after the other, and their gradients are averaged in float32 (float64 for float64 parameters) before the
            layer's update: exact.
        max_norm: largest global norm of the gradient, in (0, inf); None: no clipping. Exact: a first walk measures the norm,
            a second one updates. What is not finite propagates, as in `make_train_step`.
        accumulation: None: exact, as above. "state": the micro-batches run one after the other through the whole model, and
            their gradients are added to the moments at once (AdamA): activations of one micro-batch only. With one micro-batch
            that is exact; with K it is an approximation: v gets the squares of the K shares g/K, a K-th of their mean square.
            Where the micro-batches are noise, a step is as long as an exact one (adamw, learning rate 1e-2, K = 4: 2.3e-3 for
            2.3e-3 after 100 steps); where they agree it is sqrt(K) times as long (2.0e-2 for 1.0e-2): take a lower learning
            rate there, or leave this out. Exact are the steps of rules whose state is linear in the gradient: sgd with momentum
            and muon, without nesterov. For penstock's own transforms, and optax.partition of them, unchained.
        save_residuals: False: each layer's activations are computed again going backward, and only its inputs are saved.
            True: what its backward pass needs is saved.
        fence: what separates reads of old slices from writes of new ones: "auto" (by jax.default_backend() when traced),
            "conditional" (CPU), "barrier" (GPU, TPU) or "none".
        has_aux: the stack's loss returns (loss, aux), as for jax.grad, and the metrics have "aux": any tree of arrays, which is
            not differentiated; with micro-batches those of each, with a leading axis of micro-batches.
        whole: names in the batch ("positions", or "context.mask") of what every micro-batch is given as it is, not split.

    Returns:
        A jitted function, with .lower and .trace. state comes from `init_train_state`. metrics are 0-d arrays: "loss", the mean
        before the update; "grad_norm", the global norm before clipping (not with accumulation="state", which never knows
        the whole gradient); "skipped", a boolean: True when nothing was changed, because the loss had a total weight that is
        not positive, or, with a loss scale in the state, the gradient's norm was not finite. With a loss scale, as with
        max_norm, a first walk finds that out.

    Raises:
        InvalidArgumentError: an argument out of range, tx that is not a transform; when traced, parameters without a common
            layer axis, a layer that changes its x, a loss that is not a scalar, a batch that cannot be split evenly, a state
            without a layer axis or of another transform; at a step, an array that was deleted, or is to be donated twice.
        UnsupportedTensorError: when traced, parameters that are not floating-point.
        RefusedError: accumulation="state" with max_norm, a loss scale, a WeightedMean or another transform; when traced,
            a transform that is not separable, or changes the updates of a compensated one.

    Example:
        step = make_release_step(LayerStack(embed, layer, loss), tx, microbatches=4, max_norm=1.0)
        state, metrics = step(init_train_state(tx, {"outer": outer, "layers": layers}), batch)

    References:
        Lv et al., Full parameter fine-tuning with limited resources, https://arxiv.org/abs/2306.09782 (release);
        Zhang et al., AdamA, https://arxiv.org/abs/2305.19982.
    """
    if not isinstance(stack, LayerStack):
        raise InvalidArgumentError(f"stack is a {type(stack).__name__}, not a LayerStack; give LayerStack(embed, layer, loss).")
    as_transformation(tx)  # raises
    check_microbatches(microbatches, whole)
    check_max_norm(max_norm)
    if accumulation not in _ACCUMULATIONS:
        raise InvalidArgumentError(f"accumulation={accumulation!r} is not known; it must be None (exact) or 'state'.")
    if accumulation == "state":
        check_in_state(tx)
        if max_norm is not None:
            raise RefusedError(
                "accumulation='state' adds a micro-batch to the moments before the norm of the whole gradient is known; "
                "leave accumulation out (microbatches alone are exact), or use StableAdamW, which needs no clipping."
            )

    resolve_fence(fence)  # raises

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(stack, tx, state)
        settings = StepSettings(stack, tx, microbatches, max_norm, save_residuals, resolve_fence(fence), has_aux)
        accumulates = accumulation == "state" and microbatches > 1
        run = in_state_step if accumulates else exact_step
        new, metrics = run(settings, state, chunks(batch, microbatches, whole))
        return sharded_like(new, state), metrics

    return DonatingFunction(step, "state")


def _check_state(model: LayerStack, tx: optax.GradientTransformation, state: TrainState) -> None:
    check_train_state(state)
    check_parameters(model, state.params)
    again = "make the state with init_train_state(tx, params, stack=stack)."
    if not isinstance(state.opt_state, LayeredState):
        raise InvalidArgumentError(f"the optimizer state has no layer axis; {again}")
    layers, states = state.params["layers"], state.opt_state.layers
    named = by_name(model, layers)
    if isinstance(model.layer, Mapping) and not (isinstance(states, dict) and states.keys() == named.keys()):
        raise InvalidArgumentError(f"the optimizer state is not one of the stacks {sorted(named)}; {again}")
    for name, opt_state in by_name(model, states).items():
        count = {leaf.shape[:1] for leaf in jax.tree.leaves(named[name])}
        if {leaf.shape[:1] for leaf in jax.tree.leaves(opt_state)} - count:
            raise InvalidArgumentError(f"the optimizer state has another layer axis than the parameters; {again}")
    kinds = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), named)
    outer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.params["outer"])
    pairs = [(outer, state.opt_state.outer), *((kinds[name], opt_state) for name, opt_state in by_name(model, states).items())]
    for tree, opt_state in pairs:
        check_made_by(tx, tree, opt_state)
        check_separable(tx, tree)


def _takes_less_at_once(layers: PyTree, opt_state: PyTree) -> bool:
    """Return whether the gradients of all layers take no more memory than the optimizer state of one, which a walk copies.

    A single layer never does, as XLA keeps no loop and no fence for it. Low precision of several always does: on a CPU the
    update of a whole stack is computed in float32.
    """

    def size(tree: PyTree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    count, low = number_of_layers(layers), any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(layers))
    return count == 1 or (not low and count * size(layers) <= size(opt_state))


def exact_step(settings: StepSettings, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run all micro-batches of a layer, then update it; a first walk measures the norm where it is needed before.

    Args:
        settings, state: of the step.
        batch: with a leading axis of micro-batches.
    """
    model, fence = settings.model, settings.fence
    outer, layers, states = split_state(model, state)
    dtype, scale = norm_dtype(state.params), None if state.loss_scale is None else state.loss_scale.scale
    passed = forward(model, state.params, batch, settings.save_residuals, fence)
    start = head(model, outer, passed, batch, settings.microbatches, 1.0 if scale is None else scale, settings.has_aux)
    proceed = None if start.weight is None else start.weight > 0  # false of NaN
    walk = functools.partial(backward, model, outer, batch, passed, start, sums=no_squares(dtype), fence=fence)
    new_scale, outer_g, norm = state.loss_scale, None, None
    nothing: dict[str, Arrays] = {name: {} for name in layers}

    def measure(sums: Squares, g: PyTree) -> Squares:
        return sums + squares(g, dtype)

    def norm_of(sums: Squares, outer_g: PyTree) -> jax.Array:
        return measure(sums, outer_g).norm / (1.0 if scale is None else scale)

    if settings.max_norm is not None or scale is not None:
        outer_g, _, sums = walk(nothing, {name: {"params": layers[name]} for name in layers}, measure=measure)
        norm = norm_of(sums, outer_g)
    if state.loss_scale is not None and norm is not None:
        finite = jnp.isfinite(norm)
        new_scale = after_step(state.loss_scale, finite, True if proceed is None else proceed)
        proceed = finite if proceed is None else proceed & finite

    def update(arrays: Arrays, g: PyTree) -> Arrays:
        g = settings.ready(g, arrays["params"], scale, norm)
        params, opt_state = apply_directly(settings.tx, g, arrays["opt_state"], arrays["params"])
        return {"params": params, "opt_state": opt_state}

    total, new, sums = walk(
        {name: {"params": layers[name], "opt_state": states[name]} for name in layers},
        nothing,
        update=update,
        measure=measure if norm is None else None,
        proceed=proceed,
        outer_gradient=norm is None,
        at_once=[name for name in layers if _takes_less_at_once(layers[name], states[name])],
    )
    known = norm
    if known is None:
        outer_g, known = total, norm_of(sums, total)
    new_outer = fenced(fence, update, {"params": outer, "opt_state": state.opt_state.outer}, outer_g, proceed=proceed)
    pairs = {name: (arrays["params"], arrays["opt_state"]) for name, arrays in new.items()}
    new_state = joined_state(model, (new_outer["params"], new_outer["opt_state"]), pairs, new_scale)
    skipped = jnp.asarray(False) if proceed is None else ~proceed
    aux = start.aux if settings.microbatches > 1 else at(start.aux, 0)
    return new_state, with_aux({"loss": start.loss, "grad_norm": known, "skipped": skipped}, settings.has_aux, aux)
