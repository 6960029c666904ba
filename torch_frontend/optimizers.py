"""The optimizers. They differ by their rule only; `ReleasableOptimizer` does the rest."""

from __future__ import annotations

from ..core import rules
from .releasable import ReleasableOptimizer
from .signatures import documented


@documented
class StableAdamW(ReleasableOptimizer):
    """AdamW with Adafactor's update clipping, which makes gradient clipping unnecessary."""

    rule = rules.STABLE_ADAMW


@documented
class AdamW(ReleasableOptimizer):
    """Adam with decoupled weight decay. In float64 it equals `torch.optim.AdamW`, and has its defaults."""

    rule = rules.ADAMW


@documented
class Adam(ReleasableOptimizer):
    """Adam with weight decay as L2 regularisation. In float64 it equals `torch.optim.Adam`, and has its defaults."""

    rule = rules.ADAM


@documented
class Lion(ReleasableOptimizer):
    """Steps of one size, in the direction of the sign of a momentum: half the state of AdamW."""

    rule = rules.LION


@documented
class SGD(ReleasableOptimizer):
    """Stochastic gradient descent. In float64 it equals `torch.optim.SGD`, and has its defaults."""

    rule = rules.SGD


@documented
class RAdam(ReleasableOptimizer):
    """Adam without a warmup of its learning rate. In float64 it equals `torch.optim.RAdam`, and has its defaults."""

    rule = rules.RADAM


@documented
class Adan(ReleasableOptimizer):
    """Nesterov's momentum through the difference of two gradients. In float64 it equals optimi's Adan."""

    rule = rules.ADAN


@documented
class Muon(ReleasableOptimizer):
    """Momentum, orthogonalised matrix by matrix: for matrices only, which `param_groups_for_muon` finds in a model."""

    rule = rules.MUON


@documented
class Ranger(ReleasableOptimizer):
    """RAdam whose parameters go back, every k updates, towards slow weights. In float64 it equals optimi's Ranger."""

    rule = rules.RANGER
