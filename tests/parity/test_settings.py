"""The settings: extreme gradients do what they are said to do, and schedules and groups are seen."""

import itertools
import math

import numpy as np
import pytest

from penstock.core.codings.selection import LOWEST_DECAY
from penstock.core.dtypes import PARAMETER_DTYPES, compute_dtype
from penstock.core.rules import adam_family
from penstock.core.rules.adam_family import Moments, mean_square
from penstock.parity import Case, register, run, unregister
from penstock.parity.backends import choose
from penstock.parity.backends.protocol import flushes, is_peer
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.bounds import smallest_normal
from penstock.parity.cases import all_cases, select
from penstock.parity.gradients import LARGEST, NONFINITE, NONFINITE_AT, SPIKE_EVERY
from penstock.parity.rules import FAMILY, OTHERS, RULES
from penstock.parity.settings import SETTINGS, Schedule
from penstock.parity.truth import truths
from penstock.parity.updates import run_cases

OURS = [backend.name for backend in choose(None, quick=True)[0] if not is_peer(backend) and backend.name != "walk"]


def flat_after(backend: str, case: Case, steps: int) -> dict[str, np.ndarray]:
    """What a backend stores after some steps: flat float64 arrays over all tensors."""
    (chosen,) = choose([backend])[0]
    running = chosen.start(case)
    for step in range(1, steps + 1):
        running.step(case.problem.gradients(step))
    held = running.held()
    return {
        quantity: case.problem.flatten({name: getattr(tensor, quantity) for name, tensor in held.items()})
        for quantity in ("parameter", "exp_avg", "exp_avg_sq")
    }


def test_every_setting_meets_every_rule_and_each_of_its_dtypes() -> None:
    met = {(case.problem.setting.name, case.problem.rule.name, case.problem.dtype) for case in all_cases()}
    expected = {
        (setting.name, rule.name, dtype)
        for setting in SETTINGS
        for rule in FAMILY.values()
        for dtype in setting.dtypes
        if not (setting.decouple_lr and rule.l2)
    }
    assert {each for each in met if each[1] in FAMILY} == expected
    for rule in OTHERS:
        assert {("B", rule.name, dtype) for dtype in PARAMETER_DTYPES} <= met
        assert {setting for setting, of, dtype in met if of == rule.name and dtype == "float32"} >= {
            "shapes",
            "schedules",
            "huge",
        }
    for name in RULES.keys() - FAMILY.keys() - {rule.name for rule in OTHERS}:  # of whole matrices
        assert {each for each in met if each[1] == name} == {("B", name, dtype) for dtype in ("float32", "float64")}
    sizes = {math.prod(shape) for setting in SETTINGS for shape in setting.shapes.values()}
    assert {0, 1} <= sizes
    assert max(sizes) > 10**6


def test_a_schedule_warms_up_and_falls_and_its_decay_rises() -> None:
    schedule = Schedule(warm_up=4, period=20, lowest=0.1, decay_rises=True)
    factors = [schedule.learning_rate(step) for step in range(1, 26)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[3:20]))
    assert factors[19:] == pytest.approx([0.1] * 6)
    decays = [schedule.weight_decay(step) for step in range(1, 26)]
    assert decays == sorted(decays)
    assert (decays[0] < 0.51, decays[-1]) == (True, 1.0)
    assert Schedule().weight_decay(7) == 1.0


@pytest.mark.parametrize("rule", FAMILY.values(), ids=lambda rule: rule.name)
def test_a_group_leaves_the_state_dtypes_as_they_are(rule) -> None:
    for case in all_cases():
        if case.problem.rule is rule and case.problem.setting.group is not None:
            sides = {1.0 - given.beta2 >= LOWEST_DECAY for given in case.problem.group_hyperparameters()}
            assert len(sides) == 1


@pytest.mark.parametrize("rule", ["stable_adamw", "adamw"])  # Adam's L2 term is not constant
@pytest.mark.parametrize("backend", OURS)
def test_a_constant_gradient_gives_a_direction_of_one(backend: str, rule: str) -> None:
    for case in select(f"constant/{rule}/*"):
        held = flat_after(backend, case, 30)
        direction = np.abs(held["exp_avg"]) / np.sqrt(held["exp_avg_sq"])  # without eps, a hundredth of the smallest gradients
        # in bfloat16, where a constant mean is stored again and again, m is off by 2^-9 and the root of v by 2^-10
        assert np.abs(direction - 1.0).max() <= 2.0**-8, case.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_denormal_gradients_are_and_so_are_the_squares_of_the_others(dtype: str) -> None:
    case = select(f"denormal/adamw/{dtype}/*")[0]
    gradients = np.abs(np.stack([case.problem.gradients(step)["matrix"].reshape(-1) for step in (1, 2, 3)]))
    gradients = gradients.astype(np.float64)
    for values in (gradients[:, 1::2], gradients[:, ::2] ** 2):
        assert 0.5 < np.mean((values > 0.0) & (values < smallest_normal(dtype))) < 0.95
    if dtype != "float16":  # float16's are normal numbers of the compute dtype
        assert (gradients[:, 1::2].astype(np.float32) ** 2 == 0.0).all()


