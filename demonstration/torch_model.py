"""The transformer in PyTorch. Its formulas are those of `jax_model`, in the same order."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm

from .initialisation import Parameters
from .settings import ModelShape

EPSILON = 1e-5  # of the layer norms


class Layer(nn.Module):
    """One block, pre-norm:  x += attention(norm(x)),  x += gelu(norm(x) W1) W2.

    Args:
        parameters: of this layer, by their names without the prefix.
        heads: of attention.
    """

    attention_scale: Tensor
    attention_bias: Tensor
    query_key_value: Tensor
    attention_output: Tensor
    feed_forward_scale: Tensor
    feed_forward_bias: Tensor
    feed_forward_input: Tensor
    feed_forward_output: Tensor

    def __init__(self, parameters: Parameters, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, context, width]."""
        x = x + self.attention(normalized(x, self.attention_scale, self.attention_bias))
        hidden = normalized(x, self.feed_forward_scale, self.feed_forward_bias) @ self.feed_forward_input
        return x + gelu(hidden, approximate="tanh") @ self.feed_forward_output

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention, softmax((q/sqrt(d)) k^T) v, for each head. `x`: [batch, context, width]."""
        batch, context, width = x.shape
        split = (x @ self.query_key_value).reshape(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = (query * (1 / math.sqrt(width // self.heads))) @ key.transpose(-1, -2)
        past = torch.ones(context, context, dtype=torch.bool, device=x.device).tril()
        weights = torch.softmax(scores.masked_fill(~past, -math.inf), dim=-1)
        return (weights @ value).transpose(1, 2).reshape(batch, context, width) @ self.attention_output


class Transformer(nn.Module):
    """A decoder-only, pre-norm transformer whose `named_parameters` are the names of the initialisation.

    Args:
        parameters: from `initial_parameters`; copied.
        shape: of the model.
    """

    embedding: Tensor
    positions: Tensor
    final_scale: Tensor
    final_bias: Tensor
    head: Tensor

    def __init__(self, parameters: Parameters, shape: ModelShape) -> None:
        super().__init__()
        for name, value in parameters.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(torch.tensor(value)))
        self.layers = nn.ModuleList(Layer(of_layer(parameters, layer), shape.heads) for layer in range(shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [batch, context, vocabulary], for int64 tokens, [batch, context]."""
        x = embedding(tokens, self.embedding) + self.positions
        for layer in self.layers:
            x = layer(x)
        return normalized(x, self.final_scale, self.final_bias) @ self.head

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross entropy in nats, 0-d, of predicting each next byte of `batch`, int64, [batch, context + 1]."""
        log_probabilities = torch.log_softmax(self(batch[:, :-1]), dim=-1)
        return -log_probabilities.gather(-1, batch[:, 1:, None]).mean()

    def to_numpy(self) -> Parameters:
        """The parameters by name, copied."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.named_parameters()}


def of_layer(parameters: Parameters, layer: int) -> Parameters:
    """The parameters of one layer, by their names without the prefix."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def normalized(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the last axis: (x - mean)/sqrt(var + EPSILON)*scale + bias."""
    return layer_norm(x, (x.shape[-1],), scale, bias, EPSILON)
