"""Other libraries' optimizers, for comparison: their errors are reported without a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .optax_adapter import TransformBackend, optax_transform
from .torch_adapter import OptimizerBackend, torch_optimizer
from .torch_arguments import betas_of

MakeTorch = Callable[[list[Any], Any], Any]

SGD = ("sgd", "sgd_momentum", "sgd_nesterov")


def _torch(class_name: str, **arguments: Any) -> MakeTorch:
    def make(params: list[Any], h: Any) -> Any:
        import torch

        optimizer = getattr(torch.optim, class_name)
        return optimizer(params, lr=h.learning_rate, betas=betas_of(h), eps=h.eps, weight_decay=h.weight_decay, **arguments)

    return make


def _torch_sgd(**arguments: Any) -> MakeTorch:
    def make(params: list[Any], h: Any) -> Any:
        import torch

        own = {"momentum": h.momentum, "dampening": h.dampening, "nesterov": h.nesterov}
        return torch.optim.SGD(params, lr=h.learning_rate, weight_decay=h.weight_decay, **own, **arguments)

    return make


def _torch_peer(name: str, **arguments: Any) -> OptimizerBackend:
    make = {"adamw": _torch("AdamW", **arguments), "adam": _torch("Adam", **arguments)}
    make |= dict.fromkeys(SGD, _torch_sgd(**arguments))
    if not arguments.get("fused"):  # RAdam has no such version, and no argument for it
        foreach = arguments["foreach"]
        make["radam"] = _torch("RAdam", foreach=foreach)
        make["radamw"] = _torch("RAdam", foreach=foreach, decoupled_weight_decay=True)
    return torch_optimizer(name, make, ("float64", "float32", "bfloat16"), peer=True)


def _optimi(class_name: str, **arguments: Any) -> MakeTorch:
    def make(params: list[Any], h: Any) -> Any:
        import optimi

        optimizer = getattr(optimi, class_name)
        eps = {"eps": h.eps} if hasattr(h, "eps") else {}
        return optimizer(
            params,
            lr=h.learning_rate,
            betas=betas_of(h),
            **eps,
            weight_decay=h.weight_decay,
            triton=False,  # its choice by itself fails where Triton is installed without a GPU
            **arguments,
        )

    return make


def _optimi_kept(optimizer: Any, parameter: Any) -> Mapping[str, Any]:
    """Its Kahan compensation; the moments of Adam and its relatives are debiased as penstock's are."""
    state = optimizer.state[parameter]
    kept = {name: state[name] for name in ("exp_avg", "exp_avg_sq") if "exp_avg_sq" in state and "exp_avg_diff" not in state}
    compensation = state["kahan_comp"]
    return kept if compensation is None else {**kept, "compensation": compensation}


def _optax_adamw(h: Any) -> Any:
    import optax

    return optax.adamw(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps, weight_decay=h.weight_decay)


def _optax_adam(h: Any) -> Any:
    import optax

    adam = optax.adam(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps)
    return optax.chain(optax.add_decayed_weights(h.weight_decay), adam)


def _optax_lion(h: Any) -> Any:
    import optax

    return optax.lion(h.learning_rate, b1=h.beta1, b2=h.beta2, weight_decay=h.weight_decay)


def _optax_sgd(h: Any) -> Any:
    import optax

    sgd = optax.sgd(h.learning_rate, momentum=h.momentum or None, nesterov=h.nesterov)
    return optax.chain(optax.add_decayed_weights(h.weight_decay), sgd)


QUICK_OPTAX = optax_transform("optax", {"adamw": _optax_adamw}, peer=True)
"""Of Optax what a quick run compiles."""

PEERS: tuple[OptimizerBackend | TransformBackend, ...] = (
    _torch_peer("torch", foreach=False, fused=False),
    _torch_peer("torch-foreach", foreach=True),
    _torch_peer("torch-fused", fused=True),
    torch_optimizer(
        "optimi",
        {
            "stable_adamw": _optimi("StableAdamW"),
            "adamw": _optimi("AdamW"),
            "adam": _optimi("Adam"),
            "lion": _optimi("Lion"),
            "adan": _optimi("Adan"),
        },
        # of float16 its second moments vanish
        {"float64": "none", "float32": "none", "bfloat16": "kahan"},
        kept=_optimi_kept,
        requires=("torch", "optimi"),
        peer=True,
    ),
    optax_transform(
        "optax",
        {"adamw": _optax_adamw, "adam": _optax_adam, "lion": _optax_lion, **dict.fromkeys(SGD, _optax_sgd)},
        ("float64", "float32", "bfloat16"),
        peer=True,
    ),
)
