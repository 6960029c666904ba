r"""The optimizers: ordinary Optax transforms with Optax's argument names, made from the rules.

Arithmetic is in float32 (float64 for float64 parameters), weight decay is folded into the step, and updates have the
parameter's dtype. Nothing in a state aliases a parameter. A transform here negates and scales by the learning rate itself; only
`scale_by_stable_adam` leaves both to `optax.scale_by_learning_rate`.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import rules
from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import HIGH_FULLY_DECOUPLED_DECAY, Scalar
from ..core.precision import chosen
from ..core.rules import Field, Rule
from ..core.rules.muon import is_hidden_matrix
from ..core.rules.sgd import SGD_MOMENTUM
from .arguments import NAMES, Arguments, Mask, ScalarOrSchedule, dtype_argument
from .rule_transform import transformation
from .state import PyTree
from .walk.layer_stack import looks_stacked

Transform = Callable[..., optax.GradientTransformationExtraArgs]

_DTYPES = {
    "mu_dtype": """dtype of the first moment, or momentum. "8bit": 1.03 bytes an element, an int8 code and a share of the
    float32 scale of 128 elements, off by at most 0.8% of the largest of them, and 0.08% for an element of a hundredth of that.
    Vectors, and matrices of less than 4096 elements or 128 columns, are float32 then. None: the parameter's.""",
    "nu_dtype": """dtype of the second moment. "8bit", as for mu_dtype: rounded up or down by chance to one of two codes,
    which are 1.6% apart for the largest of 128 elements and 6% for one of a 250th, so that the mean is right. bfloat16 is
    rounded by chance, too, where 1-b2 < 2^-7 or b2 is not known yet; float16 is refused. None: the parameter's, but float32
    for float16 parameters, and for bfloat16 parameters where bfloat16 would be rounded by chance.""",
}

_INSTEAD = {
    "lr": "write learning_rate=",
    "betas": "write b1= and b2=",
    "state_dtype": "write mu_dtype= and nu_dtype=",
    "eps_root": "leave it out: eps is added to the root of the second moment",
    "nesterov": "leave it out: this rule has no Nesterov momentum",
}
"""What to write instead of arguments that the PyTorch optimizers or Optax's transforms have."""

_DOCSTRING = """Return {title}.

{mathematics}

The learning rate lr is learning_rate.{notes} All arguments after {last} are given by name.

Args:
    learning_rate: step size, in [0, inf): a number, a 0-d array, or a schedule of the 0-based count of updates.
{own}
    weight_decay: {decay}; in [0, inf), a number or a schedule. Default: {weight_decay}.
    mask: where weight decay applies: a tree of booleans like params or a prefix of it, or a function from params to one.
        None: to all parameters.
{dtypes}
    decouple_lr: fully decoupled decay: scaled by lr/max_lr instead of lr. Choose a correspondingly lower weight_decay. Refused
        for L2 regularisation.
    max_lr: highest learning rate of the schedule, in (0, inf). Default: learning_rate, where that is a number; a schedule
        needs it given.
    precision: what is kept for each parameter: "exact", the defaults of the dtypes and of compensation; "compact": 8-bit states
        and compensation="auto8"; "smallest": 8-bit states and compensation="stochastic". adamw of a bfloat16 matrix then keeps
        10, 5.06 or 4.06 bytes.
    compensation: how low-precision parameters keep the bits that rounding loses: "auto" (split for bfloat16, kahan for
        float16; "auto8": split8 and kahan), "kahan", "split" (bfloat16 only) or "none"; "split8" (bfloat16 only) keeps 8 of
        split's 16 bits, and rounds the others up or down by chance; "stochastic" keeps nothing, and rounds the parameter up or
        down by chance, so that small steps are right in the mean. Unless it is "none", the transform must be the last of a
        chain, and with low-precision parameters no wrapper around it may change its updates (`optax.lookahead`,
        `optax.contrib.schedule_free`); `compensated` says why.
    seed: of the random bits, an int in [0, 2**32), where something is rounded by chance. With a parameter's path, from which
        init makes its key, and the number of the update it determines them. None: 0.

`optax.inject_hyperparams` turns the numbers into arrays of the parameters' dtype. Give it hyperparam_dtype=jnp.float32 where
that is bfloat16 or float16: {own_names} are refused where they are rounded. They may then change from update to update, as in
Optax's transforms{keeps}.

Returns:
    A transform with a `RuleState`; fields in 8 bits are an `EightBit` (codes, scale) there. Its update needs params, unless
    weight_decay is 0 and nothing is compensated.

Raises:
    InvalidArgumentError: a value is out of its range; params are missing in an update that needs them, or a gradient has
        another shape than its parameter.
    UnsupportedTensorError: at init, a parameter is not a floating-point array; at an update, a gradient is not.

Example:
    tx = {name}(1e-3)
    state = tx.init(params)
    update = make_update(tx)  # jitted, donates its arguments
    params, state = update(grads, state, params)

References:
    {source}
"""