@pytest.mark.parametrize("rule", ["stable_adamw", "adamw"])
def test_subnormal_moments_are_bounded_by_a_few_of_the_smallest_spacings(rule: str) -> None:
    """After as many steps as one likes: a rounding lives for 1/(1-beta) steps."""
    (case,) = select(f"denormal/{rule}/float32/*")
    spacing, beta1, beta2 = 2.0**-149, *case.problem.rule.betas
    for steps, truth in truths(case.problem, [case.storage], [1, 30, 100]).items():
        gradual, flushing = (truth.bounds_of(case.storage, flushes=flushes) for flushes in (False, True))
        for quantity, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)):
            true = np.abs(truth.values[quantity])
            tiny = true < smallest_normal("float32")
            assert tiny.mean() > 0.3
            lived = (1.0 - beta**steps) / (1.0 - beta)
            roundings = 16.0 * 2.0**-24 * 8.0 * smallest_normal("float32")  # the usual ones, of the largest gradients
            assert (gradual[quantity].elements[tiny] <= (2.0 * lived + 1.0) * spacing + roundings).all()
            assert (gradual[quantity].elements[tiny] >= spacing / 2.0).all()
            assert (flushing[quantity].elements[tiny] >= true[tiny]).all()  # zeros are within it
            assert (gradual[quantity].elements[tiny] < true[tiny]).mean() > (0.9 if quantity == "exp_avg" else 0.3)


def test_bounds_of_settings_without_subnormal_numbers_are_the_same_for_every_device() -> None:
    (case,) = select("B/adamw/float32/*")
    truth = truths(case.problem, [case.storage], [1])[1]
    assert truth.gradual is truth.bounds
    assert [setting.name for setting in SETTINGS if setting.subnormal] == ["denormal"]


class Flushes(NumpyBackend):
    """The specification on a device that flushes what it reads and writes."""

    name = "flushes"

    def __init__(self, *, says_so: bool) -> None:
        self.flushes_subnormals = says_so

    def start(self, case: Case) -> NumpyRun:
        return RunThatFlushes(case)


def flushed(array: np.ndarray) -> np.ndarray:
    return np.where(np.abs(array) < smallest_normal("float32"), array.dtype.type(0), array)


class RunThatFlushes(NumpyRun):
    def step(self, gradients):
        super().step({name: flushed(gradient) for name, gradient in gradients.items()})
        for name, state in self.states.items():
            self.states[name] = state._replace(fields=tuple(map(flushed, state.fields)))


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("rule", FAMILY)
def test_a_flushing_device_is_within_the_bounds_for_such_devices_only(rule: str, says_so: bool) -> None:
    cases = select(f"denormal/{rule}/float32/*")
    rows = run_cases([Flushes(says_so=says_so)], cases, [1, 100])
    assert all(row.within for row in rows if row.quantity == "parameter")
    # Adam's moments hold the parameter, by the L2 term, and are not small numbers
    assert all(row.within for row in rows) == (says_so or rule == "adam")


def test_the_backends_say_whether_they_flush() -> None:
    """XLA does on a CPU; numpy, torch and Triton's interpreter do not."""
    said = {backend.name: flushes(backend) for backend in choose(None, quick=True)[0]}
    assert {name for name, flush in said.items() if flush} <= {"jax", "walk", "optax"}
    assert not said["numpy"]


class DropsSmallGradients(NumpyBackend):
    name = "drops"

    def start(self, case: Case) -> NumpyRun:
        return RunThatDrops(case)


class RunThatDrops(NumpyRun):
    def step(self, gradients):
        super().step({name: np.where(np.abs(g) < 1e-6, g.dtype.type(0), g) for name, g in gradients.items()})


@pytest.fixture
def drops():
    register(DropsSmallGradients())
    yield "drops"
    unregister("drops")


