"""What torch 2.6 lacks to run FSDP2 on CPUs, where the tests run it: later versions have it of themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def provide() -> None:
    """Events of streams; copies of gathered parameters that autograd takes for no change; averages, which gloo has not."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups

    original: Any = groups.foreach_all_gather_copy_out

    def copy_out(result: Any, parameters: list[Any], group: Any) -> None:
        gathered = [tensor for parameter in parameters for tensor in getattr(parameter, "all_gather_outputs", [])]
        gathered += [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
        with contextlib.ExitStack() as versions:
            for tensor in gathered:
                versions.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            original(result, parameters, group)

    def divisors(scattered: Any, replicated: Any, dtype: Any) -> tuple[float, float]:
        return 1.0, float(scattered.size() * (replicated.size() if replicated is not None else 1))

    groups.foreach_all_gather_copy_out = copy_out
    collectives._get_gradient_divide_factors = divisors
    stream: Any = torch.cpu.Stream
    stream.record_event = lambda self: torch.cpu.Event()
    stream.wait_event = lambda self, event: None
    if not torch.cuda.is_available():
        torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
