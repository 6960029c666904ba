"""Gradient release inside the training loops of other frameworks: one module each, which must be imported explicitly.

`transformers` has `ReleaseTrainer`, `accelerate` has `release_gradients(accelerator, ...)`, `lightning` has the callback
`GradientRelease`. They pass the framework's settings (clipping, micro-batches, loss scaling) to `release_gradients`.
"""
