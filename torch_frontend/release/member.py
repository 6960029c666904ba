"""`Member`: a released parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from ..communication.shards import distribute_like, local, shard_of
from .marker import ReleasedGradient
from .marker_context import MarkerContext


class Member:
    """A released parameter, and the marker that its gradient leaves in `.grad`.

    Attributes:
        key: id of the parameter.
        shard: description of the local part, None for a parameter that is not sharded.
        nbytes: size of the local gradient in bytes.
        marker: the `ReleasedGradient`.
        placeholder: what is put into `.grad`: the marker, for a sharded parameter a DTensor around it, or None where another
            hook, or DistributedDataParallel, must find the next gradient in `.grad`.
    """

    __slots__ = ("key", "marker", "nbytes", "parameter", "placeholder", "shard")

    def __init__(self, parameter: Tensor, context: MarkerContext) -> None:
        self.key = id(parameter)
        self.parameter = parameter
        self.placeholder: Tensor | None = None
        self.rebuild_marker(context)

    def rebuild_marker(self, context: MarkerContext) -> None:
        """Make the marker for the parameter's present shape, dtype, device and sharding."""
        here, self.shard = local(self.parameter), shard_of(self.parameter)
        self.nbytes = here.numel() * here.element_size()
        self.marker = ReleasedGradient(here, context, self.key)
        self.placeholder = self.marker
        if context.accepts_more and len(getattr(self.parameter, "_post_accumulate_grad_hooks", None) or ()) > 1:
            self.placeholder = None
        elif self.shard is not None:
            with torch.no_grad():
                self.placeholder = distribute_like(self.parameter.data, self.marker)
                self.marker = local(self.placeholder)

    def is_current(self) -> bool:
        """Whether the marker has the parameter's dtype and shape. Its device may change between the gradients of a pass."""
        mine, parameter = self.placeholder, self.parameter
        return mine is None or (mine.dtype is parameter.dtype and mine.shape == parameter.shape)

    def leave_marker(self) -> None:
        """Free the gradient, and leave in `.grad` the marker that says so."""
        try:
            self.parameter.grad = self.placeholder
        except RuntimeError:  # the parameter is on another device than the marker
            self.rebuild_marker(self.marker.context)
            self.parameter.grad = self.placeholder
