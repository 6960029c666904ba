"""Counts the bytes of all live tensors at every operation, real or fake.

PyTorch's own `torch.distributed._tools.mem_tracker.MemTracker` finds the same peak for an ordinary step, but it is private, it
raises in a model under `microbatch_blocks` and at a second forward, and it warns at the empty `.grad` of a released parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # where torch keeps its extension point for this
from torch.utils._pytree import tree_leaves

OTHER = "activations and temporaries"


class LiveStorageMeter(TorchDispatchMode):
    """Counts the bytes of every live storage while operations run in this context.

        live = sum over storages of their bytes: those given by name, and those of every operation's result

    What a kernel allocates and frees inside one operation is not seen, nor what an allocator rounds up. Only weak
    references are kept. Gradients are told from the rest when backward hands them to their parameters.

    Args:
        named: tensors that are there already, by what they are called in `at_peak`.
        parameters: leaf tensors whose gradients are to be counted as "gradients".
        at_least: storages of fewer bytes are passed over.
    """

    def __init__(
        self, named: Mapping[str, Iterable[Tensor]] | None = None, parameters: Iterable[Tensor] = (), *, at_least: int = 0
    ) -> None:
        super().__init__()
        self._at_least = at_least
        self.live: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._handles: list[Any] = []
        for name, tensors in (named or {}).items():
            for tensor in tensors:
                self._see(tensor, name)
        self._note_peak()

    def __enter__(self) -> LiveStorageMeter:
        for parameter in self._parameters:
            self._handles.append(parameter.register_hook(lambda gradient: self._see(gradient, "gradients")))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and see its results, and its arguments: they may be results, too."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._see(leaf, None)
        self._note_peak()
        return result

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak = 0
        self._note_peak()

    def _note_peak(self) -> None:
        if sum(self.live.values()) <= self.peak:
            return
        for key in list(self._storages):  # some may have been resized since, as fully_shard does to free them
            reference, name, nbytes = self._storages[key]
            storage = reference()
            if storage is not None and storage.nbytes() != nbytes:
                self._book(key, storage, name)
        total = sum(self.live.values())
        if total > self.peak:
            self.peak, self.at_peak = total, {name: nbytes for name, nbytes in self.live.items() if nbytes}

    def _see(self, tensor: Tensor, name: str | None) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._storages.get(key)
        if known is None:
            if storage.nbytes() >= self._at_least:
                self._book(key, storage, name or OTHER)
        elif (name is not None and name != known[1]) or storage.nbytes() != known[2]:
            self._book(key, storage, name or known[1])

    def _book(self, key: int, storage: Any, name: str) -> None:
        if key in self._storages:
            self._forget(key)
        nbytes = storage.nbytes()
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), name, nbytes)
        self.live[name] = self.live.get(name, 0) + nbytes

    def _forget(self, key: int) -> None:
        _, name, nbytes = self._storages.pop(key)
        self.live[name] -= nbytes
