"""Gradient release: hooks that run the optimizer's step for a parameter inside the backward pass."""

from .hooks import active_releases, remove_orphaned_hooks
from .release import Release
from .set_up import lenient_release, release_gradients

__all__ = ["Release", "active_releases", "lenient_release", "release_gradients", "remove_orphaned_hooks"]
