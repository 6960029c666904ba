"""Jitted functions that donate arguments: a call is jax.jit's, and the errors of jax are explained."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..core.errors import InvalidArgumentError, PenstockError, UnsupportedTensorError
from .buffers import Buffer, buffers, check_alive, is_array_like, is_concrete
from .state import PyTree

_BUFFER_REFUSED = re.compile("delet|donat", re.IGNORECASE)
"""In the errors of all versions of jax for an array that was deleted, or a buffer that is donated twice."""

_LEAF_REFUSED = re.compile("as an abstract array")
"""In the errors of all versions of jax for a leaf that is not an array."""


class DonatingFunction:
    """A jitted function that donates some of its arguments.

    A call is jax.jit's own and checks no leaf. Where jax refuses an array, nothing has been donated, and an error that names
    the array and the remedy is raised from jax's.
    """

    def __init__(self, function: Callable[..., Any], *donated: str, keep_unused: bool = False) -> None:
        """Jit a function.

        Args:
            function: the function.
            donated: names of the arguments that are donated.
            keep_unused: pass arguments that the computation does not read, too, so that jax notices memory shared with them.
        """
        functools.update_wrapper(self, function)
        self._function, self._donated = function, donated
        self.jitted = jax.jit(function, donate_argnames=donated, keep_unused=keep_unused)
        """The function that jax.jit returned."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the jitted function.

        Raises:
            InvalidArgumentError: an array was deleted, or shares memory with one that is donated.
            UnsupportedTensorError: a leaf is not an array.
        """
        if _several_cpu_devices() and _spread((args, kwargs)):
            self._check_buffers(args, kwargs)  # jax would crash
        try:
            return self.jitted(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            for pattern, check in ((_BUFFER_REFUSED, self._check_buffers), (_LEAF_REFUSED, self._check_leaves)):
                if pattern.search(str(error)):
                    try:
                        check(args, kwargs)
                    except PenstockError as explained:
                        raise explained from error
            raise

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the function for these arguments, as `lower` of jax.jit does."""
        return self.jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the function for these arguments, as `trace` of jax.jit does."""
        return self.jitted.trace(*args, **kwargs)

    def _check_buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `InvalidArgumentError` unless every array is alive and none shares memory with one that is donated."""
        owners: dict[Buffer, tuple[str, bool]] = {}
        for root, name, leaf in self._leaves(args, kwargs):
            donated = root in self._donated
            check_alive(leaf, name, donated=donated)
            for buffer in buffers(leaf):
                owner, owner_donated = owners.setdefault(buffer, (name, donated))
                if owner != name and (donated or owner_donated):
                    raise InvalidArgumentError(
                        f"{owner} and {name} are the same memory, which is donated; give one of them its own with jnp.copy."
                    )

    def _check_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `UnsupportedTensorError` unless every leaf is an array or a number."""
        for _, name, leaf in self._leaves(args, kwargs):
            if not is_array_like(leaf):
                raise UnsupportedTensorError(
                    f"{name} is {type(leaf).__name__}, which is not an array; leave it out of the argument, and let the "
                    "function read it by closure."
                )

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield the argument's name, the leaf's name, and the leaf, for all leaves of a call."""
        signature = inspect.signature(self._function)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        for root, tree in arguments.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                yield root, root + jax.tree_util.keystr(path), leaf


@functools.cache
def _several_cpu_devices() -> bool:
    """Return whether an array may be on several CPU devices.

    With such arrays jaxlib 0.9 and 0.10 end the process where they should refuse a buffer
    (https://github.com/openxla/xla/pull/45682), so their buffers are checked before every call.
    """
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def _spread(tree: PyTree) -> bool:
    """Return whether an array of a tree is on more than one device."""
    return any(is_concrete(leaf) and len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(tree))
