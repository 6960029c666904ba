"""Models of parts that are drawn: odd layers, used again, tied, checkpointed, in place, and now and then left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES, ROWS = 8, 4, 64


class Planted(Exception):  # noqa: N818  (not of penstock, and no mistake of the tests)
    """Raised on purpose, in forward or in backward."""


class Function(nn.Module):
    """A part without a class of its own: some parameters, and a function of them and the input."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / WIDTH**0.5) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.weights)


class Noise(torch.autograd.Function):
    """Draws random numbers in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Hidden(torch.autograd.Function):
    """Runs a backward of its own, which autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), gradient)
        return x.grad, None


class RunsItsOwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(x, self.inner) if x.requires_grad else self.inner(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, self.cell(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def in_place(x: Tensor, bias: Tensor) -> Tensor:
    x = x.clone()
    x[:, :3].mul_(2)
    return x.add_(bias).relu_()


def views(x: Tensor, weight: Tensor) -> Tensor:
    first, second = weight.view(2, WIDTH, WIDTH).unbind()
    return x @ first.t() + x * second.flatten()[:: WIDTH + 1]


def gradient_of_the_input(x: Tensor, weight: Tensor) -> Tensor:
    with torch.enable_grad():
        given = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad((given @ weight).tanh().sum(), given, create_graph=True)
    return found


def table(x: Tensor, weight: Tensor) -> Tensor:
    """The largest parameter, next to which the others are small."""
    return functional.embedding(torch.arange(len(x)) * 3 % ROWS, weight) * x


def strided() -> nn.Module:
    part = Function(lambda x, weight: x @ weight, (WIDTH, WIDTH))
    part.weights[0] = nn.Parameter(part.weights[0].detach().t())
    return part


SIMPLE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "pair": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "table": lambda: Function(table, (ROWS, WIDTH)),
    "scalar": lambda: Function(lambda x, scale: x * scale, ()),
    "views": lambda: Function(views, (2 * WIDTH, WIDTH)),
    "in place": lambda: Function(in_place, (WIDTH,)),
    "strided": strided,
    "loop": lambda: Function(lambda x, weight: x @ weight @ weight, (WIDTH, WIDTH)),
    "unused": lambda: Function(lambda x, used, unused: x * used, (WIDTH,), (3,)),
    "empty": lambda: Function(lambda x, empty: torch.cat([x, empty])[: len(x)] + empty.sum(), (0, WIDTH)),
}
ODD: dict[str, Callable[[], nn.Module]] = {
    "detached": lambda: Function(lambda x, weight: x + x.detach() @ weight, (WIDTH, WIDTH)),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "prelu": lambda: nn.PReLU(WIDTH),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
    "conv": lambda: nn.Conv1d(1, 1, 3, padding=1),
    "recurrent": Recurrent,
    "attention": Attention,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "noise": lambda: Function(lambda x, weight: Noise.apply(x @ weight), (WIDTH, WIDTH)),
    "input's gradient": lambda: Function(gradient_of_the_input, (WIDTH, WIDTH)),
    "hidden": RunsItsOwnBackward,
}
FORWARD_WRITES = ("batch norm", "spectral norm")
"""Their forward changes buffers: guard() computes a checkpoint's forward once more than the plain loop, as is documented."""
DIVIDED = ("linear", "no bias", "pair", "norm", "scalar", "prelu", "in place")
"""The parts whose samples do not depend on each other, which `microbatch_blocks` may divide."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer.

    Attributes:
        kind: of `SIMPLE` or `ODD`; "again" and "tied" use the weights of an earlier part.
        of: the number of that part.
        wrap: "checkpoint" or "reentrant", how its activations are computed again; "" for not at all.
        sometimes: left out of every other forward.
        frozen: from the start.
    """

    kind: str = "linear"
    of: int = 0
    wrap: str = ""
    sometimes: bool = False
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model.

    Attributes:
        leaf: the input requires a gradient.
        chunks: parts that can be divided are, by `microbatch_blocks`; 0: none.
        loss: how outputs, and the weights, become a loss.
    """

    parts: tuple[Part, ...] = (Part(), Part("norm"), Part())
    leaf: bool = False
    chunks: int = 0
    loss: str = "mean"

    @property
    def nested(self) -> bool:
        """Whether a backward runs other ones inside."""
        return any(part.wrap == "reentrant" or part.kind == "hidden" for part in self.parts)

    @property
    def in_parts(self) -> bool:
        """Whether the gradient of a weight may come in several parts, of which one is from a nested backward."""
        again = {part.of for part in self.parts if part.kind in ("again", "tied")}
        reused = any(part.kind in ("again", "tied") for part in self.parts if part.wrap == "reentrant")
        inside = {number for number, part in enumerate(self.parts) if part.wrap == "reentrant" or part.kind == "hidden"}
        return self.nested and (reused or bool(again & inside) or self.loss == "weights")


class RandomModel(nn.Module):
    """The model of a `Graph`.

    Attributes:
        failure: number of the part at which the backward (or with `in_forward` the forward) fails.
        calls_before: how often the failing part is passed without a failure.
        spoiled: number of the part whose output gradient becomes infinite.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.parts = nn.ModuleList()
        for part in graph.parts:
            self.parts.append(self._make(part))
        self.late = nn.Linear(WIDTH, WIDTH, bias=False)  # in no optimizer at first
        self.failure: int | None = None
        self.in_forward, self.calls_before = False, 0
        self.spoiled: int | None = None
        self.uses_late = False

    def _make(self, part: Part) -> nn.Module:
        if part.kind == "again":
            return nn.Sequential(self.parts[part.of])
        if part.kind == "tied":
            tied = Function(lambda x, weight: functional.linear(x, weight.t()))
            tied.weights.append(next(p for p in self.parts[part.of].parameters() if p.shape == (WIDTH, WIDTH)))
            return tied
        return (SIMPLE | ODD)[part.kind]().requires_grad_(not part.frozen)

    def forward(self, x: Tensor, index: int = 0) -> Tensor:
        for number, (part, module) in enumerate(zip(self.graph.parts, self.parts, strict=True)):
            if part.sometimes and (number + index) % 2:
                continue
            if self.in_forward and self.failure == number:
                raise Planted
            y = self._run(part, module, x)
            if torch.is_grad_enabled() and y.requires_grad:
                if not self.in_forward and self.failure == number:
                    y.register_hook(self._fail)
                if self.spoiled == number:
                    y.register_hook(lambda gradient: gradient * float("inf"))
            x = torch.tanh(y) + 0.5 * x
        return self.late(x) if self.uses_late else x

    def _fail(self, gradient: Tensor) -> None:
        self.calls_before -= 1
        if self.calls_before < 0:
            raise Planted

    @staticmethod
    def _run(part: Part, module: nn.Module, x: Tensor) -> Tensor:
        if part.kind == "conv":
            return module(x.unsqueeze(1)).squeeze(1)
        if part.wrap == "checkpoint" or (part.wrap == "reentrant" and not x.requires_grad):
            return checkpoint(module, x, use_reentrant=False)
        return checkpoint(module, x, use_reentrant=True) if part.wrap else module(x)

    def loss(self, x: Tensor, index: int) -> list[Tensor]:
        """One loss, or two that are added or given to backward() together."""
        out = self(x, index).float()
        kind = self.graph.loss
        if kind == "weights":  # every weight has a second use
            return [out.pow(2).mean() + 1e-3 * sum(p.float().pow(2).sum() for p in self.parts.parameters() if p.requires_grad)]
        if kind == "two":
            return [out.pow(2).mean(), out[:, :2].abs().mean()]
        return [out.pow(2).mean() + (out.detach() * out).mean() if kind == "detached" else out.pow(2).mean()]


@st.composite
def graphs(draw: Callable[..., Any], simple: bool = False) -> Graph:
    """Draw a graph; simple: of layers that every dtype has."""
    kinds = [*SIMPLE, "again", "tied"] if simple else [*SIMPLE, *ODD, "again", "tied"]
    parts: list[Part] = []
    for number in range(draw(st.integers(1, 5))):
        kind, of = draw(st.sampled_from(kinds)), 0
        earlier = [n for n, part in enumerate(parts) if part.kind in ("linear", "no bias", "pair", "loop", "strided")]
        if kind in ("again", "tied"):
            kind, of = (kind, draw(st.sampled_from(earlier))) if earlier else ("linear", 0)
        wrap = draw(st.sampled_from(["", "", "", "checkpoint", "reentrant"])) if kind not in (*FORWARD_WRITES, "conv") else ""
        sometimes, frozen = draw(st.sampled_from([(False, False)] * 4 + [(True, False), (False, True)]))
        parts.append(Part(kind, of, wrap, sometimes and number > 0, frozen and number > 0))
    if parts[0].kind in ("empty", "dropout") or all(part.frozen or part.sometimes for part in parts):
        parts[0] = Part()
    loss = draw(st.sampled_from(["mean", "mean", "detached", "two", "weights"]))
    return Graph(tuple(parts), draw(st.booleans()), draw(st.sampled_from([0, 0, 0, 2])), loss)
