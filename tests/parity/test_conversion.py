"""State that crosses frameworks: the section's laws, the faults that break them, and a model with names of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.parity.faults.injection import Tampered
from tests.support.jax_training import float64
from tests.support.portable_states import KINDS

from penstock import jax_frontend, torch_frontend
from penstock.core.compensation import WITH_RANDOM_BITS
from penstock.core.portable.names import Transposed
from penstock.jax_frontend import TrainState
from penstock.parity import backends
from penstock.parity.cases import Case, Problem, Storage
from penstock.parity.compare import Refusal, Row
from penstock.parity.conversion import ROUTES, Conversion, ConversionCase
from penstock.parity.conversion.routes import SIDES
from penstock.parity.conversion.section import SETTING
from penstock.parity.rules import FAMILY

CHOSEN = backends.choose(["eager", "jax", "walk"])[0]


def found(case: ConversionCase) -> dict[str, Row]:
    """The rows of one case by their quantities."""
    rows = Conversion().run(CHOSEN, [case], (), lambda name, part: None)
    return {row.quantity: row for row in rows if isinstance(row, Row)}


def case(route: tuple[str, str], rule: str, dtype: str, compensated: str) -> ConversionCase:
    return ConversionCase(route, Case(Problem(SETTING, FAMILY[rule], dtype), Storage(compensated, None)))


BOUNDED = [kind for kind in KINDS if kind[1] not in WITH_RANDOM_BITS]
"""Those of which the suite has bounds."""

TURNS = [
    (ROUTES[number % len(ROUTES)], list(FAMILY)[number % len(FAMILY)], *kind)
    for number, kind in enumerate([*BOUNDED, BOUNDED[4]])
]
"""Every dtype and compensation; routes and rules take turns."""


@pytest.mark.parametrize(("route", "rule", "dtype", "compensated"), TURNS)
def test_the_laws_hold(route: tuple[str, str], rule: str, dtype: str, compensated: str) -> None:
    rows = found(case(route, rule, dtype, compensated))
    arrays = ["parameter", "exp_avg", "exp_avg_sq", *([] if compensated == "none" else ["compensation"])]
    expected = {"file", *(f"{array}, {law}" for array in arrays for law in ("there", "back"))}
    assert set(rows) == expected | {"parameter", "exp_avg", "exp_avg_sq"}
    assert {rows[quantity].relative_bound for quantity in expected} == {0.0}
    assert all(row.within for row in rows.values()), [row for row in rows.values() if not row.within]
    if dtype == "float64":
        assert rows["parameter"].relative_error <= 1e-9


def test_every_case_is_visited_and_progress_is_told() -> None:
    section = Conversion()
    cases = section.cases(quick=True)
    told: list[str] = []
    rows = [row for row in section.run(CHOSEN, cases, (), lambda name, part: told.append(name)) if isinstance(row, Row)]
    assert {row.case for row in rows} == {each.name for each in cases} == set(told)
    assert all(row.within for row in rows)
    assert {each.name for each in cases} < {each.name for each in section.cases(quick=False)}


def test_a_route_with_one_end_is_refused_visibly() -> None:
    of_torch = [backend for backend in CHOSEN if backend.name == "eager"]
    (refusal,) = Conversion().run(of_torch, [case(("torch", "jax"), "adamw", "float32", "none")], (), lambda name, part: None)
    assert isinstance(refusal, Refusal)
    assert (refusal.backend, refusal.reason) == ("eager", "it exchanges state with jax, which does not run")


def with_load(load: Callable[..., None], given: ConversionCase) -> dict[str, Row]:
    """The rows of one case where JAX loads a file wrongly: `load` gets the side and the correct function before the path."""
    sides = {**SIDES, "jax": lambda case: Tampered(SIDES["jax"](case), load=load)}
    rows = Conversion(sides).run(CHOSEN, [given], (), lambda name, part: None)
    return {row.quantity: row for row in rows if isinstance(row, Row)}


def altered(state: TrainState, field: str, change: Callable[[jax.Array], jax.Array]) -> TrainState:
    """A train state one field of whose optimizer state, or whose parameters, are changed."""
    if field == "params":
        return state._replace(params=jax.tree.map(change, state.params))
    opt_state: Any = state.opt_state
    if field in opt_state.fields:
        fields = {**opt_state.fields, field: jax.tree.map(change, opt_state.fields[field])}
        return state._replace(opt_state=opt_state._replace(fields=fields))
    return state._replace(opt_state=opt_state._replace(**{field: jax.tree.map(change, getattr(opt_state, field))}))


FAULTS: dict[str, tuple[str, Callable[[jax.Array], jax.Array], set[str]]] = {
    "step counted once more": ("count", lambda step: step + 1, {"file", "parameter"}),
    "compensation left behind": ("compensation", jnp.zeros_like, {"file", "compensation, there", "compensation, back"}),
    "moment debiased twice": ("exp_avg", lambda m: m * 2, {"file", "exp_avg, there", "exp_avg, back"}),
    "second moment negligently rounded": (
        "exp_avg_sq",
        lambda v: v.astype("float16").astype(v.dtype),
        {"file", "exp_avg_sq, there", "exp_avg_sq, back"},
    ),
    "parameter of another moment": (
        "params",
        lambda p: jnp.roll(p, 1),
        {"file", "parameter, there", "parameter, back", "parameter"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    field, change, broken = FAULTS[fault]

    def load(side: Any, correct: Callable[[Path], None], path: Path) -> None:
        correct(path)
        side.state = altered(side.state, field, change)

    low = "compensation" in fault
    stored = ("bfloat16", "split") if low else ("float32", "none")
    rows = with_load(load, case(("torch", "jax"), "stable_adamw", *stored))
    assert broken <= {quantity for quantity, row in rows.items() if not row.within}


def test_a_side_that_raises_is_a_broken_row() -> None:
    def load(side: Any, correct: Callable[[Path], None], path: Path) -> None:
        raise OSError("no space")

    (row,) = with_load(load, case(("torch", "jax"), "adamw", "float32", "none")).values()
    assert row.failure == "OSError: no space"
    assert not row.within


# -- a model with names, layouts and gradients of its own ----------------------------------------------------------------

LAYERS, WIDTH = 3, 6
NAMES = {
    "layers.kernel": Transposed([f"blocks.{n}.linear.weight" for n in range(LAYERS)]),
    "layers.bias": [f"blocks.{n}.linear.bias" for n in range(LAYERS)],
    "outer.head": Transposed("head.weight"),
}
"""From the JAX model's names to the PyTorch model's."""

SETTINGS: dict[str, Any] = {"eps": 1e-7, "weight_decay": 0.1}
RATE, BETAS = 3e-3, (0.8, 0.99)


def data(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(4, WIDTH))


class TorchModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"linear": torch.nn.Linear(WIDTH, WIDTH)}) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 2, bias=False)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.from_numpy(generator.normal(size=parameter.shape) / WIDTH**0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block["linear"](x))  # type: ignore[index]
        return self.head(x).pow(2).mean()


def jax_parameters(model: TorchModel) -> dict[str, Any]:
    def stacked(field: str) -> jax.Array:
        return jnp.stack([jnp.array(getattr(block["linear"], field).detach().numpy().T) for block in model.blocks])

    head = jnp.array(model.head.weight.detach().numpy().T)
    return {"outer": {"head": head}, "layers": {"kernel": stacked("weight"), "bias": stacked("bias")}}


STACK = jax_frontend.LayerStack(
    lambda outer, x: x,
    lambda layer, x: x + jnp.tanh(x @ layer["kernel"] + layer["bias"]),
    lambda outer, x, batch: jnp.mean((x @ outer["head"]) ** 2),
)


class InTorch:
    """The model in PyTorch: released where the optimizer is penstock's."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = TorchModel()
        self.optimizer = make(self.model.parameters(), lr=RATE, betas=BETAS, **SETTINGS)
        if hasattr(self.optimizer, "release"):
            torch_frontend.release_gradients(self.model, self.optimizer)

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.model(torch.from_numpy(data(number))).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        torch_frontend.export_state(path, self.optimizer, self.model, parameters=True)

    def load(self, path: Path) -> None:
        torch_frontend.import_state(path, self.optimizer, self.model, parameters=True)

    def parameters(self) -> dict[str, Any]:
        return jax_parameters(self.model)


