"""Penstock: gradient release for PyTorch and JAX. Each gradient is used the moment it exists, and then freed.

Import a frontend: ``penstock.torch_frontend`` (PyTorch) or ``penstock.jax_frontend`` (JAX, Optax). This package itself
imports neither framework; ``penstock.core`` is the specification that both obey and ``penstock.parity`` compares them.
"""

__version__ = "0.1.0"
