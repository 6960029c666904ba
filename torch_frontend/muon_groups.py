"""The parameter groups of a model that Muon and AdamW train together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..core.errors import InvalidArgumentError
from ..core.rules import ADAMW, MUON
from ..core.rules.muon import is_hidden_matrix
from .signatures import signature_of

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def param_groups_for_muon(
    model: nn.Module, *, adamw: Mapping[str, Any] = MappingProxyType({}), others: str | Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return parameter groups: Muon for the matrices of hidden layers, AdamW for all else. One optimizer takes them all.

    AdamW gets what has not two dimensions (biases, norms, convolutions) or is called bias or scale; embeddings: weights of
    `torch.nn.Embedding`, and matrices with "emb" in their name, or called wte or wpe; and output heads: the matrix that the
    model's get_output_embeddings() names, one of the shape of an embedding, or one of a module called head, lm_head,
    logits_dense, classifier, score or embed_out. Look at the names in the groups: a head with another name goes into `others`.
    Matrices of Transformers' Conv1D, which are transposed, are a group of their own, with output_axis=1.

    Args:
        model: its trainable parameters are grouped.
        adamw: settings of AdamW's group: {"lr": 3e-4, "betas": (0.9, 0.95)}. Its lr and weight_decay are otherwise those of the
            optimizer, which fit both with adjust_lr_fn="match_rms_adamw".
        others: AdamW gets parameters, too, whose name contains one of these strings.

    Returns:
        The groups, with names, those that have parameters: Muon's, then AdamW's.

    Raises:
        InvalidArgumentError: model is not a module; adamw has what is not a setting of AdamW; others, what no name contains.

    Example:
        optimizer = Muon(param_groups_for_muon(model), lr=3e-4, adjust_lr_fn="match_rms_adamw")
        release_gradients(model, optimizer)

    Source: https://kellerjordan.github.io/posts/muon/
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}; give the torch.nn.Module whose parameters are grouped.")
    if unknown := sorted(set(adamw) - (signature_of(ADAMW).parameters.keys() - {"params"})):
        raise InvalidArgumentError(f"adamw= has {', '.join(unknown)}, which is not a setting of AdamW.")
    apart = (others,) if isinstance(others, str) else tuple(others)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unknown := [part for part in apart if not any(part in name for name in named)]:
        raise InvalidArgumentError(f"others={others!r} has {unknown[0]!r}, which is in no name of a trainable parameter.")
    outside, embeddings = _embeddings_and_heads(model)
    transposed = {id(m.weight) for m in model.modules() if type(m).__name__ == "Conv1D" and isinstance(m.weight, Tensor)}
    groups: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "transposed": [], "adamw": []}
    for name, parameter in named.items():
        shape = tuple(parameter.shape)
        hidden = is_hidden_matrix(name, shape) and id(parameter) not in outside and shape not in embeddings
        if not hidden or any(part in name for part in apart):
            groups["adamw"].append((name, parameter))
        else:
            groups["transposed" if id(parameter) in transposed else "muon"].append((name, parameter))
    made: list[dict[str, Any]] = [
        {"params": groups["muon"], "rule": MUON.name},
        {"params": groups["transposed"], "rule": MUON.name, "output_axis": 1},
        {"params": groups["adamw"], **adamw, "rule": ADAMW.name},
    ]
    return [group for group in made if group["params"]]


def _embeddings_and_heads(model: nn.Module) -> tuple[set[int], set[tuple[int, ...]]]:
    """Return the ids of weights of embeddings and heads that the model tells of, and the shapes of embeddings."""
    weights = [module.weight for module in model.modules() if isinstance(module, EMBEDDINGS)]
    told: Any = getattr(model, "get_output_embeddings", None)  # of Transformers' models
    head = getattr(told(), "weight", None) if callable(told) else None
    return set(map(id, [*weights, head])), {tuple(weight.shape) for weight in weights}
