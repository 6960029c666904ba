"""The settings of a plan: the model's shape and its training, independent of the frameworks."""

from __future__ import annotations

import dataclasses

from ..core.array_ops import numpy_dtype
from ..core.codings import EIGHT_BIT, state_dtypes
from ..core.codings.eight_bit import BLOCK
from ..core.compensation import COMPENSATIONS, compensation_dtype, resolve
from ..core.errors import InvalidArgumentError
from ..core.precision import chosen
from ..core.rules import ADAM, ADAMW, ADAN, LION, RADAM, RANGER, SGD, STABLE_ADAMW

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
}


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
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("compensation", COMPENSATIONS)):
            if getattr(self, name) not in known:
                raise InvalidArgumentError(
                    f"{name}={getattr(self, name)!r} is not known; it must be one of {', '.join(known)}."
                )
        if self.state_dtype is not None and self.state_dtype not in (*DTYPES, EIGHT_BIT):
            dtypes = ", ".join((*DTYPES, EIGHT_BIT))
            raise InvalidArgumentError(f"state_dtype={self.state_dtype!r} is not known; it must be one of {dtypes}.")
        given = {"compensation": self.compensation} if self.compensation != "auto" else {}
        given |= {} if self.state_dtype is None else {"state_dtype": self.state_dtype}
        preset = chosen(precision, given)
        if not given:
            object.__setattr__(self, "compensation", preset.compensation)
            object.__setattr__(self, "state_dtype", preset.state_dtype if OPTIMIZERS[self.optimizer].fields else None)
        _ = self.kept  # raises where they do not go together

    @property
    def kept(self) -> dict[str, str]:
        """What is kept for each parameter from step to step, itself included, and in which dtype."""
        low = compensation_dtype(resolve(self.compensation, self.dtype), self.dtype)
        rule = OPTIMIZERS[self.optimizer]
        betas = [None if field.beta is None else rule.defaults[field.beta] for field in rule.fields]
        dtypes = state_dtypes(rule.fields, self.dtype, betas, [self.state_dtype] * len(betas))
        fields = {field.name: dtype for field, dtype in zip(rule.fields, dtypes, strict=True)}
        return {"parameter": self.dtype, **({} if low is None else {"compensation": low}), **fields}

    @property
    def kept_sizes(self) -> dict[str, float]:
        """Bytes of each of `kept` for an element of a parameter, of matrices where 8-bit states need them."""
        of = {dtype: 1 + 4 / BLOCK if dtype == EIGHT_BIT else numpy_dtype(dtype).itemsize for dtype in self.kept.values()}
        return {name: of[dtype] for name, dtype in self.kept.items()}

    @property
    def kept_bytes(self) -> float:
        """Bytes of `kept` for each element of a parameter."""
        return sum(self.kept_sizes.values())

    @property
    def changed(self) -> str:
        """The optimizer's arguments that make `kept` other than by default, or nothing: "compensation='none'"."""
        default = dataclasses.replace(self, compensation="auto", state_dtype=None)
        alone = {
            f"compensation={self.compensation!r}": dataclasses.replace(default, compensation=self.compensation),
            f"state_dtype={self.state_dtype!r}": dataclasses.replace(default, state_dtype=self.state_dtype),
        }
        return ", ".join(setting for setting, training in alone.items() if training.kept != default.kept)


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
        needs_gradient = OPTIMIZERS[training.optimizer].needs_gradient
        left_out = {"state"} if needs_gradient else set()
        left_out |= {"hold", "state", "blocks"} if training.micro_batches == 1 else set()
        return [mode for mode in MODES if mode.name not in left_out]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"mode {name!r} is not known; it must be one of {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names)]
