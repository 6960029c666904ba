"""What only a GPU can tell: correctness, determinism and speed of the Triton kernels on the device, in one run."""
