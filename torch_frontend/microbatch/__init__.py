"""Exact micro-batches with the gradient of one block alive: `microbatch_blocks`."""

from .blocks import MicrobatchedBlocks, microbatch_blocks

__all__ = ["MicrobatchedBlocks", "microbatch_blocks"]
