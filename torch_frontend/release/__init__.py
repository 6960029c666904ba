"""Gradient release: hooks that run the optimizer's step for a parameter inside the backward pass.

The way of a gradient: `hooks` (called in the backward pass) -> `receivers` -> `stages`, as the `pipeline` composes them -> the
optimizer's update -> freed, with a `marker` in its place. Beside the way: `set_up` checks the arguments, and `release` is the
public face; `step` knows where every `member`, a released parameter, is; `pass_end` is the end of a backward, and `boundaries`
are step() and zero_grad(); `guard` runs two passes where clipping or loss scaling needs a look at the whole gradient first;
`queue` lets small updates share a launch.
"""

from ..communication.shards import is_released
from .hooks import owner_of, remove_orphaned_hooks
from .release import Release
from .set_up import release_gradients, release_leniently

__all__ = ["Release", "is_released", "owner_of", "release_gradients", "release_leniently", "remove_orphaned_hooks"]
