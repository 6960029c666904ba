"""The initial parameters of every run, in numpy."""

from __future__ import annotations

import math

import numpy as np

from .settings import ModelShape

Parameters = dict[str, np.ndarray]
EMBEDDING_DEVIATION = 0.4


def initial_parameters(shape: ModelShape, *, seed: int, dtype: str) -> Parameters:
    """Return names and values of all parameters, in the order of their use.

    Matrices, [inputs, outputs], are normal with standard deviation 1/sqrt(width), those that write into the residual
    stream 1/sqrt(2*layers*width), so that its variance does not grow with the depth. Embeddings are normal with 0.4: next
    to them the first updates are small, and no warm-up is needed. Scales are 1 and biases 0.

    Args:
        shape: of the model.
        seed: of the weights.
        dtype: "float32" or "float64". The float32 values are the float64 ones, rounded.

    Returns:
        Arrays of that dtype, freshly made.
    """
    generator = np.random.default_rng(seed)
    width = shape.width
    inner = 1 / math.sqrt(width)
    residual = inner / math.sqrt(2 * shape.layers)

    def normal(*size: int, deviation: float = inner) -> np.ndarray:
        return generator.normal(0.0, deviation, size)

    parameters: Parameters = {
        "embedding": normal(shape.vocabulary, width, deviation=EMBEDDING_DEVIATION),
        "positions": normal(shape.context, width, deviation=EMBEDDING_DEVIATION),
    }
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        parameters |= {
            prefix + "attention_scale": np.ones(width),
            prefix + "attention_bias": np.zeros(width),
            prefix + "query_key_value": normal(width, 3 * width),
            prefix + "attention_output": normal(width, width, deviation=residual),
            prefix + "feed_forward_scale": np.ones(width),
            prefix + "feed_forward_bias": np.zeros(width),
            prefix + "feed_forward_input": normal(width, 4 * width),
            prefix + "feed_forward_output": normal(4 * width, width, deviation=residual),
        }
    parameters |= {
        "final_scale": np.ones(width),
        "final_bias": np.zeros(width),
        "head": normal(width, shape.vocabulary),
    }
    return {name: value.astype(dtype) for name, value in parameters.items()}


def nbytes(parameters: Parameters) -> int:
    """Return the bytes of all parameters, and so of all gradients."""
    return sum(value.nbytes for value in parameters.values())
