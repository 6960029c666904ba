"""Small tensors together, through torch's foreach functions: the operations of the eager backend with fewer calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.moments import SMALLEST_NORMAL_FLOAT32, is_zero
from .backend import TensorSlot
from .numbers import UpdateNumbers

SMALL = 2**14
"""Elements of a small tensor, at most: calling an operation then costs about as much as the operation."""

TOGETHER = 2**18
"""Elements that are updated together, at most; two temporaries of this size are alive."""

Pair = tuple[TensorSlot, Tensor]

foreach: Any = torch  # its foreach functions are documented, but for type checkers they are private


def update_small(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Update the small tensors that need no cast, and give back the others."""
    alike: dict[Any, list[Pair]] = {}
    for slot, gradient in pairs:
        parameter, state, dtype = slot.parameter, slot.state, slot.compute_dtype
        plain = parameter.dtype is dtype and gradient.dtype is dtype and not slot.capturable
        plain = plain and state["exp_avg"].dtype is dtype and state["exp_avg_sq"].dtype is dtype
        if not plain or not 0 < parameter.numel() <= SMALL:
            yield slot, gradient
            continue
        key = (slot.rule.name, id(slot.settings), slot.step_number, dtype, parameter.device)
        alike.setdefault(key, []).append((slot, gradient))
    for (_, _, step, dtype, _), group in alike.items():
        lead = group[0][0]
        numbers = lead.settings.numbers(lead.rule, step, dtype)
        start = elements = 0
        for end, (slot, _) in enumerate(group):
            elements += slot.parameter.numel()
            if elements > TOGETHER:
                _update(group[start:end], numbers)
                start, elements = end, slot.parameter.numel()
        _update(group[start:], numbers)


def _update(group: Sequence[Pair], numbers: UpdateNumbers) -> None:
    """`core.update.update` of a first micro-batch, as in `eager`; every list is in the order of the group."""
    rule, current = group[0][0].rule, group[0][0].settings.hyperparameters
    parameters = [slot.parameter for slot, _ in group]
    gradients: Any = [gradient for _, gradient in group]
    exp_avgs = [slot.state["exp_avg"] for slot, _ in group]
    exp_avg_sqs = [slot.state["exp_avg_sq"] for slot, _ in group]
    if current.maximize:
        gradients = foreach._foreach_neg(gradients)
    if rule.l2 and not is_zero(current.weight_decay):
        gradients = foreach._foreach_add(gradients, foreach._foreach_mul(parameters, current.weight_decay))
    if is_zero(current.beta1):  # `core.moments.remembered`
        foreach._foreach_zero_(exp_avgs)
    if is_zero(current.beta2):
        foreach._foreach_zero_(exp_avg_sqs)
    change = foreach._foreach_sub(gradients, exp_avgs)
    foreach._foreach_mul_(change, numbers.first)
    foreach._foreach_add_(exp_avgs, change)
    change = foreach._foreach_mul(gradients, gradients)
    foreach._foreach_sub_(change, exp_avg_sqs)
    foreach._foreach_mul_(change, numbers.second)
    foreach._foreach_add_(exp_avg_sqs, change)
    etas: Any = numbers.learning_rate
    if rule.clips_update:
        floored = foreach._foreach_clamp_min(exp_avg_sqs, max(current.eps * current.eps, SMALLEST_NORMAL_FLOAT32))
        ratios = foreach._foreach_div(gradients, floored)
        foreach._foreach_mul_(ratios, gradients)
        sizes = torch.tensor([ratio.numel() for ratio in ratios], dtype=ratios[0].dtype, device=ratios[0].device)
        squares = torch.stack([ratio.sum() for ratio in ratios]).div_(sizes)
        etas = torch.div(numbers.learning_rate, squares.sqrt_().clamp_(min=1.0)).unbind()
    roots = foreach._foreach_sqrt(exp_avg_sqs)
    foreach._foreach_add_(roots, numbers.eps)
    steps = foreach._foreach_div(exp_avgs, roots)
    if numbers.decay is not None:
        foreach._foreach_add_(steps, foreach._foreach_mul(parameters, numbers.decay))
    foreach._foreach_mul_(steps, etas)
    foreach._foreach_sub_(parameters, steps)
