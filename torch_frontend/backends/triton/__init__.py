"""The Triton backend: fused, deterministic kernels for GPUs. Nothing here imports Triton before a backend is made."""
