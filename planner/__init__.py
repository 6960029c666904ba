"""The memory of a training step: planned on fake tensors (`penstock plan`), and measured in a running step."""
