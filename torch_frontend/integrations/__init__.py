"""Gradient release inside other people's training loops: one module for each framework, imported only by who uses it.

`transformers` has `ReleaseTrainer`, `accelerate` has `release_gradients(accelerator, ...)`, `lightning` has the callback
`GradientRelease`. They bring what their framework knows (clipping, micro-batches, loss scaling) to `release_gradients`.
"""
