"""The signatures and docstrings of the optimizers, made from their rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..core.rules import Rule
from .groups import own_defaults

COMMON = {
    "decouple_lr": False,
    "max_lr": None,
    "precision": "exact",
    "compensation": "auto",
    "seed": 0,
    "state_dtype": None,
    "backend": "auto",
    "on_nonfinite": "propagate",
    "maximize": False,
    "capturable": False,
    "gradient_release": False,
}
"""The arguments that every optimizer takes by name, and their defaults."""

_KERNELS = "leave it out: backend= chooses the kernels"
_INSTEAD = {
    "fused": _KERNELS,
    "foreach": _KERNELS,
    "triton": _KERNELS,
    "amsgrad": "leave it out: AMSGrad is not implemented",
    "differentiable": "leave it out: a step is not differentiable",
    "kahan_sum": 'give compensation="kahan", or leave it out: the default loses no small steps either',
}
"""What to write instead of arguments that torch.optim and optimi have."""

_DOCSTRING = """{summary}

{mathematics}

The arithmetic is float32 (float64 for float64 parameters), with one rounding at the end.

Args:
    params: tensors, named tensors, or groups of them; float64, float32, bfloat16 or float16, dense, any shape. A group may
        name another rule: {{"params": ..., "rule": "sgd", "momentum": 0.9}}; its own settings then have that rule's defaults.
    lr: step size: a number in [0, inf), or a 0-d tensor. Default: {lr}.
{own}
    decouple_lr: fully decoupled weight decay: scaled by lr/max_lr instead of lr. Refused for L2 regularisation.
    max_lr: highest learning rate of the schedule, in (0, inf). Default: each group's initial lr. `OneCycleLR` writes its own
        into the groups.
    precision: what is kept for each parameter: "exact", the defaults of the next arguments; "compact": 8-bit states, and of a
        bfloat16 parameter 8 of the 16 bits that it lacks ("auto8"), so that a step is rounded by chance at 2^-17 of it;
        "smallest": 8-bit states, and no bits ("stochastic"). AdamW of a bfloat16 matrix then keeps 10, 5.06 or 4.06 bytes.
    compensation: how low-precision parameters keep the bits that rounding loses: "none", "kahan" (in the parameter's dtype),
        "split" (bfloat16 and an int16 are together the exact float32), or "auto": split for bfloat16, kahan for float16.
        "split8" (bfloat16 and an int8) rounds what it does not keep up or down by chance, so that small steps are right in
        the mean, and "stochastic" keeps nothing and rounds so. "auto8": split8 for bfloat16, kahan for float16.
    seed: of the random bits, an int in [0, 2**32), where something is rounded by chance. It takes effect where a parameter has
        its first update; with the number of each update it determines them: the same seed gives the same run. Parameters that
        are given with names (`model.named_parameters()`) are told apart by these, others by their numbers.
    state_dtype: dtype of the state. Default: the parameter's, and float32 for a second moment that it cannot hold. A second
        moment in torch.bfloat16 that would not decay is rounded by chance. "8bit": codes of 8 bits in blocks of 128 elements
        of a row with a float32 scale; tensors of less than 2 dimensions, 4096 elements or 128 columns keep float32.
    backend: "auto", "triton", "compiled" or "eager". "auto" is triton on CUDA devices, for the rules that it has, and eager
        elsewhere; `.backend` tells which was chosen.
    on_nonfinite: what to do with a gradient that contains an infinity or a NaN: "propagate" it, "skip" the step and count it
        in `.skipped`, or "raise" before anything is changed. "skip" and "raise" wait for the device, except that
        backend="triton" with capturable=True skips without waiting.
    maximize: ascend instead of descend.
    capturable: keep the step counts on the parameters' device, so that a step can be captured in a CUDA graph.
    gradient_release: for `prepare_for_gradient_release`; new code calls `release_gradients` instead.

Raises:
    InvalidArgumentError: a value is out of its range; the text names it and the range.
    UnsupportedTensorError: a parameter is complex, integer or sparse, or a DTensor of partial sums.

Example:
    optimizer = {name}(model.parameters(), lr={lr})
    release_gradients(model, optimizer)  # optional: step inside backward(), and free each gradient
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Source: {source}
"""


Optimizer = TypeVar("Optimizer", bound=type)


def bound_arguments(
    rule: Rule, name: str, params: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a rule's optimizer, by their names.

    Raises:
        TypeError: the optimizer does not take them.
    """
    signature = signature_of(rule)
    try:
        return signature.bind(params, *args, **kwargs)
    except TypeError as error:  # which does not name what was called
        unknown = next((given for given in kwargs if given not in signature.parameters), None)
        remedy = f"; {_INSTEAD[unknown]}." if unknown in _INSTEAD else ""
        raise TypeError(f"{name}() {error}{remedy}") from None


def documented(optimizer: Optimizer) -> Optimizer:
    """Give an optimizer the signature of its rule, and after its one-line docstring what the rule says."""
    made: Any = optimizer
    made.__signature__, made.__doc__ = signature_of(made.rule), docstring_of(made.rule, made.__name__, made.__doc__)
    return optimizer


@functools.cache
def signature_of(rule: Rule) -> inspect.Signature:
    """Return the signature of a rule's optimizer: params, lr, what its defaults name in their order; all others by name."""
    by_position, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = {**own_defaults(rule), "weight_decay": rule.defaults["weight_decay"]}
    first = {"lr": rule.defaults.get("learning_rate", 1e-3), **{name: known[name] for name in _names_by_position(rule)}}
    return inspect.Signature(
        [
            inspect.Parameter("params", by_position),
            *(inspect.Parameter(name, by_position, default=default) for name, default in first.items()),
            *(inspect.Parameter(name, by_name, default=default) for name, default in COMMON.items()),
        ]
    )


def docstring_of(rule: Rule, name: str, summary: str) -> str:
    """Return the docstring of a rule's optimizer."""
    parameters = signature_of(rule).parameters
    lines = inspect.cleandoc(rule.mathematics).splitlines()
    return _DOCSTRING.format(
        summary=summary,
        mathematics="\n".join(f"    {line}" for line in lines),
        own="\n".join(f"    {line}" for line in _own_lines(rule)),
        lr=parameters["lr"].default,
        name=name,
        source=rule.source,
    )


def _own_lines(rule: Rule) -> Iterator[str]:
    """Yield the lines on the arguments that the rule's defaults name, in their order."""
    meanings, ranges = rule.hyperparameters.MEANINGS, rule.hyperparameters.RANGES
    betas = [name for name in rule.own_hyperparameters if name.startswith("beta")]
    decay = "L2 regularisation, added to the gradient" if rule.l2 else "decoupled weight decay"
    for name in _names_by_position(rule):
        if name == "betas":
            yield f"betas: {'; '.join(meanings[name] for name in betas)}; each in {ranges[betas[0]]}."
            yield f"    Default: {rule.betas}. They may change from step to step (`OneCycleLR`, `CyclicLR`), as in torch.optim."
            continue
        allowed = f", in {ranges[name]}" if name in ranges else ""
        yield f"{name}: {meanings.get(name, decay)}{allowed}. Default: {rule.defaults[name]}."


def _names_by_position(rule: Rule) -> list[str]:
    """Return the arguments after lr that may be given by position: those that the rule's defaults name, in their order."""
    names = (name for name in rule.defaults if name != "learning_rate")
    return list(dict.fromkeys("betas" if name.startswith("beta") else name for name in names))
