"""The Triton backend: fused, deterministic kernels for GPUs. Triton is imported when the first such backend is made."""
