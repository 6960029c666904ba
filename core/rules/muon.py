"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalised by Newton-Schulz iterations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from ..array_ops import Array, ArrayOps
from ..hyperparameters import DECAY, FLAG, POSITIVE, Constant, Hyperparameters, Scalar
from .rule import Entered, Field, Fields, Rule, entered_mean


def _are_three_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(type(one) in (int, float) and abs(one) < 1e30 for one in value)


THREE_NUMBERS = Constant("three numbers", _are_three_numbers)
STEPS = Constant("an int in [1, 100)", lambda value: type(value) is int and 1 <= value < 100)
SCALES = Constant(
    "None, 'original', 'match_rms_adamw' or 'spectral_unclamped'",
    lambda value: value is None or str(value) in ("original", "match_rms_adamw", "spectral_unclamped"),
)
NS_DTYPES = Constant("'bfloat16' or 'float32'", lambda value: str(value) in ("bfloat16", "float32"))
AXES = Constant("0 or 1", lambda value: type(value) is int and value in (0, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonHyperparameters(Hyperparameters):
    """Those of Muon.

    Args:
        momentum: decay of the mean gradient, in [0, 1).
        nesterov: orthogonalise g + momentum*(m-g) instead of m.
        ns_coefficients: (a, b, c) of one Newton-Schulz iteration.
        eps: the smallest norm by which a matrix is divided, in (0, inf).
        ns_steps: number of iterations.
        adjust_lr_fn: by what the step is multiplied.
        ns_dtype: of the iterations.
        output_axis: of the matrices.
    """

    momentum: Annotated[Scalar, DECAY, "decay of the mean gradient"]
    nesterov: Annotated[bool, FLAG, "orthogonalise g + momentum*(m-g) instead of m"]
    ns_coefficients: Annotated[
        tuple[float, float, float],
        THREE_NUMBERS,
        "(a, b, c) of an iteration X <- a*X + (b*X*X^T + c*(X*X^T)^2)*X",
    ]
    eps: Annotated[Scalar, POSITIVE, "the smallest norm by which a matrix is divided"]
    ns_steps: Annotated[int, STEPS, "number of iterations, an int in [1, 100)"]
    adjust_lr_fn: Annotated[
        str | None,
        SCALES,
        "what the step is multiplied by: 'original' (None, too), sqrt(max(1, outputs/inputs)); 'match_rms_adamw', "
        "0.2*sqrt(max(outputs, inputs)), with which AdamW's lr and weight_decay fit; 'spectral_unclamped', "
        "sqrt(outputs/inputs)",
    ]
    ns_dtype: Annotated[
        str,
        NS_DTYPES,
        "of the iterations: 'bfloat16', or 'float32' (float64 for float64 parameters)",
    ]
    output_axis: Annotated[
        int,
        AXES,
        "the axis of a matrix that counts outputs, for 'original': 0 where y = W x (torch.nn.Linear), 1 where y = x W",
    ]


class Corrections(NamedTuple):
    """momentum and 1-momentum: Muon does not debias, as a matrix is divided by its norm."""

    kept: Scalar
    entering: Scalar


def corrections(current: MuonHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """momentum and 1-momentum, in every update."""
    return Corrections(current.momentum, 1.0 - current.momentum)


def accumulate(
    current: MuonHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Fields:
    """Put a micro-batch into the momentum; a later one only adds to it."""
    _, entering = corrections
    return (entered_mean(fields[0], current.momentum, entering, gradient, xp, first=first),)


def heavy_ball(
    current: MuonHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return the momentum."""
    return fields[0]


def nesterov(current: MuonHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any) -> Array:
    """Return g + momentum*(m-g)."""
    assert entered is not None  # `Rule.needs_gradient`
    kept, _ = corrections
    return entered.gradient + kept * (fields[0] - entered.gradient)


def orthogonalised(ops: ArrayOps, current: MuonHyperparameters, direction: Array) -> Array:
    r"""Return s*X after `ns_steps` iterations, which move the singular values of X = direction/||direction|| towards 1.

        X <- a*X + (b*A + c*A*A)*X        A = X*X^T

    of the transposed matrix if it has more rows than columns. Its numbers are divided by the largest of them before they are
    squared, so that no norm overflows.

    Args:
        direction: a whole matrix, in the compute dtype.
    """
    (rows, columns), xp, compute = direction.shape, ops.xp, ops.dtype_name(direction)
    if not rows * columns:
        return direction
    x = direction.T if rows > columns else direction
    x = x / xp.clip(xp.max(xp.abs(x)), current.eps, None)
    x = x / xp.clip(xp.sqrt(xp.sum(x * x)), 1.0, None)
    x = ops.cast(x, "bfloat16" if current.ns_dtype == "bfloat16" else compute)
    a, b, c = current.ns_coefficients
    for _ in range(current.ns_steps):
        gram = ops.addmm(None, x, x.T)
        x = ops.addmm(x, ops.addmm(gram, gram, gram, b, c), x, a)
    return scale(current, (rows, columns)) * ops.cast(x.T if rows > columns else x, compute)


def scale(current: MuonHyperparameters, shape: tuple[int, int]) -> float:
    """Return what a matrix of this shape is multiplied by."""
    outputs, inputs = shape[current.output_axis], shape[1 - current.output_axis]
    if current.adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    ratio = outputs / inputs
    return math.sqrt(ratio if current.adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


HEADS = frozenset({"head", "lm_head", "logits_dense", "classifier", "score", "embed_out"})
"""Names of modules that compute a model's output."""

EMBEDDINGS = frozenset({"wte", "wpe"})
"""Names of embeddings without "emb" in them: GPT-2's."""

VECTORS = frozenset({"bias", "scale"})
"""Names of parameters that are vectors, also where layers are stacked or a bias is [heads, width]."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon is meant for a parameter, by what its name tells: a matrix, but no embedding, head, bias or scale.

    Args:
        name: its parts are separated by dots.
        shape: of one layer's parameter.
    """
    parts = name.lower().split(".")
    if len(shape) != 2 or parts[-1] in VECTORS:
        return False
    return (HEADS | EMBEDDINGS).isdisjoint(parts) and not any("emb" in part for part in parts)


def chosen(own: Mapping[str, Any]) -> Rule:
    """Return the row of these settings."""
    return MUON if own["nesterov"] else MUON_MOMENTUM


MUON = Rule(
    name="muon",
    title="Muon: momentum, orthogonalised matrix by matrix",
    mathematics="""
        m <- momentum*m + (1-momentum)*g        u = g + momentum*(m-g)        without nesterov: u = m
        X = u/max(||u||, eps)        ns_steps times: A = X*X^T, X <- a*X + (b*A + c*A*A)*X
        p <- p - lr*(s*X + weight_decay*p)        s = sqrt(max(1, outputs/inputs)), or 0.2*sqrt(max(outputs, inputs))
    """,
    source="Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., 2025, https://arxiv.org/abs/2502.16982.",
    fields=(Field("momentum_buffer", is_mean=True),),
    hyperparameters=MuonHyperparameters,
    defaults={
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "ns_dtype": "bfloat16",
        "output_axis": 0,
    },
    corrections=corrections,
    accumulate=accumulate,
    direction=nesterov,
    of_matrix=orthogonalised,
    needs_gradient=True,
    variant=chosen,
)
MUON_MOMENTUM = dataclasses.replace(
    MUON,
    name="muon_momentum",
    defaults={**MUON.defaults, "nesterov": False},
    direction=heavy_ball,
    needs_gradient=False,
    linear=True,
)
