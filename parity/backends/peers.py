"""Other libraries' optimizers, for comparison: their errors are reported without a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.rules.adam_family import AdamHyperparameters
from .optax_adapter import TransformBackend, optax_transform
from .torch_adapter import OptimizerBackend, torch_optimizer


def _torch(class_name: str, **arguments: Any) -> Callable[[list[Any], AdamHyperparameters], Any]:
    def make(params: list[Any], h: AdamHyperparameters) -> Any:
        import torch

        optimizer = getattr(torch.optim, class_name)
        betas = (h.beta1, h.beta2)
        return optimizer(params, lr=h.learning_rate, betas=betas, eps=h.eps, weight_decay=h.weight_decay, **arguments)

    return make


def _torch_peer(name: str, **arguments: Any) -> OptimizerBackend:
    make = {"adamw": _torch("AdamW", **arguments), "adam": _torch("Adam", **arguments)}
    return torch_optimizer(name, make, ("float64", "float32", "bfloat16"), peer=True)


def _optimi(class_name: str) -> Callable[[list[Any], AdamHyperparameters], Any]:
    def make(params: list[Any], h: AdamHyperparameters) -> Any:
        import optimi

        optimizer = getattr(optimi, class_name)
        return optimizer(
            params,
            lr=h.learning_rate,
            betas=(h.beta1, h.beta2),
            eps=h.eps,
            weight_decay=h.weight_decay,
            triton=False,  # its choice by itself fails where Triton is installed without a GPU
        )

    return make


def _optimi_kept(optimizer: Any, parameter: Any) -> Mapping[str, Any]:
    """Its Kahan compensation; the moments are debiased as penstock's are."""
    state = optimizer.state[parameter]
    kept = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    compensation = state["kahan_comp"]
    return kept if compensation is None else {**kept, "compensation": compensation}


def _optax_adamw(h: AdamHyperparameters) -> Any:
    import optax

    return optax.adamw(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps, weight_decay=h.weight_decay)


def _optax_adam(h: AdamHyperparameters) -> Any:
    import optax

    adam = optax.adam(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps)
    return optax.chain(optax.add_decayed_weights(h.weight_decay), adam)


QUICK_OPTAX = optax_transform("optax", {"adamw": _optax_adamw}, peer=True)
"""Of Optax what a quick run compiles."""

PEERS: tuple[OptimizerBackend | TransformBackend, ...] = (
    _torch_peer("torch", foreach=False, fused=False),
    _torch_peer("torch-foreach", foreach=True),
    _torch_peer("torch-fused", fused=True),
    torch_optimizer(
        "optimi",
        {"stable_adamw": _optimi("StableAdamW"), "adamw": _optimi("AdamW"), "adam": _optimi("Adam")},
        # of float16 its second moments vanish
        {"float64": "none", "float32": "none", "bfloat16": "kahan"},
        kept=_optimi_kept,
        requires=("torch", "optimi"),
        peer=True,
    ),
    optax_transform("optax", {"adamw": _optax_adamw, "adam": _optax_adam}, ("float64", "float32", "bfloat16"), peer=True),
)
