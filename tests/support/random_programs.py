"""Programs that are drawn: a graph, an optimizer, a mode of release, and the calls of a training loop with interruptions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from tests.support.random_graphs import Graph, graphs
from tests.support.twins import Twins
from tests.support.worlds import Mode, Settings

Step = tuple[str, dict[str, Any]]

MODES = [
    mode
    for mode in itertools.starmap(
        Mode,
        itertools.product(
            (None, "hold", "state"),
            (False, True),
            (None, 0.02),
            (False, True),
            (False, True),
            (False, True),
            (0, 300),
            ("propagate", "skip", "raise"),
        ),
    )
    if mode.is_possible()
]
BASE = Mode()


def changed(given: Any) -> dict[str, Any]:
    """The attributes of a dataclass that are not its defaults."""
    fields = dataclasses.fields(given)
    return {field.name: getattr(given, field.name) for field in fields if getattr(given, field.name) != field.default}


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """What is run: its repr is what a failing test prints."""

    graph: Graph
    settings: Settings
    mode: Mode
    calls: tuple[Step, ...]

    def __repr__(self) -> str:
        """What differs from the defaults."""
        graph = [changed(part) for part in self.graph.parts]
        rest = {k: v for k, v in changed(self.graph).items() if k != "parts"}
        return f"{graph} {rest} {changed(self.settings)} {changed(self.mode)} " + "; ".join(
            f"{n}({a or ''})" for n, a in self.calls
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As Hypothesis prints it."""
        printer.text(repr(self))

    @property
    def must_work(self) -> bool:
        """Whether nothing may be refused, if it has no interruptions: no overflow raises, no gradient comes in parts, no norm
        includes a layer that is not in the optimizer yet, and a scaler always has gradients to judge."""
        names = {name for name, _ in self.calls}
        return (
            not ("add_group" in names and ("clip" in names or self.mode.guarded))
            and not ("freeze" in names and self.mode.scaled)
            and self.mode.on_nonfinite != "raise"
            and not (self.graph.in_parts and self.mode.uses_parts)
        )

    def run(self) -> Twins:
        """Run it in both worlds."""
        twins = Twins(self.graph, self.settings, self.mode)
        for name, arguments in self.calls:
            getattr(twins, name)(**arguments)
        twins.finish()
        return twins


def is_drawn(graph: Graph, name: str, arguments: dict[str, Any]) -> bool:
    """Whether a program with this graph may have this call.

    Two guards whose losses cross are not among the calls at all.
    """
    # No fault: a part that runs its own backward() leaves gradients in `.grad` under torch.autograd.grad, too.
    return name != "grad_values" or not any(part.kind == "hidden" for part in graph.parts)


FINE: list[Step] = [
    ("evaluate", {}),
    ("grad_values", {}),
    ("set_setting", {"name": "lr"}),
    ("set_setting", {"name": "weight_decay"}),
    ("write", {"part": 0, "value": 0.9}),
    ("write", {"part": 1, "value": 0.0}),
    ("freeze", {"part": 0}),
    ("freeze", {"part": 1}),
    ("round_trip", {}),
    ("save", {}),
    ("load", {}),
    ("add_group", {}),
    ("remove", {}),
    ("zero_grad", {}),
    ("clear_gradients", {"how": "model"}),
]
"""Calls between two steps, which always work."""

ROUGH: list[Step] = [
    *FINE,
    ("paused", {}),
    ("step", {}),
    ("clear_gradients", {"how": "one"}),
    ("clear_gradients", {"how": "zeros"}),
    ("clip", {}),
    ("clip", {"declared": True}),
    ("scale_a_gradient", {}),
    ("again", {}),
    ("unscale", {}),
    ("update_scale", {}),
    ("backward", {}),
    ("backward", {"guarded": False}),
    ("backward", {"retain": True}),
    ("backward", {"last": False}),
    ("backward", {"fail": 0}),
    ("backward", {"fail": 1}),
    ("backward", {"fail": 0, "second_pass": True}),
    ("backward", {"fail": 1, "second_pass": True}),
    ("backward", {"fail": 1, "in_forward": True}),
    ("backward", {"spoil": 1}),
    ("backward", {"freeze": 0}),
]
"""Calls at any place, which may be refused."""


@st.composite
def settings(draw: Callable[..., Any], dtype: torch.dtype, mode: Mode) -> Settings:
    """Draw an optimizer; a global norm refuses parameters that are not the model's."""
    rule = draw(st.sampled_from([0, 1, 2]))
    compensations = {torch.bfloat16: ["auto", "kahan", "none"], torch.float16: ["auto", "none"]}.get(dtype, ["auto"])
    arguments: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "betas": st.sampled_from([(0.8, 0.95), (0.0, 0.9), (0.9, 0.0)]),
                "weight_decay": st.sampled_from([0.0, 0.1]),
                "maximize": st.just(True),
                "eps": st.just(1e-5),
                "capturable": st.just(True),
                **({"decouple_lr": st.just(True), "max_lr": st.just(0.1)} if rule != 2 else {}),
            },
        )
    )
    if arguments.get("decouple_lr"):
        arguments["weight_decay"] = 1e-4
    outside = mode.exact_norm is None and draw(st.sampled_from([False, False, True]))
    return Settings(rule, dtype, draw(st.sampled_from(compensations)), tuple(arguments.items()), outside)


@st.composite
def programs(draw: Callable[..., Any], rough: bool) -> Program:
    """Draw a program; rough: with interruptions that may be refused."""
    dtype = draw(st.sampled_from([torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16]))
    mode = draw(st.one_of(st.just(BASE), st.sampled_from(MODES)))
    if mode.scaled and dtype is torch.float16:
        dtype = torch.bfloat16  # torch's scaler refuses float16 gradients
    graph = draw(graphs(simple=dtype in (torch.bfloat16, torch.float16)))
    chosen = draw(settings(dtype, mode))
    calls: list[Step] = []
    for _ in range(draw(st.integers(1, 4))):
        several = draw(st.integers(1, 3)) if mode.accumulation or mode.lenient else 1
        spoil = {"spoil": 0} if mode.on_nonfinite != "propagate" or mode.scaled else {}
        spoil = draw(st.sampled_from([{}, {}, {}, spoil]))
        loop: list[Step] = [("backward", {"last": n == several - 1} | spoil) for n in range(several)]
        loop += [("clip", {"declared": True})] if draw(st.booleans()) and mode.guarded and not mode.scaled else []
        loop += [("step", {}), ("update_scale", {}), ("zero_grad", {})]
        for _ in range(draw(st.integers(0, 2))):
            if rough:
                loop.insert(draw(st.integers(0, len(loop))), draw(st.sampled_from(ROUGH)))
            else:
                loop.insert(draw(st.sampled_from([0, len(loop)])), draw(st.sampled_from(FINE)))
        calls += loop
    return Program(graph, chosen, mode, tuple(call for call in calls if is_drawn(graph, *call)))
