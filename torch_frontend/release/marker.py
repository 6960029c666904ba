"""The marker that a released gradient leaves in `.grad`: a tensor without storage that refuses to be used as a gradient.

The parameter was updated when its gradient existed. Code that clips `.grad` afterwards, adds to it, or steps with it, gets an
error at that line. Operations that change nothing pass: the norm, a clip or unscaling that was declared and is applied
already, and multiplication by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..autograd.passes import pass_number
from .marker_context import MarkerContext

_aten = torch.ops.aten
_NO_POINTER = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)  # not public: data_ptr() raises then


class ReleasedGradient(Tensor):
    """Marker for the gradient of one parameter, which was used and freed.

    Attributes:
        scale: loss scale that the reported norm is multiplied by until the gradient is unscaled.
        incoming: a further gradient that autograd has added; the hook takes it from here.
        key: the id of the parameter.
    """

    released = True  # see `shards.is_released`
    context: MarkerContext
    scale: float
    incoming: Tensor | None
    key: int

    @staticmethod
    def __new__(cls, like: Tensor, context: MarkerContext, key: int, device: Any = None) -> ReleasedGradient:
        """Make a marker with the shape, strides and dtype of `like`, on `device` or that of `like`."""
        layout: dict[str, Any] = {"strides": like.stride(), "dtype": like.dtype, "device": device or like.device}
        marker = torch.Tensor._make_wrapper_subclass(cls, like.shape, **layout)
        _NO_POINTER(marker)
        return marker

    def __init__(self, like: Tensor, context: MarkerContext, key: int, device: Any = None) -> None:
        self.context, self.key = context, key
        self.scale, self.incoming = 1.0, None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer for the norm, let operations pass that change nothing, and refuse all others."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        marker = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise marker.context.refuse(marker, str(func.overloadpacket).removeprefix("aten."))

    def like(self, other: Tensor, device: Any) -> ReleasedGradient:
        """Return a marker for the same gradient with the shape and dtype of `other`."""
        found = ReleasedGradient(other, self.context, self.key, device)
        found.scale = self.scale
        return found

    def norm_now(self) -> Tensor:
        """The 2-norm, 0-d, at least float32."""
        square = self.context.square(self.key)
        if square is None or not self.context.knows_norms:
            when = "with micro-batches in the moments" if self.context.accepts_more else "before the second pass of guard()"
            raise self.context.refuse(self, f"its norm, which is not known {when},")
        norm = square.sqrt()
        if self.scale != 1.0:
            norm = norm * self.scale
        if norm.dtype is torch.float64 and self.dtype is not torch.float64:  # finite, unless the gradient is not
            norm = torch.where(norm.isfinite(), norm.clamp(max=torch.finfo(torch.float32).max), norm).to(torch.float32)
        return norm

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedGradient({self.context.describe(self.key)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied parameter has no gradient: None."""

    @property
    def data(self) -> ReleasedGradient:
        """The marker itself. Only a conversion of the model, such as `model.to(...)`, may assign to it."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ReleasedGradient):
            raise self.context.refuse(self, "assigning to its .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    # These read memory without passing through __torch_dispatch__.

    def _refuse_memory(self, *args: Any, **kwargs: Any) -> Any:
        raise self.context.refuse(self, "access to its memory")

    __reduce_ex__ = __dlpack__ = numpy = tolist = data_ptr = _typed_storage = storage = _refuse_memory

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage, for the compiler and memory trackers."""
        return torch.UntypedStorage(0, device="meta")

    def share_memory_(self) -> ReleasedGradient:
        """Do nothing, so that a model with released gradients can be shared between processes."""
        return self


def _itself(func: Any, marker: ReleasedGradient, *args: Any, **kwargs: Any) -> ReleasedGradient:
    return marker


def _zeroed(func: Any, marker: ReleasedGradient) -> ReleasedGradient:
    """Handle `model.zero_grad(set_to_none=False)`."""
    if marker.context.strict:
        raise marker.context.refuse(marker, "setting it to zero")
    return marker


def _viewed(func: Any, marker: ReleasedGradient, size: Sequence[int]) -> ReleasedGradient:
    return marker.like(torch.empty(marker.shape, dtype=marker.dtype, device="meta").view(size), marker.device)


