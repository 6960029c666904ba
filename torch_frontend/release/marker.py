"""What a released gradient leaves in `.grad`: a tensor without storage that refuses to be used as a gradient.

A parameter was updated when its gradient existed. Whoever looks at `.grad` afterwards, to clip it, to add to it, or to step
with it, is told so at that line. What changes nothing passes: its norm is known, a declared clip or unscaling is applied
already, and a factor of one is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...core.errors import RefusedError
from ..autograd.passes import pass_number
from ..clipping import NORM_EPS

ROUNDINGS = 8
"""Roundings that a declared factor may differ by: unscaling, a norm, a division, a product."""

_aten = torch.ops.aten
_NO_POINTER = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)  # not public: data_ptr() raises then


class Disclosure:
    """What a release says of the gradients that it has released: one object a release, which all its markers share.

    It holds no parameter: torch's collector does not see a cycle that leads through `.grad`.

    Args:
        describe: how an error names a parameter, by its id.
        takes_more: further gradients of a parameter go into its moments, instead of being refused.
        tells_norms: the gradient that was used is the whole one, so that its norm means something.
        strict: what clears gradients before the step is closed is refused: they were used.
        max_norm: the declared global norm, if any.
        scaled: losses are scaled by a declared GradScaler.
    """

    def __init__(
        self,
        describe: Callable[[int], str],
        *,
        takes_more: bool = False,
        tells_norms: bool = True,
        strict: bool = True,
        max_norm: float | None = None,
        scaled: bool = False,
    ) -> None:
        self.describe = describe
        self.takes_more = takes_more
        self.tells_norms = tells_norms
        self.strict = strict
        self.max_norm = max_norm
        self.scaled = scaled
        self.squares: dict[int, Tensor] = {}  # by parameter: the sum of its gradient's squares, of the local part, unscaled
        self.norm: Tensor | None = None  # of all gradients, unscaled and before clipping, where it was known beforehand
        self.finite = True
        self.after_refusal: Callable[[], None] = lambda: None  # clears what else of a refused backward is there
        self.judged = False  # guard() has looked at the whole gradient of this step

    def refuse(self, marker: ReleasedGradient, operation: str) -> RefusedError:
        """The error for a use that would change what was used already, or needs its elements."""
        return RefusedError(
            f"{self.describe(marker.key)}: its gradient was used and freed during backward(), and {operation} comes too late. "
            "Gradients that are clipped, scaled or changed after backward() must be declared: clipping as "
            "release_gradients(max_norm=...) with release.guard(loss), loss scaling as scaler=..., hooks on the parameters "
            "before release_gradients. A backward inside release.paused() leaves real gradients; optimizer.step() or "
            "optimizer.zero_grad() closes this step."
        )

    def second_gradient(self, marker: ReleasedGradient) -> RefusedError:
        """The error for another gradient of a parameter that was updated already."""
        return RefusedError(
            f"{self.describe(marker.key)}: a second backward() before optimizer.step(): it was already updated in this step. "
            "Call optimizer.step() after each backward; or add the losses up and call backward() once; or "
            "declare the micro-batches with accumulation='hold' or 'state'; or wrap a backward that is not meant to update it "
            "in release.paused(). If this was one backward, reentrant checkpointing has delivered the gradient in parts: use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )

    def check_factor(self, marker: ReleasedGradient, factor: float, operation: str) -> None:
        """Raise `RefusedError` unless multiplying the gradient by this changes nothing that is not declared."""
        if factor == 1.0 or self._means_nothing(factor):
            return
        norm = None if self.norm is None else float(self.norm)
        tolerance = ROUNDINGS * torch.finfo(torch.float32 if marker.dtype is torch.float64 else marker.dtype).eps
        if self.scaled and marker.scale != 1.0 and abs(factor * marker.scale - 1.0) <= tolerance:
            marker.scale = 1.0
            return
        if self.max_norm is not None and norm is not None:
            now = norm * marker.scale
            declared = min(1.0, self.max_norm / (now + NORM_EPS))
            if abs(factor - declared) <= tolerance * declared:
                return
        raise self.refuse(marker, f"{operation} by {factor:.6g}")

    def _means_nothing(self, factor: float) -> bool:
        """Whether the factor is what a declared clip makes of a norm that is not finite: nothing was used then."""
        return not self.finite and not (math.isfinite(factor) and factor != 0)


class ReleasedGradient(Tensor):
    """The gradient of one parameter, gone.

    Attributes:
        scale: what its norm is multiplied by until it is unscaled.
        incoming: a further gradient, which the hook takes from here.
        key: the id of the parameter.
    """

    released = True  # see `shards.is_released`
    disclosure: Disclosure
    scale: float
    incoming: Tensor | None
    key: int

    @staticmethod
    def __new__(cls, like: Tensor, disclosure: Disclosure, key: int, device: Any = None) -> ReleasedGradient:
        """A marker of this tensor's shape, strides and dtype, on the device or where the tensor is."""
        layout: dict[str, Any] = {"strides": like.stride(), "dtype": like.dtype, "device": device or like.device}
        marker = torch.Tensor._make_wrapper_subclass(cls, like.shape, **layout)
        _NO_POINTER(marker)
        return marker

    def __init__(self, like: Tensor, disclosure: Disclosure, key: int, device: Any = None) -> None:
        self.disclosure, self.key = disclosure, key
        self.scale, self.incoming = 1.0, None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what is known, let through what changes nothing, refuse everything else."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        marker = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise marker.disclosure.refuse(marker, str(func.overloadpacket).removeprefix("aten."))

    def like(self, other: Tensor, device: Any) -> ReleasedGradient:
        """The same gradient in this tensor's shape and dtype, on this device."""
        found = ReleasedGradient(other, self.disclosure, self.key, device)
        found.scale = self.scale
        return found

    def norm_now(self) -> Tensor:
        """The 2-norm, 0-d, at least float32."""
        square = self.disclosure.squares.get(self.key)
        if square is None or not self.disclosure.tells_norms:
            raise self.disclosure.refuse(self, "its norm, which is not known with micro-batches in the moments,")
        norm = square.sqrt()
        if self.scale != 1.0:
            norm = norm * self.scale
        if norm.dtype is torch.float64 and self.dtype is not torch.float64:  # finite, unless the gradient is not
            norm = torch.where(norm.isfinite(), norm.clamp(max=torch.finfo(torch.float32).max), norm).to(torch.float32)
        return norm

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedGradient({self.disclosure.describe(self.key)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied parameter has no gradient."""

    @property
    def data(self) -> ReleasedGradient:
        """Itself. Only a conversion of the model, as `model.to(...)`, may assign to it."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ReleasedGradient):
            raise self.disclosure.refuse(self, "assigning to its .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    # What reads memory without a dispatch is refused here.

    def _refuse_memory(self, *args: Any, **kwargs: Any) -> Any:
        raise self.disclosure.refuse(self, "access to its memory")

    __reduce_ex__ = __dlpack__ = numpy = tolist = data_ptr = _typed_storage = storage = _refuse_memory

    def untyped_storage(self) -> torch.UntypedStorage:
        """Empty; the compiler and memory trackers look at it."""
        return torch.UntypedStorage(0, device="meta")

    def share_memory_(self) -> ReleasedGradient:
        """There is nothing to share: a model with released gradients can be shared as any."""
        return self


def _itself(func: Any, marker: ReleasedGradient, *args: Any, **kwargs: Any) -> ReleasedGradient:
    return marker


def _zeroed(func: Any, marker: ReleasedGradient) -> ReleasedGradient:
    """`model.zero_grad(set_to_none=False)`."""
    if marker.disclosure.strict:
        raise marker.disclosure.refuse(marker, "setting it to zero")
    return marker


def _viewed(func: Any, marker: ReleasedGradient, size: Sequence[int]) -> ReleasedGradient:
    return marker.like(torch.empty(marker.shape, dtype=marker.dtype, device="meta").view(size), marker.device)


def _converted(func: Any, marker: ReleasedGradient, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """`model.to(...)` converts gradients, too."""
    shape = torch.empty_strided(marker.shape, marker.stride(), dtype=dtype or marker.dtype, device="meta")
    return marker.like(shape, device or marker.device)


def _norm(func: Any, tensor: ReleasedGradient, ord: Any = 2, dim: Any = None, keepdim: Any = False, **kwargs: Any) -> Tensor:
    if ord not in (2, None) or dim or keepdim:
        raise tensor.disclosure.refuse(tensor, f"its norm of order {ord} (only the norm of order 2 is known),")
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
        raise factor.disclosure.refuse(factor, "multiplication with it")
    if isinstance(factor, Tensor) and (isinstance(factor, ReleasedGradient) or factor.numel() != 1):
        raise tensor.disclosure.refuse(tensor, "multiplication by a tensor")
    tensor.disclosure.check_factor(tensor, float(factor), "multiplication")
    return tensor


def _divided(func: Any, tensor: Tensor, divisor: Any) -> Tensor:
    single = not isinstance(divisor, Tensor) or (not isinstance(divisor, ReleasedGradient) and divisor.numel() == 1)
    if isinstance(tensor, ReleasedGradient) and single and float(divisor) != 0:
        tensor.disclosure.check_factor(tensor, 1.0 / float(divisor), "multiplication")
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
    """`GradScaler.unscale_`: a declared one finds out whether the gradients are finite, and their norms are unscaled."""
    markers = [tensor for tensor in tensors if isinstance(tensor, ReleasedGradient)]
    for marker in markers:
        disclosure = marker.disclosure
        if disclosure.finite:
            disclosure.check_factor(marker, float(inv_scale), "unscaling")
        if not disclosure.finite or not math.isfinite(disclosure.squares.get(marker.key, 0.0)):
            found_inf.fill_(1.0)
    func([tensor for tensor in tensors if not isinstance(tensor, ReleasedGradient)], found_inf, inv_scale)


def _copied(func: Any, tensor: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """DistributedDataParallel copies the average into `.grad`."""
    if not isinstance(tensor, ReleasedGradient):
        raise source.disclosure.refuse(source, "copying it")
    raise tensor.disclosure.refuse(
        tensor, "what is copied into `.grad` (by a DistributedDataParallel that release_gradients was not given)"
    )


def _added_to(func: Any, tensor: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """Autograd adds a further gradient of the parameter to what is in `.grad`."""
    if not isinstance(tensor, ReleasedGradient):
        raise other.disclosure.refuse(other, "adding it to another tensor")
    if not isinstance(other, Tensor) or other.shape != tensor.shape or isinstance(other, ReleasedGradient):
        raise tensor.disclosure.refuse(tensor, "an addition")
    if tensor.disclosure.takes_more and (alpha != 1 or pass_number() == -1):
        raise tensor.disclosure.refuse(tensor, "an addition")
    if not tensor.disclosure.takes_more:
        tensor.disclosure.after_refusal()
        raise tensor.disclosure.second_gradient(tensor)
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
