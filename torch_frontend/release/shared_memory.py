"""Parameters that share memory: an update of one changes another, whose layer may not have gone backward yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...core.errors import RefusedError
from ..backends.packed import extent
from ..communication.shards import local


def check_memory(model: nn.Module | None, optimized: Iterable[Tensor]) -> None:
    """Raise `RefusedError` if a parameter has an element in common with another one, as after `b.data = a.data`.

    autograd does not count such a write, so that backward would read the updated values without an error.

    Args:
        model: whose parameters backward reads, those that no optimizer has among them.
        optimized: the parameters that are updated, of any shape and dtype.
    """
    of_storage: dict[int, list[Tensor]] = defaultdict(list)
    names: dict[Tensor, str] = {} if model is None else {p: name for name, p in model.named_parameters()}
    updated = set(optimized)
    for parameter in updated.union(names):
        if not is_lazy(parameter) and (part := local(parameter)).numel() and part.layout is torch.strided:
            of_storage[part.untyped_storage()._cdata].append(parameter)  # not public: which storage
    for sharing in of_storage.values():
        earlier: list[Tensor] = []
        for parameter in sorted(sharing, key=_start):
            earlier = [other for other in earlier if _end(other) > _start(parameter)]
            for other in earlier:
                if not updated.isdisjoint((other, parameter)) and _have_common_elements(local(other), local(parameter)):
                    first, second = sorted(names.get(p, "(outside of the model)") for p in (other, parameter))
                    raise RefusedError(
                        f"parameters {first!r} and {second!r} share memory, so that a backward pass "
                        "would read one after an update of the other; make them one parameter (b.weight = a.weight) before the "
                        "optimizer is made, or give one of them its own memory (b.weight.data = a.weight.data.clone())."
                    )
            earlier.append(parameter)


def _start(parameter: Tensor) -> int:
    return local(parameter).storage_offset() * parameter.element_size()


def _end(parameter: Tensor) -> int:
    return _start(parameter) + extent(local(parameter))


def _have_common_elements(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common, which columns of one matrix have not."""
    if first.dtype != second.dtype:
        return True
    begin = min(first.storage_offset(), second.storage_offset())
    touched = torch.zeros(max(_end(first), _end(second)) // first.element_size() - begin, dtype=torch.bool)
    touched.as_strided(first.shape, first.stride(), first.storage_offset() - begin).fill_(True)
    return bool(touched.as_strided(second.shape, second.stride(), second.storage_offset() - begin).any())
