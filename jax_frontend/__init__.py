"""The JAX frontend: the optimizers as ordinary Optax transforms, and training steps that donate their state.

    tx = optax.chain(optax.zero_nans(), stable_adamw(1e-3))
    update = make_update(tx)                       # (grads, state, params) -> (params, state); the arguments are deleted
    step = make_train_step(loss_fn, tx)            # (state, batch) -> (state, metrics); the state is donated
    step = make_release_step(stack, tx)            # the same for layers stacked along an axis: one layer's gradient alive

XLA interleaves backward pass and update of an *unrolled* model by itself once everything is donated; `make_train_step`
is that step. A `lax.scan` over stacked layers keeps all their gradients until it ends: `make_release_step` walks back over the
layers itself, and updates each one as soon as its gradient exists. All of them update by `direct.apply_directly`.
"""

from importlib.util import find_spec

from ..core.codings import EightBit
from ..core.errors import not_installed

for _package in ("jax", "optax"):
    if find_spec(_package) is None:
        raise not_installed("penstock.jax_frontend", _package, "jax")

from .compensation import compensated  # noqa: E402  (only after the check)
from .loss_scaling import LossScale, dynamic_loss_scale  # noqa: E402
from .losses import WeightedMean  # noqa: E402
from .portable import export_state, import_state  # noqa: E402
from .release_layers import release_layers  # noqa: E402
from .released_layers import ReleasedLayers  # noqa: E402
from .separability import check_separable  # noqa: E402
from .state import CompensatedState, RuleState, RuleStateWithBetas, Stochastic  # noqa: E402
from .train_state import LayeredState, TrainState, init_train_state  # noqa: E402
from .train_step import make_train_step  # noqa: E402
from .transforms import (  # noqa: E402
    adam,
    adamw,
    adan,
    lion,
    muon,
    param_labels_for_muon,
    radam,
    ranger,
    scale_by_stable_adam,
    sgd,
    stable_adamw,
)
from .update import make_update  # noqa: E402
from .walk.layer_stack import Layers, LayerStack  # noqa: E402
from .walk.release_step import make_release_step  # noqa: E402

__all__ = [
    "CompensatedState",
    "EightBit",
    "LayerStack",
    "LayeredState",
    "Layers",
    "LossScale",
    "ReleasedLayers",
    "RuleState",
    "RuleStateWithBetas",
    "Stochastic",
    "TrainState",
    "WeightedMean",
    "adam",
    "adamw",
    "adan",
    "check_separable",
    "compensated",
    "dynamic_loss_scale",
    "export_state",
    "import_state",
    "init_train_state",
    "lion",
    "make_release_step",
    "make_train_step",
    "make_update",
    "muon",
    "param_labels_for_muon",
    "radam",
    "ranger",
    "release_layers",
    "scale_by_stable_adam",
    "sgd",
    "stable_adamw",
]
