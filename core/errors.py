"""What penstock raises. Every text names what was wrong and what to do instead."""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose."""


class InvalidArgumentError(PenstockError, ValueError):
    """An argument has a value outside of its range. Raised before anything is changed."""


class UnsupportedTensorError(PenstockError, TypeError):
    """A parameter or gradient is of a kind that the optimizers cannot update (sparse, complex, integer)."""


class RefusedError(PenstockError, RuntimeError):
    """A request or an order of calls that cannot be met exactly; the text names the remedy. Nothing was changed."""


class NonFiniteGradientError(PenstockError, FloatingPointError):
    """A gradient holds an infinity or a NaN and ``on_nonfinite="raise"`` was asked for. Nothing was changed."""


class MissingDependencyError(PenstockError, ImportError):
    """A frontend needs a package that is not installed; the text names the extra that brings it."""


def not_installed(user: str, packages: str, extra: str) -> MissingDependencyError:
    """Return the error for packages that `user` needs, which an extra of penstock installs."""
    return MissingDependencyError(f"{user} needs {packages}; in a clone of penstock run: pip install '.[{extra}]'")


def in_wrong_order(**given: object) -> InvalidArgumentError:
    """Return the error for arguments, by name and in their order, that were given in another one."""
    kinds = ", ".join(f"{name} is {type(argument).__name__}" for name, argument in given.items())
    return InvalidArgumentError(
        f"the arguments are in another order than ({', '.join(given)}): {kinds}; give them in this order."
    )
