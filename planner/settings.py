"""The settings of a plan: the model's shape and its training, independent of the frameworks."""

from __future__ import annotations

import dataclasses

from ..core.array_ops import numpy_dtype
from ..core.codings import EIGHT_BIT, state_dtypes
from ..core.codings.eight_bit import BLOCK
from ..core.compensation import COMPENSATIONS, compensation_dtype, resolve
from ..core.errors import InvalidArgumentError
from ..core.precision import chosen
from ..core.rules import ADAM, ADAMW, ADAN, LION, MUON, RADAM, RANGER, SGD, STABLE_ADAMW, Rule

DTYPES = ("bfloat16", "float16", "float32")
OPTIMIZERS = {
    "StableAdamW": STABLE_ADAMW,
    "AdamW": ADAMW,
    "Adam": ADAM,
    "Lion": LION,
    "SGD": SGD,
    "RAdam": RADAM,
    "Adan": ADAN,
    "Ranger": RANGER,
    "Muon": MUON,
}
"""The optimizers of this package. A+B is one optimizer with A for the matrices of hidden layers and B for all else; Muon, which
takes no other parameters, is Muon+AdamW."""


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """A decoder of Llama's kind: RMS norms, rotary attention, a gated feed-forward part, an untied head. Llama-7B's sizes.

    layers: blocks. width: of the residual stream. heads: of attention. key_value_heads: of keys and values; None: as many.
    hidden: width of the feed-forward part. vocabulary: tokens.
    """

    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_value_heads: int | None = None
    hidden: int = 11008
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{field.name}={value} must be at least 1.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise InvalidArgumentError(f"heads={self.heads} must divide width={self.width} into even parts.")
        if self.heads % self.kv_heads:
            raise InvalidArgumentError(f"key_value_heads={self.kv_heads} must divide heads={self.heads}.")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one block: attention, feed-forward part, two norms."""
        key_value = self.width * self.width // self.heads * self.kv_heads
        return 2 * self.width**2 + 2 * key_value + 3 * self.width * self.hidden + 2 * self.width

    @property
    def hidden_matrices(self) -> int:
        """Number of parameters of the blocks without their norms: those of the matrices that Muon is meant for."""
        return self.layers * (self.layer_parameters - 2 * self.width)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model: blocks, embedding, head, last norm."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.width + self.width


@dataclasses.dataclass(frozen=True)
class Training:
    """How the model is trained; with the optimizers' own defaults.

    batch: sequences a step. sequence: tokens in each. micro_batches: backwards that a step is divided into, where the mode
    divides it; `batch` must be a multiple. dtype: of the parameters. precision: chooses the next two. compensation,
    state_dtype: the optimizers' arguments. checkpointing: of each layer's activations, outside of the mode "blocks", which
    needs none.
    """

    batch: int = 1
    sequence: int = 2048
    micro_batches: int = 1
    dtype: str = "bfloat16"
    optimizer: str = "StableAdamW"
    precision: dataclasses.InitVar[str] = "exact"
    compensation: str = "auto"
    state_dtype: str | None = None
    checkpointing: bool = True

    def __post_init__(self, precision: str) -> None:
        for name in ("batch", "sequence", "micro_batches"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.batch % self.micro_batches:
            raise InvalidArgumentError(f"micro_batches={self.micro_batches} must divide batch={self.batch}.")
        for name, known in (("dtype", DTYPES), ("compensation", COMPENSATIONS)):
            if getattr(self, name) not in known:
                raise InvalidArgumentError(
                    f"{name}={getattr(self, name)!r} is not known; it must be one of {', '.join(known)}."
                )
        names = self.optimizer.split("+")
        if len(names) > 2 or not OPTIMIZERS.keys() >= set(names) or names[1:] == ["Muon"]:
            raise InvalidArgumentError(
                f"optimizer={self.optimizer!r} is not known; it must be one of {', '.join(OPTIMIZERS)}, or two of them, A+B, "
                "of which B, that of embeddings, heads and norms, is not Muon."
            )
        if self.state_dtype is not None and self.state_dtype not in (*DTYPES, EIGHT_BIT):
            dtypes = ", ".join((*DTYPES, EIGHT_BIT))
            raise InvalidArgumentError(f"state_dtype={self.state_dtype!r} is not known; it must be one of {dtypes}.")
        given = {"compensation": self.compensation} if self.compensation != "auto" else {}
        given |= {} if self.state_dtype is None else {"state_dtype": self.state_dtype}
        preset = chosen(precision, given)
        if not given:
            object.__setattr__(self, "compensation", preset.compensation)
            object.__setattr__(self, "state_dtype", preset.state_dtype if any(rule.fields for rule in self.rules) else None)
        elif self.state_dtype is not None and not any(rule.fields for rule in self.rules):
            raise InvalidArgumentError(
                f"state_dtype={self.state_dtype!r} is not possible for {self.optimizer}, which keeps no state; leave it out."
            )
        _ = self.kept, self.kept_of_rest  # raises where they do not go together

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of the matrices of hidden layers, and that of all other parameters if it is another one."""
        first, *others = (OPTIMIZERS[name] for name in self.optimizer.split("+"))
        rest = others[0] if others else ADAMW if first is MUON else first
        return (first,) if rest is first else (first, rest)

    @property
    def kept(self) -> dict[str, str]:
        """What is kept for each parameter of the first rule from step to step, itself included, and in which dtype."""
        return self._kept(self.rules[0])

    @property
    def kept_of_rest(self) -> dict[str, str]:
        """The same of the parameters of the last rule, which may be the first."""
        return self._kept(self.rules[-1])

    def _kept(self, rule: Rule) -> dict[str, str]:
        low = compensation_dtype(resolve(self.compensation, self.dtype), self.dtype)
        betas = [None if field.beta is None else rule.defaults[field.beta] for field in rule.fields]
        dtypes = state_dtypes(rule.fields, self.dtype, betas, [self.state_dtype] * len(betas))
        fields = {field.name: dtype for field, dtype in zip(rule.fields, dtypes, strict=True)}
        return {"parameter": self.dtype, **({} if low is None else {"compensation": low}), **fields}

    @property
    def kept_bytes(self) -> float:
        """Bytes of `kept` for each element of a parameter, of matrices where 8-bit states need them."""
        return sum(kept_sizes(self.kept).values())

    @property
    def kept_bytes_of_rest(self) -> float:
        """Bytes of `kept_of_rest` for each element, as in `kept_bytes`."""
        return sum(kept_sizes(self.kept_of_rest).values())

    @property
    def changed(self) -> str:
        """The optimizer's arguments that make `kept` other than by default, or nothing: "compensation='none'"."""
        default = dataclasses.replace(self, compensation="auto", state_dtype=None)
        alone = {
            f"compensation={self.compensation!r}": dataclasses.replace(default, compensation=self.compensation),
            f"state_dtype={self.state_dtype!r}": dataclasses.replace(default, state_dtype=self.state_dtype),
        }
        return ", ".join(
            setting
            for setting, training in alone.items()
            if (training.kept, training.kept_of_rest) != (default.kept, default.kept_of_rest)
        )