def _converted(func: Any, marker: ReleasedGradient, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """Handle `model.to(...)`, which converts gradients, too."""
    shape = torch.empty_strided(marker.shape, marker.stride(), dtype=dtype or marker.dtype, device="meta")
    return marker.like(shape, device or marker.device)


def _norm(func: Any, tensor: ReleasedGradient, ord: Any = 2, dim: Any = None, keepdim: Any = False, **kwargs: Any) -> Tensor:
    if ord not in (2, None) or dim or keepdim:
        asked = "a part of it" if ord in (2, None) else f"order {ord}"
        raise tensor.context.refuse(tensor, f"its norm of {asked} (known is that of order 2, of the whole gradient),")
    norm = tensor.norm_now()
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _norms(func: Any, tensors: Sequence[Tensor], ord: Any = 2, **kwargs: Any) -> list[Tensor]:
    return [
        _norm(func, x, ord, **kwargs) if isinstance(x, ReleasedGradient) else torch.linalg.vector_norm(x, ord, **kwargs)
        for x in tensors
    ]


def _multiplied(func: Any, tensor: Tensor, factor: Any) -> Tensor:
    if not isinstance(tensor, ReleasedGradient):
        assert isinstance(factor, ReleasedGradient)
        raise factor.context.refuse(factor, "multiplication with it")
    if isinstance(factor, Tensor) and (isinstance(factor, ReleasedGradient) or factor.numel() != 1):
        raise tensor.context.refuse(tensor, "multiplication by a tensor")
    tensor.context.check_factor(tensor, float(factor), "multiplication")
    return tensor


def _divided(func: Any, tensor: Tensor, divisor: Any) -> Tensor:
    single = not isinstance(divisor, Tensor) or (not isinstance(divisor, ReleasedGradient) and divisor.numel() == 1)
    if isinstance(tensor, ReleasedGradient) and single and float(divisor) != 0:
        tensor.context.check_factor(tensor, 1.0 / float(divisor), "multiplication")
        return tensor
    return _multiplied(func, tensor, divisor)


def _all_multiplied(func: Any, tensors: Sequence[Tensor], factors: Any) -> None:
    several = factors if isinstance(factors, (list, tuple)) else [factors] * len(tensors)
    pairs = list(zip(tensors, several, strict=True))
    for tensor, factor in pairs:
        if isinstance(tensor, ReleasedGradient):
            _multiplied(func, tensor, factor)
    for tensor, factor in pairs:
        if not isinstance(tensor, ReleasedGradient):
            tensor.mul_(factor)


def _unscaled(func: Any, tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Handle `GradScaler.unscale_` of a declared scaler: report non-finite gradients, and unscale the norms."""
    markers = [tensor for tensor in tensors if isinstance(tensor, ReleasedGradient)]
    for marker in markers:
        context = marker.context
        if context.finite:
            context.check_factor(marker, float(inv_scale), "unscaling")
        if not context.finite or not math.isfinite(context.squares.get(marker.key, 0.0)):
            found_inf.fill_(1.0)
    func([tensor for tensor in tensors if not isinstance(tensor, ReleasedGradient)], found_inf, inv_scale)


def _copied(func: Any, tensor: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """Refuse a copy, such as DistributedDataParallel's of the average into `.grad`."""
    if not isinstance(tensor, ReleasedGradient):
        raise source.context.refuse(source, "copying it")
    raise tensor.context.refuse(
        tensor, "what is copied into `.grad` (by a DistributedDataParallel that release_gradients was not given)"
    )


def _added_to(func: Any, tensor: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """Handle autograd's addition of a further gradient to `.grad`."""
    if not isinstance(tensor, ReleasedGradient):
        raise other.context.refuse(other, "adding it to another tensor")
    if not isinstance(other, Tensor) or other.shape != tensor.shape or isinstance(other, ReleasedGradient):
        raise tensor.context.refuse(tensor, "an addition")
    if tensor.context.accepts_more and (alpha != 1 or pass_number() == -1):
        raise tensor.context.refuse(tensor, "an addition")
    if not tensor.context.accepts_more:
        tensor.context.after_refusal()
        raise tensor.context.second_gradient(tensor)
    tensor.incoming = other
    return tensor


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _itself,
    _aten.alias.default: _itself,
    _aten.view.default: _viewed,
    _aten._to_copy.default: _converted,
    _aten.zero_.default: _zeroed,
    _aten._foreach_zero_.default: lambda func, tensors: [x.zero_() for x in tensors] and None,
    _aten.linalg_vector_norm.default: _norm,
    _aten.norm.Scalar: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _multiplied,
    _aten.mul_.Scalar: _multiplied,
    _aten.div_.Tensor: _divided,
    _aten.div_.Scalar: _divided,
    _aten._foreach_mul_.Tensor: _all_multiplied,
    _aten._foreach_mul_.Scalar: _all_multiplied,
    _aten._foreach_mul_.ScalarList: _all_multiplied,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    _aten.copy_.default: _copied,
    _aten.add_.Tensor: _added_to,
    _aten.add.Tensor: _added_to,  # with create_graph=True
}
