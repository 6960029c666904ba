from collections.abc import Mapping

import numpy as np
import pytest

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.parity import Case, Held, register, run, unregister
from penstock.parity.backends import PEERS, choose
from penstock.parity.backends.jax_arguments import float64
from penstock.parity.backends.specification import NumpyBackend
from penstock.parity.cases import all_cases, select
from penstock.parity.sections import SECTIONS
from penstock.parity.sections import select as select_sections
from penstock.parity.suite import run_sections
from penstock.parity.truth import truths


def test_every_rule_dtype_compensation_and_setting_has_a_case() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    for rule in ("stable_adamw", "adamw", "adam"):
        for stored in ("float64/none", "float32/none", "bfloat16/none", "bfloat16/kahan", "bfloat16/split", "float16/kahan"):
            for setting in ("B", "decay", "shapes"):
                assert f"{setting}/{rule}/{stored}/state-default" in names


def test_a_part_of_a_name_selects_and_is_not_mistaken_for_a_longer_one() -> None:
    assert {case.problem.rule.name for case in select("adam")} == {"adam"}
    assert {case.problem.dtype for case in select("B/*/float16/*")} == {"float16"}
    with pytest.raises(InvalidArgumentError, match="no case matches 'ada'"):
        select("ada")


def test_the_triton_kernels_run_only_where_there_is_a_gpu_or_they_are_named() -> None:
    _, reasons = choose(None)
    assert "triton" not in reasons or "--backend triton" in reasons["triton"]


