"""Penstock: gradient release for PyTorch and JAX, the optimizer's step inside the backward pass.

Import a frontend: ``penstock.torch_frontend`` (PyTorch) or ``penstock.jax_frontend`` (JAX, Optax). This package itself
imports neither framework; ``penstock.core`` is the specification that both obey and ``penstock.parity`` compares them.
"""

__version__ = "0.1.0"
