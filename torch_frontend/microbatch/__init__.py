"""`microbatch_blocks`: exact micro-batches with the gradients of one block alive."""

from .blocks import MicrobatchedBlocks, microbatch_blocks

__all__ = ["MicrobatchedBlocks", "microbatch_blocks"]