@pytest.mark.parametrize("steps", [[], [0], [1, -1], [1.5]])
def test_no_steps_are_no_verdict(steps: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be numbers of updates from 1 on"):
        run(["numpy"], "B/adamw/float32/*", steps)


def test_cases_that_all_backends_refuse_are_no_verdict() -> None:
    with pytest.raises(RefusedError, match="refuse every one of these cases"):
        run(["numpy"], "memory", [1])


def test_a_run_that_names_no_backend_leaves_peers_out() -> None:
    rows = run(None, "B/adamw/float64/none/state-default", [1])
    assert {row.backend for row in rows}.isdisjoint(backend.name for backend in PEERS)
    assert all(row.within for row in rows)


def test_gradients_that_all_backends_share_cannot_be_changed() -> None:
    (case,) = select("B/adamw/float32/*")
    with pytest.raises(ValueError, match="read-only"):
        case.problem.gradients(1)["matrix"] *= 2


def test_a_run_repeats_itself_exactly() -> None:
    assert run(["numpy"], "B/adamw/*", [5]) == run(["numpy"], "B/adamw/*", [5])


def test_gradients_are_those_of_the_dtype_and_the_same_for_all() -> None:
    (case,) = select("B/adamw/bfloat16/none/state-default")
    (other,) = select("B/adamw/bfloat16/split/state-default")
    gradients = case.problem.gradients(7)["matrix"]
    assert gradients.dtype.name == "bfloat16"
    assert np.array_equal(gradients, other.problem.gradients(7)["matrix"])


def test_the_longest_run_does_not_include_odd_shapes() -> None:
    (case,) = select("shapes/adamw/float32/*")
    assert sorted(truths(case.problem, [case.storage], [1, 100, 2000])) == [1, 100]


class PlainAdamW:
    """An optimizer of somebody else: Adam's own formulas, in float32, without compensation, its moments not shown."""

    name = "plain"

    def __init__(self, raises_at: int | None = None, nan_at: int | None = None) -> None:
        self.raises_at, self.nan_at = raises_at, nan_at

    def unavailable(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        return None if (case.problem.rule.name, case.problem.dtype) == ("adamw", "float32") else "AdamW in float32 only"

    def start(self, case: Case) -> "PlainRun":
        return PlainRun(case, self.raises_at, self.nan_at)


class PlainRun:
    def __init__(self, case: Case, raises_at: int | None, nan_at: int | None) -> None:
        self.given = case.problem.hyperparameters
        self.parameters = case.problem.initial_parameters()
        self.m = {name: np.zeros_like(p) for name, p in self.parameters.items()}
        self.v = {name: np.zeros_like(p) for name, p in self.parameters.items()}
        self.t, self.raises_at, self.nan_at = 0, raises_at, nan_at

    @np.errstate(all="ignore")  # gradients that are not finite are among the cases
    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.t += 1
        if self.t == self.raises_at:
            raise RuntimeError("out of memory")
        h = self.given
        for name, g in gradients.items():
            self.m[name] = h.beta1 * self.m[name] + (1 - h.beta1) * g
            self.v[name] = h.beta2 * self.v[name] + (1 - h.beta2) * g * g
            m, v = self.m[name] / (1 - h.beta1**self.t), self.v[name] / (1 - h.beta2**self.t)
            direction = m / (np.sqrt(v) + h.eps) + h.weight_decay * self.parameters[name]
            self.parameters[name] = self.parameters[name] - h.learning_rate * direction
            if self.t == self.nan_at and self.parameters[name].size:
                self.parameters[name].flat[-1] = np.nan

    def held(self) -> dict[str, Held]:
        return {name: Held(parameter) for name, parameter in self.parameters.items()}


def run_plain(backend: PlainAdamW, pattern: str | None, steps: list[int]):
    register(backend)
    try:
        return run(["plain"], pattern, steps)
    finally:
        unregister("plain")


def test_an_optimizer_of_ones_own_is_judged() -> None:
    rows = run_plain(PlainAdamW(), "updates", [1, 20])
    assert {row.case.split("/")[0] for row in rows} >= {"A", "B", "decay", "shapes"}
    assert not {"schedule", "groups"} & {row.case.split("/")[0] for row in rows}  # it did not say that it follows them
    assert {row.quantity for row in rows} == {"parameter"}
    assert [row for row in rows if not row.within] == []


def test_an_error_of_a_backend_breaks_only_its_own_rows() -> None:
    rows = run_plain(PlainAdamW(raises_at=3), "B/adamw/float32/*", [1, 5])
    assert [row.within for row in rows] == [True, False]
    assert rows[1].failure == "step() number 3: RuntimeError: out of memory"


def test_a_nan_is_never_within_a_bound() -> None:
    (row,) = run_plain(PlainAdamW(nan_at=2), "B/adamw/float32/*", [2])
    assert not row.within
    assert row.as_json()["relative_error"] is None


def test_a_name_is_given_once() -> None:
    with pytest.raises(InvalidArgumentError, match="'numpy' is taken"):
        register(NumpyBackend())


class Absent(NumpyBackend):
    name = "absent"

    def unavailable(self) -> str | None:
        return "there is no such device"


def test_a_backend_that_is_not_available_is_skipped_unless_named() -> None:
    register(Absent())
    try:
        chosen, reasons = choose(None)
        assert "absent" not in {backend.name for backend in chosen}
        assert reasons["absent"] == "there is no such device"
        with pytest.raises(RefusedError, match="'absent' cannot run here: there is no such device"):
            choose(["absent"])
    finally:
        unregister("absent")


def test_a_quick_run_leaves_the_compiler_out() -> None:
    chosen, reasons = choose(None, quick=True)
    assert "compiled" not in {backend.name for backend in chosen}
    assert "compiled" in reasons


@pytest.mark.parametrize("older", [False, True])
def test_float64_is_switched_on_for_a_while_in_older_versions_of_jax_too(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    experimental = pytest.importorskip("jax.experimental")
    if older:
        if not hasattr(experimental, "enable_x64"):
            monkeypatch.setattr(experimental, "enable_x64", jax.enable_x64, raising=False)
        monkeypatch.delattr(jax, "enable_x64", raising=False)
    with float64():
        assert jax.numpy.zeros(()).dtype == np.float64
    assert jax.numpy.zeros(()).dtype == np.float32


def test_sections_are_told_apart_by_the_names_of_their_cases() -> None:
    for section in SECTIONS:
        cases = section.cases(quick=True)
        assert cases
        assert {case.name for case in cases} <= {case.name for case in section.cases(quick=False)}
        assert section.name == "updates" or all(case.name.startswith(f"{section.name}/") for case in cases)
        ((chosen, found),) = select_sections(section.name)
        assert chosen is section
        assert [case.name for case in found] == [case.name for case in section.cases(quick=False)]
    names = [case.name for section in SECTIONS for case in section.cases(quick=False)]
    assert len(names) == len(set(names))
    with pytest.raises(InvalidArgumentError, match=r"no case matches 'ada'.*The sections are updates, codings, events, "):
        select_sections("ada")


def test_progress_names_every_case_and_each_case_yields_a_finding() -> None:
    backends, chosen = choose(["numpy"])[0], select_sections("*/adamw/float64*")
    calls: list[tuple[str, str]] = []
    result = run_sections(backends, chosen, [1], lambda case, part: calls.append((case, part)))
    visited = {row.case for row in result.rows} | {why.case for found in result.sections for why in found.refusals}
    assert visited == {case.name for _, cases in chosen for case in cases} == {name for name, _ in calls}
