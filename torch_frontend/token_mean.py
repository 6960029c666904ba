"""The mean over all tokens of micro-batches and processes with different numbers of tokens.

The mean of the micro-batches' means is wrong: tokens of a short micro-batch would count for more. The denominator is
therefore computed before the first backward (https://github.com/huggingface/transformers/issues/34191).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidArgumentError

Weight = Tensor | float


def total_weight(weights: Weight | Iterable[Weight], *, process_group: Any = None) -> Tensor:
    """Add up the weights of all micro-batches of a step on all processes: the denominator of `token_mean`.

        total = sum over processes and micro-batches of weight

    With several processes this is a collective, which every process must call once a step.

    Args:
        weights: of one micro-batch, or of all of a step's, each a number or a 0-d tensor: how many tokens its loss is the sum
            over, or the sum of the tokens' weights. Exact for whole numbers below 2^53.
        process_group: over which gradients are averaged; None: the default one, where there is one.

    Returns:
        0-d, float64 (float32 on devices without it), on the device of the first weight that is a tensor.

    Raises:
        InvalidArgumentError: no weights, or one that is not a single number.
    """
    given = [weights] if isinstance(weights, (Tensor, int, float)) else list(weights)
    if not given:
        raise InvalidArgumentError("weights is empty; give the weight of every micro-batch of the step.")
    tensors = [weight for weight in given if isinstance(weight, Tensor)]
    for weight in given:
        if not isinstance(weight, (Tensor, int, float)) or (isinstance(weight, Tensor) and weight.numel() != 1):
            raise InvalidArgumentError(f"weights holds {weight!r}; each must be a number or a tensor with one element.")
    device = tensors[0].device if tensors else torch.device("cpu")
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    for weight in given:
        total = total + (weight.detach().reshape(()).to(device, dtype) if isinstance(weight, Tensor) else weight)
    if _processes(process_group) > 1:
        torch.distributed.all_reduce(total, group=process_group)
    return total


def token_mean(loss_sum: Tensor, total: Weight, *, process_group: Any = None) -> Tensor:
    """Return a micro-batch's share of the mean loss over all tokens of a step; the shares' gradients add up to the mean's.

        token_mean = loss_sum * processes / total

    The factor `processes` makes up for the average of gradients over processes (by DistributedDataParallel, fully_shard or
    gradient release). Call backward() on each micro-batch's share, and step() after the last.

    Args:
        loss_sum: 0-d, the sum (not the mean) of the losses of this micro-batch's tokens, weighted if they have weights.
        total: from `total_weight`, over all micro-batches and processes of this step.
        process_group: as for `total_weight`.

    Returns:
        0-d, float32 (float64 for a float64 loss). Summed over micro-batches and averaged over processes, it is the mean loss.

    Raises:
        InvalidArgumentError: the loss is not 0-d, or a total on the CPU is not positive. (A total on a device is not checked:
            without any tokens the loss is NaN, as the mean of torch.nn.functional.cross_entropy is.)
    """
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        raise InvalidArgumentError(
            "loss_sum must be a 0-d tensor: the sum of the micro-batch's token losses, with reduction='sum'."
        )
    if isinstance(total, Tensor) and total.requires_grad:
        raise InvalidArgumentError("total requires a gradient; count the tokens without one (total_weight does).")
    known = not isinstance(total, Tensor) or total.device.type == "cpu"
    if known and not (float(total) > 0 and math.isfinite(total)):
        raise InvalidArgumentError(f"total={float(total)} must be a positive number: the weight of all tokens of the step.")
    dtype = torch.promote_types(loss_sum.dtype, torch.float32)
    factor = _processes(process_group) / total
    return loss_sum.to(dtype) * (factor.to(loss_sum.device, dtype) if isinstance(factor, Tensor) else factor)


def _processes(process_group: Any) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size(process_group)