def test_flushing_what_is_no_underflow_breaks_a_bound(drops: str) -> None:
    """float16's denormal gradients are ordinary numbers in float32: nobody may drop them."""
    rows = run([drops], "denormal/adamw/float16/kahan/*", [1])
    assert not all(row.within for row in rows)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_huge_gradients_reach_the_top_and_are_not_bounded(dtype: str) -> None:
    case = select(f"huge/adamw/{dtype}/*")[0]
    sizes = np.concatenate([np.abs(case.problem.gradients(step)["matrix"].reshape(-1)) for step in (1, 2)])
    assert 0.9 * LARGEST[dtype] < sizes.max() <= min(LARGEST[dtype], adam_family.LARGEST[np.finfo(compute_dtype(dtype)).bits])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rule", FAMILY.values(), ids=lambda rule: rule.name)
def test_a_gradient_above_the_bound_enters_as_the_bound_everywhere(rule, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its square would be infinite, and the parameter NaN one update later. Update clipping sees the whole gradient."""
    (case,) = select(f"B/{rule.name}/{dtype}/*")
    correct = type(case.problem).gradients
    largest = adam_family.LARGEST[np.finfo(dtype).bits]

    def after(backend: str, *values: float) -> dict[str, np.ndarray]:
        def gradients(problem, step):
            found = correct(problem, step)
            if step == 2:
                found["matrix"] = found["matrix"].copy()
                found["matrix"].flat[[3, 5, 7]] = values
            return found

        monkeypatch.setattr(type(case.problem), "gradients", gradients)
        return flat_after(backend, case, 4)

    top = np.finfo(dtype).max
    for backend in OURS:
        with np.errstate(over="ignore"):  # of the mean square
            found, expected = after(backend, 1.01 * largest, -1.01 * largest, top), after(backend, largest, -largest, largest)
        for quantity, array in found.items():
            assert np.isfinite(array).all()
            if not (rule.clips_update and quantity in ("parameter", "compensation")):
                assert np.array_equal(array, expected[quantity])


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("rule", FAMILY.values(), ids=lambda rule: rule.name)
def test_nonfinite_elements_spread_as_far_as_the_rule_says(rule, backend: str) -> None:
    """Only that element; under StableAdamW, whose mean is over the tensor, that tensor. All others keep every bit."""
    (case,), (clean,) = select(f"nonfinite/{rule.name}/float32/*"), select(f"shapes/{rule.name}/float32/*")
    found, usual = flat_after(backend, case, NONFINITE_AT + 2), flat_after(backend, clean, NONFINITE_AT + 2)
    struck = np.zeros(usual["parameter"].size, bool)
    struck[[place for place, _ in NONFINITE]] = True
    for quantity in ("exp_avg", "exp_avg_sq"):
        assert np.array_equal(~np.isfinite(found[quantity]), struck)
        assert np.array_equal(found[quantity][~struck], usual[quantity][~struck])
    numbers = case.problem.tensor_numbers()
    lost = np.isin(numbers, numbers[struck]) if rule.clips_update else struck
    assert np.array_equal(np.isnan(found["parameter"]), lost)
    assert np.array_equal(found["parameter"][~lost], usual["parameter"][~lost])
    assert not lost.all()


def test_a_planted_spike_is_clipped() -> None:
    (case,) = select("B/stable_adamw/float32/*")
    before = flat_after("numpy", case, SPIKE_EVERY - 1)
    for step, low, high in ((SPIKE_EVERY - 1, 0.0, 2.0), (SPIKE_EVERY, 20.0, 100.0)):
        gradient = case.problem.flatten(case.problem.gradients(step))
        exp_avg_sq = flat_after("numpy", case, step)["exp_avg_sq"]
        assert low < mean_square(case.problem.hyperparameters, (None, exp_avg_sq), gradient, np) < high
    after = flat_after("numpy", case, SPIKE_EVERY)
    held = Moments(after["exp_avg"], after["exp_avg_sq"])
    unclipped = 1e-4 * np.abs(held.exp_avg / (np.sqrt(held.exp_avg_sq) + 1e-6) + 0.1 * before["parameter"])
    taken = np.linalg.norm(after["parameter"] - before["parameter"]) / np.linalg.norm(unclipped)
    assert 0.1 < taken < 0.25  # 1/sqrt(mean square)


def test_a_backend_without_the_abilities_is_refused_these_cases() -> None:
    class Plain(NumpyBackend):
        name = "plain"
        abilities = frozenset()

    register(Plain())
    try:
        settings = {row.case.split("/")[0] for row in run(["plain"], "*/adamw/float32/*", [1])}
    finally:
        unregister("plain")
    assert settings.isdisjoint({"schedule", "schedules", "groups", "decoupled", "betas"})
    assert {"B", "denormal", "nonfinite"} <= settings
