"""The demonstration: one small language model, trained in PyTorch and in JAX, with and without gradient release."""
