"""Checks and measurements that need a GPU: correctness, determinism and speed of the Triton kernels, in one run."""