def transform_of(rule: Rule, notes: str = "", fields: tuple[Field, ...] | None = None, **defaults: Any) -> Transform:
    """Return the function that makes the transforms of a rule.

    Args:
        rule: what they compute.
        notes: what its docstring says besides.
        fields: that it may keep, where they are others than the rule's.
        defaults: where Optax's differ from the rule's.
    """
    signature = _signature(rule, rule.fields if fields is None else fields, {**rule.defaults, **defaults})
    own = {NAMES.get(name, name): name for name in rule.own_hyperparameters}

    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # which does not name what was called
            unknown = next((name for name in kwargs if name not in signature.parameters), None)
            remedy = f"; {_INSTEAD[unknown]}." if unknown in _INSTEAD else ""
            raise TypeError(f"{rule.name}() {error}{remedy}") from None
        dtypes = [name for name in signature.parameters if name in _DTYPES]
        bound.apply_defaults()
        given = bound.arguments
        by_user = {n: given[n] for n in ("compensation", *dtypes) if given[n] != signature.parameters[n].default}
        preset = chosen(given.pop("precision"), by_user)
        values = {name: given.pop(argument) for argument, name in own.items()}
        row = rule.row(values)
        if not by_user:
            given |= {"compensation": preset.compensation} | dict.fromkeys(dtypes, preset.state_dtype if row.fields else None)
        if given["decouple_lr"] and row.l2:
            raise InvalidArgumentError(
                f"decouple_lr=True is not possible for {rule.name}, whose weight_decay is L2 regularisation inside the "
                "gradient; use adamw, or decoupled_weight_decay=True."
            )
        arguments = Arguments(row, own=values, **given)
        _warn_of_decay(arguments)
        return transformation(arguments)

    made: Any = make
    made.__name__ = made.__qualname__ = rule.name
    made.__signature__, made.__doc__ = signature, _docstring(rule, signature, notes)
    return make


def _signature(rule: Rule, fields: tuple[Field, ...], defaults: dict[str, Any]) -> inspect.Signature:
    """Return learning_rate, the rule's own hyperparameters, and all others by name."""
    by_position, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    own = rule.own_hyperparameters
    dtypes = dict.fromkeys(map(dtype_argument, fields))
    named = {"mask": None, **dtypes, "decouple_lr": False, "max_lr": None}
    named |= {"precision": "exact", "compensation": "auto", "seed": None}
    return inspect.Signature(
        [
            inspect.Parameter("learning_rate", by_position),
            *(inspect.Parameter(NAMES.get(name, name), by_position, default=defaults[name]) for name in own),
            inspect.Parameter("weight_decay", by_name, default=defaults["weight_decay"]),
            *(inspect.Parameter(name, by_name, default=default) for name, default in named.items()),
        ]
    )


def _docstring(rule: Rule, signature: inspect.Signature, notes: str) -> str:
    own, parameters = [], signature.parameters
    arguments = [NAMES.get(name, name) for name in rule.own_hyperparameters]
    for name, meaning in rule.hyperparameters.MEANINGS.items():
        allowed = f", in {rule.hyperparameters.RANGES[name]}" if name in rule.hyperparameters.RANGES else ""
        argument = NAMES.get(name, name)
        own.append(f"{argument}: {meaning}{allowed}. Default: {parameters[argument].default}.")
    return _DOCSTRING.format(
        title=rule.title,
        mathematics="\n".join(f"    {line}" for line in inspect.cleandoc(rule.mathematics).splitlines()),
        notes=notes and f" {notes}",
        last=["learning_rate", *arguments][-1],
        own="\n".join(f"    {line}" for line in own),
        dtypes="\n".join(
            f"    {name}: {about}".replace("\n", "\n    ") for name, about in _DTYPES.items() if name in parameters
        ),
        decay="L2 regularisation, added to the gradient" if rule.l2 else "multiplied by the learning rate, unless decouple_lr",
        own_names=" and ".join(", ".join(arguments).rsplit(", ", 1)),
        keeps="; the state is then a `RuleStateWithBetas`, which keeps b1 and b2"
        if any(field.beta for field in rule.fields)
        else "",
        weight_decay=parameters["weight_decay"].default,
        name=rule.name,
        source=rule.source,
    )