def kept_sizes(kept: dict[str, str]) -> dict[str, float]:
    """Return the bytes of each of `Training.kept` for an element of a parameter, of matrices where 8-bit states need them."""
    of = {dtype: 1 + 4 / BLOCK if dtype == EIGHT_BIT else numpy_dtype(dtype).itemsize for dtype in kept.values()}
    return {name: of[dtype] for name, dtype in kept.items()}


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way of training.

    divided: it takes a step in several micro-batches. result: how it relates to the plain optimizer.
    """

    name: str
    divided: bool
    result: str


MODES = (
    Mode("torch", True, "torch.optim.AdamW"),
    Mode("plain", True, "the plain optimizer"),
    Mode("release", False, "bit for bit"),
    Mode("guard", False, "clipped exactly, two backwards"),
    Mode("hold", True, "bit for bit"),
    Mode("state", True, "an approximation (AdamA)"),
    Mode("blocks", False, "exact, sums in another order"),
)
"""`torch`: torch's own AdamW; `plain`: the optimizer without release; `release` of the whole batch; `guard` with max_norm;
`hold` and `state` of micro-batches; `blocks`: release with `microbatch_blocks`."""


def modes(names: list[str] | None, training: Training) -> list[Mode]:
    """Return the modes of these names; for None, those that apply to this training.

    Raises:
        InvalidArgumentError: no such mode.
    """
    known = {mode.name: mode for mode in MODES}
    if names is None:
        left_out = {"state"} if any(rule.needs_gradient for rule in training.rules) else set()
        left_out |= {"hold", "state", "blocks"} if training.micro_batches == 1 else set()
        return [mode for mode in MODES if mode.name not in left_out]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"mode {name!r} is not known; it must be one of {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names)]