class InJax:
    """The same model in JAX, walked; Optax's own transform is used where the optimizer is not penstock's."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.tx = make(RATE, b1=BETAS[0], b2=BETAS[1], **SETTINGS)
        self.declared: Any = {"rule": "adamw", "betas": BETAS} if make is optax.adamw else {}
        self.step = jax_frontend.make_release_step(STACK, self.tx)
        self.state = jax_frontend.init_train_state(self.tx, jax_parameters(TorchModel()))

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.state, _ = self.step(self.state, jnp.array(data(number)))

    def save(self, path: Path) -> None:
        jax_frontend.export_state(path, self.tx, self.state, parameters=True, names=NAMES, **self.declared)

    def load(self, path: Path) -> None:
        state = jax_frontend.init_train_state(self.tx, jax.tree.map(jnp.zeros_like, self.state.params))
        self.state = jax_frontend.import_state(path, self.tx, state, parameters=True, names=NAMES, **self.declared)

    def parameters(self) -> dict[str, Any]:
        return self.state.params


def torch_sgd(parameters: Any, *, lr: float, weight_decay: float, **_: Any) -> torch_frontend.SGD:
    return torch_frontend.SGD(parameters, lr, momentum=0.9, dampening=0.3, weight_decay=weight_decay)


def jax_sgd(learning_rate: float, *, weight_decay: float, **_: Any) -> optax.GradientTransformationExtraArgs:
    return jax_frontend.sgd(learning_rate, 0.9, 0.3, weight_decay=weight_decay)


PAIRS = {
    "sgd": (torch_sgd, jax_sgd, 1e-12),
    "stable_adamw": (torch_frontend.StableAdamW, jax_frontend.stable_adamw, 1e-9),
    "from torch.optim": (torch.optim.AdamW, jax_frontend.adamw, 1e-9),
    "to optax": (torch_frontend.AdamW, optax.adamw, 1e-9),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_model_that_changes_framework_in_the_middle_is_one_that_does_not(tmp_path: Path, pair: str) -> None:
    """50 + 50 steps in both directions against 100 in either framework, in float64."""
    in_torch, in_jax, bound = PAIRS[pair]
    with float64():
        through: dict[Any, Any] = {}
        for side, make in ((InTorch, in_torch), (InJax, in_jax)):
            run: Any = side(make)
            run.steps(range(50))
            run.save(tmp_path / side.__name__)
            run.steps(range(50, 100))
            through[side] = run.parameters()
        for start, end, make in ((InTorch, InJax, in_jax), (InJax, InTorch, in_torch)):
            changed: Any = end(make)
            changed.load(tmp_path / start.__name__)
            changed.steps(range(50, 100))
            for unchanged in through.values():
                for a, b in zip(jax.tree.leaves(changed.parameters()), jax.tree.leaves(unchanged), strict=True):
                    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)