def _warn_of_decay(arguments: Arguments) -> None:
    decay = arguments.weight_decay
    if arguments.decouple_lr and isinstance(decay, numbers.Real) and float(decay) >= HIGH_FULLY_DECOUPLED_DECAY:
        warnings.warn(
            f"weight_decay={decay!r} is high for decouple_lr=True, where it is not multiplied by the learning rate; "
            f"values below {HIGH_FULLY_DECOUPLED_DECAY:g} are usual.",
            UserWarning,
            stacklevel=3,
        )


_PER_LEAF = (
    "The mean is over one leaf of the tree. A leaf that stacks several layers is one tensor here; vmap init and update over "
    "the layer axis to clip each layer by itself."
)

_MATRICES = (
    "It takes matrices only: `param_labels_for_muon` says which parameters those are. A stack of layers is orthogonalised "
    "layer by layer where each layer is updated by itself (`init_train_state` with stacked layers), or under vmap."
)

stable_adamw = transform_of(rules.STABLE_ADAMW, _PER_LEAF)
adamw = transform_of(rules.ADAMW, weight_decay=1e-4)  # as optax.adamw; PyTorch's AdamW has 1e-2
adam = transform_of(rules.ADAM)
lion = transform_of(rules.LION, weight_decay=1e-3)  # as optax.lion
sgd = transform_of(rules.SGD, fields=SGD_MOMENTUM.fields)
radam = transform_of(rules.RADAM)
adan = transform_of(rules.ADAN)
ranger = transform_of(rules.RANGER)
muon = transform_of(rules.MUON, _MATRICES, weight_decay=0.0, output_axis=1)  # as optax.contrib.muon


def param_labels_for_muon(params: PyTree) -> PyTree:
    """Return labels for `optax.partition`: "muon" for the matrices of hidden layers, "adamw" for all else.

    "adamw" are leaves that have not two dimensions, those that are called bias or scale, those with "emb" in their path, and
    those below wte, wpe, head, lm_head, logits_dense, classifier, score or embed_out. Look at the labels: an embedding or a
    head with another name needs a function of your own. Of {"outer": ..., "layers": ...} as a whole the leaves of layers count
    without their layer axis; of other trees no layer axis is known, and a stack of vectors counts as a matrix.

    Args:
        params: any tree of arrays, also of one layer.

    Returns:
        A tree of the same structure.

    Example:
        rules = {"muon": muon(2e-2), "adamw": adamw(3e-4)}
        tx = optax.partition(rules, param_labels_for_muon)

    References:
        https://kellerjordan.github.io/posts/muon/
    """
    stacked = looks_stacked(params)

    def label(path: Any, leaf: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")  # flax.nnx ends paths so
        axes = 1 if stacked and path[0].key == "layers" else 0
        return "muon" if is_hidden_matrix(name, jnp.shape(leaf)[axes:]) else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def scale_by_stable_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-6,
    *,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Return the direction of StableAdamW, to be chained with `optax.scale_by_learning_rate`.

        (m/(sqrt(v)+eps) + weight_decay*p) / max(1, sqrt(mean(g*g / max(v, eps^2))))

    The clip factor applies to the decay, too, which is therefore an argument here instead of an
    `optax.add_decayed_weights` in the chain. The direction is not negated, has the parameter's dtype, and cannot be
    compensated, since it is not what is added to the parameter; wrap the whole chain in `compensated` for that.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
        mu_dtype: dtype of the first moment, or "8bit"; as in `stable_adamw`.
        nu_dtype: dtype of the second moment, or "8bit"; as in `stable_adamw`, with the random bits of seed 0.
        weight_decay: in [0, inf), a number or a schedule.
        mask: where weight decay applies: a tree of booleans like params or a prefix of it, or a function from params to
            one. None: to all parameters.

    Returns:
        A transform with a `RuleState`. Its update needs params, unless weight_decay is 0.

    Raises:
        InvalidArgumentError: a value out of its range; an update without the params it needs.
        UnsupportedTensorError: at init, a parameter is not a floating-point array.
    """
    own = {"beta1": b1, "beta2": b2, "eps": eps}
    return transformation(
        Arguments(rules.STABLE_ADAMW, 1.0, own, weight_decay, mask, mu_dtype, nu_dtype, compensation="none", scales_only=True),
    )
