"""Operations of processes with parts of one model: all of them succeed, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ...core.errors import RefusedError

Result = TypeVar("Result")


def together(sharded: bool, action: Callable[[], Result], *, same: Callable[[Result], Any] = lambda _: None) -> Result:
    """The result of `action`; where parameters are sharded, an error of one process is raised on all.

    Args:
        sharded: whether there are other processes to ask.
        action: must not communicate.
        same: what of the result must be equal on all processes.

    Raises:
        RefusedError: another process failed, or has another result.
    """
    if not sharded:
        return action()
    try:
        result = action()
        told = repr(same(result))
    except Exception as error:
        _tell_all((str(error), ""))
        raise
    for rank, (text, other) in enumerate(_tell_all((None, told))):
        if text is not None:
            raise RefusedError(f"process {rank} failed: {text}")
        if other != told:
            raise RefusedError(
                f"process {rank} holds other parameters than this one, or was called with other arguments; give every process "
                "the same call, and parts of the same model (stages of a pipeline are not)."
            )
    return result


def _tell_all(answer: tuple[str | None, str]) -> list[tuple[str | None, str]]:
    """Return the answers of all processes, in order."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def writes(sharded: bool) -> bool:
    """Whether this process is the one that writes: any that is alone, or the first."""
    return not sharded or dist.get_rank() == 0
